"""A trained network as one safetensors file: weights, and beside them as text all it takes to write.

The format has no place for code: a JSON header with names, types, shapes and places, then the numbers. In its
metadata are the entries of checkpoint/checkpoint.py's `gpt`, each as JSON, so that sampling needs this file alone.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from system.errors import UserError
from system.files import write_output

SUFFIX = ".safetensors"
ENTRIES = ("model", "tokenizer", "step", "validation", "format")


def write_safetensors(path: Path, entry: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Writes the file, whole or not at all.

    Args:
        entry: a checkpoint's `gpt` entry.
        weights: the network's state_dict. Tensors that share memory are written once each; loading ties them again.

    Raises:
        UserError: a place that cannot be written.
    """
    content = save(
        {name: tensor.cpu().clone().contiguous() for name, tensor in weights.items()},
        {name: json.dumps(entry[name]) for name in ENTRIES},
    )
    write_output(path, content)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `gpt` entry and the weights. Raises UserError for what is no file of ours, or damaged."""
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}. Write one with: python sample.py export={path.name}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            entry = {name: json.loads(metadata[name], object_pairs_hook=_once) for name in ENTRIES}
            return entry, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no dict
    except KeyError as error:
        reason = f"its metadata has no {error}"
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
    raise UserError(f"{path} is no export of sample.py, or it is damaged: {reason}. Export it again, or use another.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where a key comes twice: two readers could believe two values."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key comes twice in its metadata")
    return dict(pairs)
