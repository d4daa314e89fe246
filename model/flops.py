"""What a forward pass and a training step cost on paper: floating-point operations and bytes. Needs no torch.

Letters as in model/attention.py. A matrix product (n, k) @ (k, m) counts 2 n k m operations, a multiplication and
an addition each. Norms, softmax, embeddings and the optimiser are left out, as everyone does: they are a few
percent of the operations, though not always of the time. A backward pass counts twice its forward pass, one product
for each of the two factors' gradients, so a training step is three forward passes.

Sources: Kaplan et al. 2020 (arXiv:2001.08361, section 2.1) for 6 N operations a trained token, N the weights of the
matrices; Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) for the attention term beside it. Both count all
T x T pairs; here only eager attention does, because it computes them all and then throws the masked ones away.
"""

from model.activations import ACTIVATIONS
from model.config import GPTConfig

IMPLEMENTATIONS = ("eager", "sdpa", "sliding_window")


def score_matrix_bytes(
    context_length: int, num_heads: int = 1, num_layers: int = 1, sequences: int = 1, bytes_per_number: int = 4
) -> int:
    """The memory of eager attention's scores: T^2 numbers a head, layer and sequence; float32 has 4 bytes."""
    return sequences * num_layers * num_heads * context_length**2 * bytes_per_number


def saved_bytes(config: GPTConfig, context_length: int, sequences: int) -> int:
    """What one layer's eager attention keeps from the forward for the backward pass, beside Q, K and V; float32.

    The weights, as large as the scores; K and V, repeated a query head; the output; the mask, a byte a pair.
    """
    scores = score_matrix_bytes(context_length, config.num_heads, sequences=sequences)
    gathered = 4 * sequences * config.num_heads * context_length * config.head_dim  # the output; K or V is as large
    return scores + 3 * gathered + context_length**2


def attention_pairs(context_length: int, implementation: str, window: int | None = None) -> int:
    """Pairs of a query and a key that one head has to compute for one sequence.

    eager: T^2. sdpa: the causal half, T (T + 1) / 2. sliding_window: the same, but at most `window` keys a query.
    """
    T = context_length
    if implementation == "eager":
        return T * T
    W = min(window or T, T) if implementation == "sliding_window" else T
    return W * (W + 1) // 2 + (T - W) * W  # the first W queries see 1, 2, ... W keys, the others W


def attention_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """Forward operations of Q K^T and weights V, one sequence, all layers: two products, 2 D each, a pair and head."""
    pairs = [
        attention_pairs(context_length, implementation, config.window_of(layer)) for layer in range(config.num_layers)
    ]
    return 4 * config.d_model * sum(pairs)


def matrix_weights(config: GPTConfig) -> int:
    """Kaplan's N: the weights of all matrices that every token is multiplied by, output layer included."""
    C, D = config.d_model, config.head_dim
    in_proj = C * (config.num_heads + 2 * config.kv_heads) * D
    mlp = (ACTIVATIONS[config.mlp].inputs + 1) * C * config.mlp_width
    return config.num_layers * (in_proj + C * C + mlp) + config.vocab_size * C


def min_parameters(config: GPTConfig) -> int:
    """Weights of a network without its vectors, from its shape alone."""
    rows = (config.bigram_table_size or 0) + config.context_length * (config.positions == "learned")
    return matrix_weights(config) + rows * config.d_model


def rest_flops(config: GPTConfig, context_length: int) -> int:
    """Forward operations of everything but attention's two products, one sequence: 2 N a token."""
    return 2 * matrix_weights(config) * context_length


def forward_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """Operations of one sequence's forward pass."""
    return attention_flops(config, context_length, implementation) + rest_flops(config, context_length)


def step_flops(config: GPTConfig, context_length: int, implementation: str) -> int:
    """Operations of one sequence's share of a training step: forward, and twice that backward."""
    return 3 * forward_flops(config, context_length, implementation)


def crossing_by_flops(config: GPTConfig, implementation: str, longest: int = 2**30) -> int | None:
    """The context length from which on attention takes as many operations as the rest of the model. None: from none.

    Eager attention takes 4 C L T operations a token and the rest 2 N, so the length is N / (2 C L); SDPA
    twice that.
    """
    low, high = 0, longest  # attention's share only grows with the length
    if attention_flops(config, high, implementation) < rest_flops(config, high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if attention_flops(config, middle, implementation) < rest_flops(config, middle):
            low = middle
        else:
            high = middle
    return high
