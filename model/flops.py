"""FLOPs and memory of a forward pass and a training step, computed from the config. Does not import torch.

Letters as in model/attention.py. A matrix product (n, k) @ (k, m) counts as 2 n k m FLOPs. As usual, norms, softmax,
embeddings and the optimizer are not counted: they are a few percent of the FLOPs, though not always of the time.
A backward pass counts as two forward passes (one product for the gradient of each factor), so a training step counts
as three.

Sources: Kaplan et al. 2020 (arXiv:2001.08361, section 2.1) for 6 N FLOPs per training token, where N is the number of
matrix parameters; Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) for the attention term. Both count all
T x T pairs. Here only eager attention does, because it computes all scores before it masks them.
"""

from model.activations import ACTIVATIONS
from model.config import GPTConfig

IMPLEMENTATIONS = ("eager", "sdpa", "sliding_window")


def score_matrix_bytes(
    context_length: int, num_heads: int = 1, num_layers: int = 1, sequences: int = 1, bytes_per_number: int = 4
) -> int:
    """Memory of the scores of eager attention: T^2 numbers per head, layer and sequence."""
    return sequences * num_layers * num_heads * context_length**2 * bytes_per_number


def saved_activation_bytes(config: GPTConfig, context_length: int, sequences: int) -> int:
    """Memory that one layer of eager attention saves for the backward pass, in float32, not counting Q, K and V.

    These are the weights (as large as the scores), K and V repeated for every query head, the output, and the mask
    (one byte per pair).
    """
    scores = score_matrix_bytes(context_length, config.num_heads, sequences=sequences)
    output = 4 * sequences * config.num_heads * context_length * config.head_dim  # repeated K and V are as large
    return scores + 3 * output + context_length**2


def attention_pairs(context_length: int, implementation: str, window: int | None = None) -> int:
    """Number of query-key pairs that one head computes for one sequence.

    eager: T^2. sdpa: the causal half, T (T + 1) / 2. sliding_window: as sdpa, with at most `window` keys per query.
    """
    T = context_length
    if implementation == "eager":
        return T * T
    W = min(window or T, T) if implementation == "sliding_window" else T
    return W * (W + 1) // 2 + (T - W) * W  # the first W queries have 1, 2, ... W keys, the others have W


def attention_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """FLOPs of the two attention products in a forward pass of one sequence: 2 x 2 D per pair, head and layer."""
    pairs = [
        attention_pairs(context_length, implementation, config.window_of(layer)) for layer in range(config.num_layers)
    ]
    return 4 * config.d_model * sum(pairs)


def matmul_parameters(config: GPTConfig) -> int:
    """Parameters of all matrices that every token is multiplied by, including the output layer: Kaplan's N."""
    C, D = config.d_model, config.head_dim
    in_proj = C * (config.num_heads + 2 * config.resolved_num_kv_heads) * D
    mlp = (ACTIVATIONS[config.mlp].inputs + 1) * C * config.resolved_mlp_hidden
    return config.num_layers * (in_proj + C * C + mlp) + config.vocab_size * C


def min_parameters(config: GPTConfig) -> int:
    """Lower bound of the number of parameters: all matrices, without biases and norm weights."""
    embeddings = (config.bigram_table_size or 0) + config.context_length * (config.positions == "learned")
    return matmul_parameters(config) + embeddings * config.d_model


def non_attention_flops(config: GPTConfig, context_length: int) -> int:
    """FLOPs of everything except the attention products in a forward pass of one sequence: 2 N per token."""
    return 2 * matmul_parameters(config) * context_length


def forward_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """FLOPs of a forward pass of one sequence."""
    return attention_flops(config, context_length, implementation) + non_attention_flops(config, context_length)


def train_step_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """FLOPs of a training step (forward and backward pass), per sequence."""
    return 3 * forward_flops(config, context_length, implementation)


def crossover_length(config: GPTConfig, implementation: str, longest: int = 2**30) -> int | None:
    """Smallest context length at which attention takes at least as many FLOPs as the rest. None: there is none.

    Eager attention takes 4 C L T FLOPs per token and the rest takes 2 N, so the length is N / (2 C L); for SDPA it is
    twice that.
    """
    low, high = 0, longest  # binary search: attention's share grows with the length
    if attention_flops(config, high, implementation) < non_attention_flops(config, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if attention_flops(config, middle, implementation) < non_attention_flops(config, middle):
            low = middle
        else:
            high = middle
    return high
