"""Exports a trained network as a single safetensors file, which contains everything needed for sampling.

The format cannot contain code: it is a JSON header with names, dtypes, shapes and offsets, followed by the data.
The metadata has the entries of the checkpoint's `gpt` dictionary (checkpoint/checkpoint.py), each as JSON.
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
    """Writes the file atomically.

    Args:
        entry: a checkpoint's `gpt` entry.
        weights: the network's state_dict. Tied tensors are written once for each name; loading ties them again.

    Raises:
        UserError: the file cannot be written.
    """
    content = save(
        {name: tensor.cpu().clone().contiguous() for name, tensor in weights.items()},
        {name: json.dumps(entry[name]) for name in ENTRIES},
    )
    write_output(path, content)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the `gpt` entry and the weights. Raises UserError if the file is damaged or not one of our exports."""
    if not path.is_file():
        raise UserError(f"There is no checkpoint {path}. Write one with: python sample.py export={path.name}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            entry = {name: json.loads(metadata[name], object_pairs_hook=unique_keys) for name in ENTRIES}
            return entry, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
    except KeyError as error:
        reason = f"its metadata has no {error}"
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
    raise UserError(f"{path} is damaged, or not an export of sample.py: {reason}. Export it again, or use another.")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for a duplicate key, which different parsers could read differently."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("duplicate key in its metadata")
    return dict(pairs)
