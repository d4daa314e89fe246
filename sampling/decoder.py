"""Incremental decoding: with a KV cache, a new token costs one token's work.

    prefill    all tokens of a prompt in one pass, which fills the caches (sampling/kv_cache.py)
    step       one token a sequence: its key and value are added, and its query looks at all that are there

Both are GPT.forward: `GeneralDecoder`. For networks as model/gpt.py has them there is a faster step, `FastDecoder`,
which repeats parts of the network in fewer operators. It is used only after it gave the network's own logits for the
first tokens of a decoder; a network that was changed samples as changed, through GPT.forward (docs/extending.md).

A layer with a window caches that many tokens, the newest in the place of the oldest. A context that is full is shifted:
its newest half goes through the network once more, as a prompt would, and from there it fills up again. So the model
always sees at least half of its context, and what it sees it sees as in training: positions start at 0, and no layer
remembers anything of a token that has left. A pass over many tokens takes little of the time that many steps take, so a
token costs as much as inside the context, on average.

Letters in shape comments are those of model/attention.py.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from model.gpt import GPT, Block
from model.kernels.rope import expand_rope_tables, rotate
from model.layers import rms_norm
from sampling.fast_copy import inference_copy
from sampling.kv_cache import DynamicCache, make_kv_cache

logger = logging.getLogger(__name__)
CHECKED_TOKENS = 4  # over which a backend is compared with the network; more where a window is longer


def context_shift(context_length: int) -> int:
    """Tokens that leave a full context at once."""
    return max(1, context_length // 2)


class Decoder:
    """Logits of the next token, for sequences that grow by a token at a time.

    Use it in torch.inference_mode(), not under autocast, and only as long as the network's weights stay as they are.
    """

    def __init__(self, network: GPT):
        config = network.config
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.device = next(network.parameters()).device
        self.network = network
        self.backend: FastDecoder | GeneralDecoder | None = None  # chosen at the first prefill
        self.allocate(torch.empty(0, self.context_length))
        self.length = 0  # tokens in the context

    def allocate(self, ids: Tensor) -> None:
        """Takes this as the memory of the context, (B, context_length)."""
        self.ids, self.at_position = ids, ids.unbind(1)  # for each position a view (B,)
        self.no_ids = torch.full_like(self.at_position[0], -1)  # before the first token there is none, (B,)

    @property
    def context(self) -> Tensor:
        """The tokens that the next prediction depends on, (B, length)."""
        return self.ids.narrow(1, 0, self.length)

    def prefill(self, ids: Tensor) -> Tensor:
        """Starts anew with ids (B, T), T from 1 to context_length -> logits (B, vocab_size)."""
        if self.backend is None:
            self.backend = choose_decoder(self.network, ids[0])
        if self.ids.size(0) != ids.size(0):
            self.allocate(ids.new_empty(ids.size(0), self.context_length))
        self.length = ids.size(1)
        self.ids[:, : self.length] = ids
        return self.backend.prefill(self.context)

    def step(self, ids: Tensor) -> Tensor:
        """One more token a sequence, ids (B,) -> logits (B, vocab_size)."""
        position = self.length
        if position == self.context_length:
            rest = self.ids[:, context_shift(self.context_length) :]
            return self.prefill(torch.cat([rest, ids[:, None]], dim=1))
        self.at_position[position].copy_(ids)
        self.length += 1
        prev_ids = self.at_position[position - 1] if position else self.no_ids  # (B,)
        return self.backend.step(ids, prev_ids, position)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, which may then differ."""
        if samples > 1:
            self.allocate(self.ids.expand(samples, -1).contiguous())
            self.backend.expand(samples)


class GeneralDecoder:
    """Prefill and step are GPT.forward, of any network. use_cache=False: every step computes all tokens anew."""

    def __init__(self, network: GPT, use_cache: bool = True):
        self.network, self.use_cache = network, use_cache

    def prefill(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, vocab_size)."""
        self.ids, self.cache = ids, DynamicCache(len(self.network.blocks))
        return self._last_logits(ids)

    def step(self, ids: Tensor, prev_ids: Tensor, position: int) -> Tensor:
        """One more token a sequence, ids (B,), at this position -> logits (B, vocab_size)."""
        self.ids = torch.cat([self.ids, ids[:, None]], dim=1)  # (B, T)
        return self._last_logits(ids[:, None] if self.use_cache else self.ids)

    def _last_logits(self, ids: Tensor) -> Tensor:
        with evaluating(self.network):
            logits = self.network.forward(ids, self.cache) if self.use_cache else self.network.forward(ids)
        return logits[:, -1]  # (B, T, vocab_size) -> (B, vocab_size)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones."""
        self.ids = self.ids.expand(samples, -1)
        if self.use_cache:
            self.cache.expand(samples)


class FastDecoder:
    """The same, for networks as model/gpt.py has them: each token's few numbers go through as few operators as can be.

    Prefill is GPT.forward of an `inference_copy`; the step repeats GPT.embed, Block.forward and MultiHeadAttention.
    """

    def __init__(self, network: GPT):
        config = network.config
        self.network = inference_copy(network)
        self.learned = config.positions == "learned"
        self.positions = self._of_each_position()
        self.blocks = [
            CachedBlock(block, min(block.window or config.context_length, config.context_length))
            for block in self.network.blocks
        ]

    def _of_each_position(self) -> list:
        """Vectors (C,), or RoPE's widened cosines and sines, (D,) each."""
        network = self.network
        if self.learned:
            return list(network.position_embedding.weight.detach().unbind())
        cos, sin = expand_rope_tables(network.rope_cos, network.rope_sin)  # (context_length, D) each
        return list(zip(cos.unbind(), sin.unbind(), strict=True))

    def prefill(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, vocab_size)."""
        if ids.size(1) == 1:  # a step into an empty context: the same, in fewer operators
            return self.step(ids[:, 0], torch.full_like(ids[:, 0], -1), 0)
        cache = DynamicCache(len(self.blocks))
        x = self.network.hidden_states(ids, cache)  # (B, T, C)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            block.fill(layer.keys, layer.values)
        return self.network.logits(x[:, -1])

    def step(self, ids: Tensor, prev_ids: Tensor, position: int) -> Tensor:
        """One more token a sequence, ids (B,), after prev_ids (B,) -> logits (B, vocab_size)."""
        network, rope = self.network, None
        x = network.token_embedding(ids)  # (B, C), as all below
        if network.bigram_embedding is not None:
            bigrams = network.bigram_embedding
            x = x + torch.embedding(bigrams.weight, bigrams.hash(ids, prev_ids))
        if self.learned:
            x = x + self.positions[position]
        else:
            rope = self.positions[position]
        x = network.embedding_norm(x)
        if x.size(0) == 1:
            x = x.view(-1)  # (C,): a matrix times a vector takes less than times a matrix of one column
        for block in self.blocks:
            x = block.step(x, rope, position)
        return network.logits(x).view(-1, network.config.vocab_size)  # (B, vocab_size)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones."""
        for block in self.blocks:
            block.expand(samples)


class CachedBlock:
    """A block of the network with the keys and values of the tokens in the context.

    Args:
        block: of an `inference_copy`.
        capacity: tokens whose keys and values it keeps.
    """

    def __init__(self, block: Block, capacity: int):
        attention = block.attention
        self.capacity, self.cache, self.qk_norm_eps = capacity, None, attention.qk_norm_eps
        self.H, self.G, self.D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        # Plain functions: to look a layer up in its module, and to call a module, takes longer.
        self.attention_norm, self.in_proj, self.out_proj = block.attention_norm, attention.in_proj, attention.out_proj
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp.forward

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, position: int) -> Tensor:
        """Block.forward for one more token a sequence, without a dimension for T: (B, C) -> (B, C).

        For a single sequence also (C,) -> (C,).
        """
        H, G = self.H, self.G
        heads = self.in_proj(self.attention_norm(x)).view(-1, H + 2 * G, self.D)  # (B, H + 2G, D)
        if position == 0:
            self.ensure_cache(heads)
        if rope is not None or self.qk_norm_eps is not None:
            original = qk = heads.narrow(1, 0, H + G)  # (B, H + G, D)
            if self.qk_norm_eps is not None:
                qk = rms_norm(qk, self.qk_norm_eps)
            original.copy_(qk if rope is None else rotate(qk, *rope))
        gathered = self.cache.step(heads, position % self.capacity, min(position + 1, self.capacity))
        x = self.out_proj(gathered.reshape_as(x)).add_(x)  # (B, C) or (C,)
        return self.mlp(self.mlp_norm(x)).add_(x)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Starts with keys and values of T tokens, (B, G, T, D)."""
        self.ensure_cache(k)
        self.cache.fill(k, v)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, each with keys and values of its own."""
        self.fill(*(x.expand(samples, -1, -1, -1) for x in (self.cache.keys, self.cache.values)))  # (B, G, capacity, D)

    def ensure_cache(self, x: Tensor) -> None:
        """Makes a cache for keys and values of tokens like these, (B, ..., D), unless there is one."""
        if self.cache is None or not self.cache.fits(x):
            self.cache = make_kv_cache(x, self.H, self.G, self.capacity)


def choose_decoder(network: GPT, ids: Tensor) -> FastDecoder | GeneralDecoder:
    """The fastest way to decode that gives the logits of a forward pass over the last of these tokens, (T,).

    Fewer tokens than it takes to see a difference, as a single one under attention, get arbitrary ones before them.
    """
    config = network.config
    windows = {config.window_of(layer) for layer in range(config.num_layers)} - {None}
    n = min(config.context_length, max(CHECKED_TOKENS, min(windows, default=0) + 1))
    before = torch.arange(max(0, n - len(ids)), device=ids.device) % config.vocab_size
    ids = torch.cat([before, ids[-n:]])[None]  # (1, n)
    logits = GeneralDecoder(network, use_cache=False).prefill(ids)  # (1, vocab_size)
    for make, instead in ((FastDecoder, "GPT.forward"), (GeneralDecoder, "GPT.forward over all tokens")):
        try:
            decoder = make(network)
            if is_close(last_logits(decoder, ids), logits):
                return decoder
            reason = "gives other logits than the network"
        except Exception as error:  # noqa: BLE001 -- a changed network may lack anything
            reason = f"does not work for this network ({type(error).__name__}: {error})"
        warn_once(f"warning: {make.__name__} {reason}; sampling goes through {instead}, which is slower.")
    return GeneralDecoder(network, use_cache=False)


def last_logits(decoder: FastDecoder | GeneralDecoder, ids: Tensor) -> Tensor:
    """Of ids (1, n), the last by a step -> (1, vocab_size)."""
    n = ids.size(1)
    if n == 1:
        return decoder.prefill(ids)
    decoder.prefill(ids[:, :-1])
    return decoder.step(ids[:, -1], ids[:, -2], n - 1)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether logits agree to half of their type's digits."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * expected.nan_to_num().abs().max().item()
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)


@cache
def warn_once(message: str) -> None:
    """The same warning once a process."""
    logger.warning(message)


@contextmanager
def evaluating(network: GPT) -> Iterator[None]:
    """In evaluation mode, so that nothing is dropped; afterwards as before."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
