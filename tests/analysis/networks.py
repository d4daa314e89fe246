"""Small networks of every family, in which no weight and no bias is zero."""

import torch

from model.config import GPTConfig
from model.gpt import GPT

LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False}
NANOCHAT = {
    **{"positions": "rope", "norm": "rmsnorm", "norm_affine": False, "mlp": "relu2", "bias": False, "qk_norm": True},
    **{"embedding_norm": True, "tied_embeddings": False, "init": "nanochat"},
}
FAMILIES = {
    "gpt2": {},
    "gpt2, untied": {"tied_embeddings": False, "embedding_norm": True},
    "llama": LLAMA,
    "llama, grouped heads": LLAMA | {"num_kv_heads": 2, "bias": True, "tied_embeddings": True},
    "sliding window": LLAMA | {"sliding_window": 5, "window_pattern": "SL", "num_kv_heads": 1},
    "nanochat": NANOCHAT | {"logit_soft_cap": 15.0},
    "tiny": NANOCHAT | {"bigram_table_size": 64},
}
VOCAB_SIZE = 50


def random_network(family: str, **fields) -> GPT:
    """3 layers of 4 heads; in training mode, with dropout, so that a measure has to turn it off."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "context_length": 16, "num_layers": 3, "num_heads": 4, "d_model": 32}
    network = GPT(GPTConfig(**sizes | FAMILIES[family] | {"dropout": 0.3} | fields))
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(0, 0.3 if weight.dim() > 1 else 0.5)
    return network.train()
