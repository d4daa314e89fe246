"""Cost in loss of halving a full context, compared with a full context before every token.

    python -m benchmarks.context_seen [run directory, or .ckpt or .safetensors file]

Scores the end of the embedded text, which is in its validation split, in two ways: with `token_logprobs`, which sees
the same context as generation, and with one forward pass per token, which sees the full context. The last line is JSON.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoint.checkpoint import find_checkpoint, load_checkpoint
from configs.entry_point import entry_point
from data.tokenizer import encode
from sampling.sampler import token_logprobs
from system.machine import machine
from system.streams import print_note

CHARACTERS = 40_000
TEXT = Path(__file__).parents[1] / "data/shakespeare.txt"


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    """Prints both losses and one JSON line. Raises UserError if there is no checkpoint."""
    checkpoint = load_checkpoint(find_checkpoint(arguments[0] if arguments else None, "runs"))
    print_note(checkpoint.describe())
    network, length = checkpoint.network, checkpoint.network.config.context_length
    ids = torch.from_numpy(encode(checkpoint.tokenizer, TEXT.read_text(encoding="utf-8")[-CHARACTERS:]))
    ours = -token_logprobs(network, ids)[length - 1 :].mean().item()  # those with a whole context before them
    windows, targets = ids[:-1].unfold(0, length, 1), ids[length:]  # (W, length) and (W,)
    parts = zip(windows.split(256), targets.split(256), strict=True)
    full = torch.cat([F.cross_entropy(network(part)[:, -1], target, reduction="none") for part, target in parts])
    full = full.mean().item()
    print(f"{len(targets):,} tokens, nats per token: {full:.4f} with all of the context, {ours:.4f} as written "
          f"({ours / full - 1:+.2%})")  # fmt: skip
    print(json.dumps({"benchmark": "context_seen", "machine": machine(), "tokens": len(targets), "full": round(full, 4),
                      "as_written": round(ours, 4)}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main)
