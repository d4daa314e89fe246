"""Incremental decoding with a KV cache: the cost of a step is that of one token.

    prefill    one forward pass over all tokens of a prompt, which fills the KV caches (sampling/kv_cache.py)
    step       one more token per sequence: its key and value are cached, and its query attends to all cached keys

`GeneralDecoder` does both with GPT.forward. `FastDecoder` has a faster step for the architecture of model/gpt.py, which
repeats parts of the network in fewer operators. It is used only if its logits equal those of the network. So if you
change the network, sampling uses your change, through GPT.forward if need be (docs/extending.md).

A layer with a sliding window caches only that many tokens, in a ring buffer. When the context is full it is shifted:
its newest half is prefilled like a prompt, and generation continues from there. So the model always sees at least half
of its context, in the same way as in training: positions start at 0, and nothing depends on tokens outside of the
context. A prefill takes little time compared to the steps between two shifts.

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
CHECKED_TOKENS = 4  # minimum length of the sequence on which decoders are compared with the network


def context_shift(context_length: int) -> int:
    """Returns the number of tokens by which a full context is shifted."""
    return max(1, context_length // 2)


class Decoder:
    """Computes the logits of the next token, for sequences that grow by one token at a time.

    Use it in torch.inference_mode() and without autocast. The network's weights must not change meanwhile.
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
        """Sets the buffer for the tokens in the context, (B, context_length)."""
        self.ids, self.columns = ids, ids.unbind(1)  # a view (B,) for each position
        self.no_prev_ids = torch.full_like(self.columns[0], -1)  # the first token has no predecessor, (B,)

    @property
    def context(self) -> Tensor:
        """The tokens in the context, (B, length)."""
        return self.ids.narrow(1, 0, self.length)

    def prefill(self, ids: Tensor) -> Tensor:
        """Replaces the context by ids (B, T), 1 <= T <= context_length; returns logits (B, vocab_size)."""
        if self.backend is None:
            self.backend = choose_decoder(self.network, ids[0])
        if self.ids.size(0) != ids.size(0):
            self.allocate(ids.new_empty(ids.size(0), self.context_length))
        self.length = ids.size(1)
        self.ids[:, : self.length] = ids
        return self.backend.prefill(self.context)

    def step(self, ids: Tensor) -> Tensor:
        """Appends one token per sequence, ids (B,); returns logits (B, vocab_size)."""
        position = self.length
        if position == self.context_length:
            rest = self.ids[:, context_shift(self.context_length) :]
            return self.prefill(torch.cat([rest, ids[:, None]], dim=1))
        self.columns[position].copy_(ids)
        self.length += 1
        prev_ids = self.columns[position - 1] if position else self.no_prev_ids  # (B,)
        return self.backend.step(ids, prev_ids, position)

    def expand(self, samples: int) -> None:
        """Repeats the only sequence `samples` times."""
        if samples > 1:
            self.allocate(self.ids.expand(samples, -1).contiguous())
            self.backend.expand(samples)


class GeneralDecoder:
    """Decoding with GPT.forward, for any network. With use_cache=False, every step is a pass over all tokens."""

    def __init__(self, network: GPT, use_cache: bool = True):
        self.network, self.use_cache = network, use_cache

    def prefill(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, vocab_size)."""
        self.ids, self.cache = ids, DynamicCache(len(self.network.blocks))
        return self._last_logits(ids)

    def step(self, ids: Tensor, prev_ids: Tensor, position: int) -> Tensor:
        """Appends one token per sequence, ids (B,), at this position; returns logits (B, vocab_size)."""
        self.ids = torch.cat([self.ids, ids[:, None]], dim=1)  # (B, T)
        return self._last_logits(ids[:, None] if self.use_cache else self.ids)

    def _last_logits(self, ids: Tensor) -> Tensor:
        with evaluating(self.network):
            logits = self.network.forward(ids, self.cache) if self.use_cache else self.network.forward(ids)
        return logits[:, -1]  # (B, T, vocab_size) -> (B, vocab_size)

    def expand(self, samples: int) -> None:
        """Repeats the only sequence `samples` times."""
        self.ids = self.ids.expand(samples, -1)
        if self.use_cache:
            self.cache.expand(samples)


class FastDecoder:
    """Decoding with as few operators per step as possible, for the architecture of model/gpt.py.

    Prefill is GPT.forward of an `inference_copy`. The step repeats GPT.embed, Block.forward and
    MultiHeadAttention.forward for a single position.
    """

    def __init__(self, network: GPT):
        config = network.config
        self.network = inference_copy(network)
        self.has_position_embedding = config.positions == "learned"
        self.positions = self._position_tensors()
        self.blocks = [
            CachedBlock(block, min(block.window or config.context_length, config.context_length))
            for block in self.network.blocks
        ]

    def _position_tensors(self) -> list:
        """Returns for each position its embedding (C,), or its RoPE tables (cos, sin), (D,) each."""
        network = self.network
        if self.has_position_embedding:
            return list(network.position_embedding.weight.detach().unbind())
        cos, sin = expand_rope_tables(network.rope_cos, network.rope_sin)  # (context_length, D) each
        return list(zip(cos.unbind(), sin.unbind(), strict=True))

    def prefill(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, vocab_size)."""
        if ids.size(1) == 1:  # a step takes fewer operators
            return self.step(ids[:, 0], torch.full_like(ids[:, 0], -1), 0)
        cache = DynamicCache(len(self.blocks))
        x = self.network.hidden_states(ids, cache)  # (B, T, C)
        self.fill(cache, ids.size(1))
        return self.network.logits(x[:, -1])

    def fill(self, cache: DynamicCache, length: int) -> None:
        """Fills the KV caches with the first `length` tokens of another cache."""
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            block.fill(layer.keys[:, :, :length], layer.values[:, :, :length])

    def step(self, ids: Tensor, prev_ids: Tensor, position: int) -> Tensor:
        """Appends one token per sequence, ids (B,) after prev_ids (B,); returns logits (B, vocab_size)."""
        network, rope = self.network, None
        x = network.token_embedding(ids)  # (B, C)
        if network.bigram_embedding is not None:
            bigrams = network.bigram_embedding
            x = x + torch.embedding(bigrams.weight, bigrams.hash(ids, prev_ids))
        if self.has_position_embedding:
            x = x + self.positions[position]
        else:
            rope = self.positions[position]
        x = network.embedding_norm(x)
        if x.size(0) == 1:
            x = x.view(-1)  # (C,): a matrix-vector product is faster than one with a matrix of one row
        for block in self.blocks:
            x = block.step(x, rope, position)
        return network.logits(x).view(-1, network.config.vocab_size)  # (B, vocab_size)

    def expand(self, samples: int) -> None:
        """Repeats the only sequence `samples` times."""
        for block in self.blocks:
            block.expand(samples)


class CachedBlock:
    """A transformer block with its KV cache.

    Args:
        block: a block of an `inference_copy`.
        capacity: number of tokens to cache.
    """

    def __init__(self, block: Block, capacity: int):
        attention = block.attention
        self.capacity, self.cache, self.qk_norm_eps = capacity, None, attention.qk_norm_eps
        self.H, self.G, self.D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        # The layers are functions. Kept as attributes here, since nn.Module's attribute lookup is slow.
        self.attention_norm, self.in_proj, self.out_proj = block.attention_norm, attention.in_proj, attention.out_proj
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp.forward

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, position: int) -> Tensor:
        """Block.forward for one token per sequence: (B, C) -> (B, C), or (C,) -> (C,) for a single sequence."""
        H, G = self.H, self.G
        heads = self.in_proj(self.attention_norm(x)).view(-1, H + 2 * G, self.D)  # (B, H + 2G, D)
        if position == 0:
            self.ensure_cache(heads)
        if rope is not None or self.qk_norm_eps is not None:
            original = qk = heads.narrow(1, 0, H + G)  # (B, H + G, D)
            if self.qk_norm_eps is not None:
                qk = rms_norm(qk, self.qk_norm_eps)
            original.copy_(qk if rope is None else rotate(qk, *rope))
        y = self.cache.step(heads, position % self.capacity, min(position + 1, self.capacity))
        x = self.out_proj(y.reshape_as(x)).add_(x)  # (B, C) or (C,)
        return self.mlp(self.mlp_norm(x)).add_(x)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Replaces the cached keys and values by those of T tokens, (B, G, T, D)."""
        self.ensure_cache(k)
        self.cache.fill(k, v)

    def expand(self, samples: int) -> None:
        """Repeats the only sequence `samples` times."""
        self.fill(*(x.expand(samples, -1, -1, -1) for x in (self.cache.keys, self.cache.values)))  # (B, G, capacity, D)

    def ensure_cache(self, x: Tensor) -> None:
        """Creates the KV cache if there is none yet for tensors like x, (B, ..., D)."""
        if self.cache is None or not self.cache.matches(x):
            self.cache = make_kv_cache(x, self.H, self.G, self.capacity)


def choose_decoder(network: GPT, ids: Tensor) -> FastDecoder | GeneralDecoder:
    """Returns the fastest decoder whose logits equal the network's, compared on the last of these ids (T,).

    The sequence must be long enough to show differences in attention and in the window, so arbitrary tokens are
    prepended to a short one.
    """
    config = network.config
    windows = {config.window_of(layer) for layer in range(config.num_layers)} - {None}
    n = min(config.context_length, max(CHECKED_TOKENS, min(windows, default=0) + 1))
    padding = torch.arange(max(0, n - len(ids)), device=ids.device) % config.vocab_size
    ids = torch.cat([padding, ids[-n:]])[None]  # (1, n)
    reference = GeneralDecoder(network)
    logits = reference.prefill(ids)  # (1, vocab_size)
    for create, fallback in (
        (FastDecoder, "GPT.forward"),
        (GeneralDecoder, "GPT.forward over all tokens"),
    ):
        try:
            decoder = create(network)
            if is_close(_last_step(decoder, ids, reference.cache), logits):
                return decoder
            reason = "gives other logits than the network"
        except Exception as error:  # noqa: BLE001 -- a changed network may raise anything
            reason = f"does not work for this network ({type(error).__name__}: {error})"
        warn_once(f"warning: {create.__name__} {reason}; sampling goes through {fallback}, which is slower.")
    return GeneralDecoder(network, use_cache=False)


def _last_step(decoder: FastDecoder | GeneralDecoder, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Returns the logits of a step with the last of ids (1, n): (1, vocab_size). `cache` is the network's, for ids."""
    n = ids.size(1)
    if n == 1:
        return decoder.prefill(ids)
    if isinstance(decoder, FastDecoder):
        decoder.fill(cache, n - 1)  # cheaper than a prefill, whose layers are those of the step
    else:
        decoder.prefill(ids[:, :-1])
    return decoder.step(ids[:, -1], ids[:, -2], n - 1)


def is_close(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits agree to half of the digits of their dtype."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * expected.nan_to_num().abs().max().item()
    return torch.allclose(logits, expected, rtol=0, atol=tolerance, equal_nan=True)


@cache
def warn_once(message: str) -> None:
    """Logs a warning, once per process."""
    logger.warning(message)


@contextmanager
def evaluating(network: GPT) -> Iterator[None]:
    """Context with the network in evaluation mode. Restores the mode afterwards."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
