"""A directory that Hugging Face transformers loads: written from a checkpoint, and read as one.

    config.json  model.safetensors  generation_config.json  tokenizer.json  tokenizer_config.json  README.md

A directory from somebody else can hold anything. Only JSON and safetensors files are read, and only from inside it:
never a pickle or a Python file. Sizes are compared before memory is allocated.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from checkpoint.hugging_face.architectures import Architecture, architecture_for, architecture_named
from checkpoint.hugging_face.tokenizer import encoding_from_json, tokenizer_json
from checkpoint.safetensors_io import unique_keys
from data.tokenizer import serialize
from model.config import GPTConfig
from model.flops import min_parameters
from system.checks import Bounded, check
from system.errors import UserError
from system.files import write_output
from system.text import pluralize

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX, TOKENIZER = "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER)
MODELING = Path(__file__).with_name("modeling_tiny_gpt.py")
MAX_BYTES = {CONFIG: 1 << 20, INDEX: 16 << 20, TOKENIZER: 32 << 20}  # Llama 3's tokenizer.json has 17 MB
MAX_CONTAINERS = 1 << 20  # lists and dictionaries in a file: an empty list takes 64 bytes of memory for 3 of the file
MIN_TENSORS_PER_LAYER = 4
# Weights of published checkpoints that are not weights: causal masks, and frequencies that follow from the config.
_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


def is_directory(path: Path) -> bool:
    """Whether this is a directory of a Hugging Face model, or of what is left of one."""
    return path.is_dir() and (path / CONFIG).exists()


# Writing


def write_directory(
    path: Path,
    config: GPTConfig,
    tokenizer: tiktoken.Encoding,
    weights: Mapping[str, Tensor],
    card: str,
    generation: Mapping[str, Any],
) -> Architecture:
    """Writes all of the directory.

    Args:
        weights: the network's state_dict.
        card: README.md.
        generation: entries of generation_config.json.

    Returns:
        The architecture that it is written as.

    Raises:
        UserError: no architecture of transformers is this network, or a file cannot be written.
    """
    architecture = architecture_for(config)
    if path.is_dir() and any(path.iterdir()) and not (path / CONFIG).is_file():
        raise UserError(f"{path} has other files in it. Give a new directory: export={path}-hf/")
    entries = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        **{f"{name}_token_id": None for name in ("bos", "eos", "pad")},
        "dtype": "float32",
        "use_cache": True,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }
    theirs = architecture.to_weights({name: tensor.cpu() for name, tensor in weights.items()}, config)
    contents = {
        WEIGHTS: save({name: tensor.clone().contiguous() for name, tensor in theirs.items()}, {"format": "pt"}),
        TOKENIZER: tokenizer_json(tokenizer).encode(),
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(generation),
        "README.md": card.encode(),
        CONFIG: _json(entries | architecture.to_config(config)),  # last: it makes this a model's directory
    }
    if architecture.custom_code:
        contents[MODELING.name] = MODELING.read_bytes()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror or error}. Give another directory.") from None
    for name, content in contents.items():
        write_output(path / name, content)
    return architecture


def _json(entries: Mapping[str, Any]) -> bytes:
    return (json.dumps(entries, indent=2, ensure_ascii=False) + "\n").encode()


# Reading


def read_directory(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A directory as the `gpt` entry of a checkpoint and the weights, in float32.

    Raises:
        UserError: a file that is missing, damaged, too large, or somewhere else; an architecture or tokenizer that is
            none of ours; weights that do not fit the config.
    """
    try:
        content = _read_json(path, CONFIG)
        architecture = architecture_named(content.get("model_type"))
        config = architecture.from_config(content)
        encoding = encoding_from_json(_read_json(path, TOKENIZER), config.vocab_size)
        theirs = _read_weights(path, config)
        weights = architecture.from_weights(theirs, config)
        _check_names(theirs, weights, config, architecture)
    except KeyError as error:
        reason = f"it has no {error.args[0]}"
    except FileNotFoundError as error:
        raise UserError(_missing(path, Path(error.filename).name)) from None
    except (ValueError, TypeError, RuntimeError, SafetensorError, OSError, RecursionError, UserError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
    else:
        nan = {"nats_per_token": math.nan, "bits_per_byte": math.nan}
        entry = {"model": asdict(config), "tokenizer": serialize(encoding), "step": 0, "validation": nan}
        return entry, weights
    raise UserError(f"{path} cannot be used: {reason}. Supported: GPT-2, Llama, Mistral and NanoChat in safetensors.")


def _missing(path: Path, name: str) -> str:
    pickled = " Pickled weights (pytorch_model.bin) are never read." if (path / "pytorch_model.bin").exists() else ""
    return f"{path} has no {name}.{pickled} A model's directory needs {', '.join(FILES)}."


def _file(path: Path, name: str) -> Path:
    """A file of the directory. Raises ValueError for one that is elsewhere, and FileNotFoundError."""
    file = path / name
    root = path.resolve()
    # The cache of huggingface_hub has links from snapshots/REVISION/ to blobs/ beside it.
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    target = file.resolve(strict=True)
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ValueError(f"{name} is a link out of the directory")
    if not target.is_file():
        raise ValueError(f"{name} is not a plain file")
    return file


def _read_json(path: Path, name: str) -> dict[str, Any]:
    file = _file(path, name)
    if file.stat().st_size > MAX_BYTES[name]:
        raise ValueError(f"{name} has more than {MAX_BYTES[name] >> 20} MB")
    text = file.read_bytes()
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise ValueError(f"{name} has more than {MAX_CONTAINERS:,} lists and dictionaries")
    try:
        content = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    check(content, {str: object}, name)
    return content


def _read_weights(path: Path, config: GPTConfig) -> dict[str, Tensor]:
    """The tensors of all files, in float32."""
    places: dict[str, Any] = {}  # name -> the open file that has it
    found: set[str] = set()
    files = [safe_open(_file(path, name), "pt") for name in _weight_files(path)]
    for file in files:
        for name in file.keys():  # noqa: SIM118 -- it is no dict
            if _bare(name) in found:
                raise ValueError(f"it has {name} twice")
            found.add(_bare(name))
            places[name] = file
    available = sum(math.prod(file.get_slice(name).get_shape()) for name, file in places.items())
    needed = min_parameters(config)
    if needed > available:
        raise ValueError(f"its config describes a network of {needed:,} weights, but it has {available:,}")
    if config.num_layers * MIN_TENSORS_PER_LAYER > len(places):
        raise ValueError(f"its config describes {pluralize(config.num_layers, 'layer')}, it has {len(places)} tensors")
    tensors, dtypes = {}, set()
    for name, file in places.items():
        if _BUFFERS.search(name):
            continue
        tensor = file.get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} has numbers of {tensor.dtype}, not float32, float16 or bfloat16")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite")
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        tensors[name] = tensor.float()
    if dtypes - {"float32"}:
        logger.info("%s: weights in %s are used as float32", path, " and ".join(sorted(dtypes)))
    return tensors


def _weight_files(path: Path) -> list[str]:
    """One file, or those that an index names. Raises ValueError for names with a path."""
    if (path / WEIGHTS).exists() or not (path / INDEX).exists():
        return [WEIGHTS]
    index = _read_json(path, INDEX)
    check(index, {"weight_map": {str: str}}, INDEX)
    names = sorted(set(index["weight_map"].values()))
    check(len(names), Bounded(int, 1, 1000), "the number of weight files")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names a file {name[:80]!r}")
    return names


def _check_names(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], c: GPTConfig, kind: Architecture) -> None:
    """Raises ValueError for a weight that the network has no place for."""
    unknown = {_bare(name) for name in theirs} - {_bare(name) for name in kind.to_weights(ours, c)}
    if c.tied_embeddings and "lm_head.weight" in unknown:  # some files have both
        if not torch.equal(theirs["lm_head.weight"], ours["token_embedding.weight"]):
            raise ValueError("its lm_head.weight is not its embedding, though its config ties them")
        unknown.remove("lm_head.weight")
    if unknown:
        raise ValueError(f"it has {pluralize(len(unknown), 'weight')} too many: {', '.join(sorted(unknown)[:3])}")


def _bare(name: str) -> str:
    """A weight's name without the prefix that models without an output layer do not have."""
    return name.removeprefix("transformer.").removeprefix("model.")
