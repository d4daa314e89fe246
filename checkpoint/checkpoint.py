"""Checkpoint contents: saving metadata, loading and validating a network.

A checkpoint is a dictionary of plain values and tensors. It has Lightning's own entries and, under the key `gpt`,
everything needed for sampling: {"format", "model": GPTConfig's fields, "tokenizer": the merges, "step",
"validation": {"nats_per_token", "bits_per_byte", "tokens"}}. The file format, and why reading it runs no code, is in
checkpoint/io.py. checkpoint/safetensors_io.py has the export format.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch

from checkpoint.gguf_file import write_gguf
from checkpoint.hugging_face.architectures import architecture_for
from checkpoint.hugging_face.directory import is_directory, read_directory, write_directory
from checkpoint.hugging_face.hub import HUB_PREFIX, hub_directory
from checkpoint.hugging_face.model_card import model_card, usage
from checkpoint.io import read_checkpoint, write_checkpoint
from checkpoint.safetensors_io import SUFFIX, read_safetensors, write_safetensors
from data.tokenizer import deserialize, serialize
from model.config import RENAMED_FIELDS, GPTConfig
from model.flops import min_parameters
from model.gpt import GPT
from system.checks import COUNT, Bounded, check, short_repr
from system.errors import UserError
from system.process import script_command
from system.text import pluralize

MAX_ROPE_NUMEL = 1 << 25  # a million positions x 32: the RoPE tables are the only tensors not limited by the file size
FORMAT = 3  # of the `gpt` entry; increased whenever older versions of the project cannot read a checkpoint
# Format 1 calls the weights of lm_head `output`; formats 1 and 2 have other names for some fields of GPTConfig.
READABLE_FORMATS = (1, 2, FORMAT)
NETWORK_PREFIX = "network."  # the attribute of GPTLightning that holds the GPT
MIN_TENSORS_PER_LAYER = 4  # two matrices each in attention and MLP
_METRIC = Bounded(float, 0, 1e9, allow_nan=True)  # NaN before the first validation
_ENTRY_SPEC = {
    "model": {str: object},  # validated by GPTConfig
    "tokenizer": {str: object},  # validated by deserialize
    "step": COUNT,
    "validation": {"nats_per_token": _METRIC, "bits_per_byte": _METRIC},
}
# Errors that building a network can raise for values that this version of the project did not write.
_BUILD_ERRORS = (UserError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)
NON_WEIGHT_FIELDS = ("dropout", "bigram_dropout", "init")  # fields of GPTConfig that do not change what weights mean


@dataclass(frozen=True)
class Checkpoint:
    """A trained network with its tokenizer."""

    path: Path
    network: GPT
    tokenizer: tiktoken.Encoding
    step: int
    validation: dict[str, float]

    def describe(self) -> str:
        """One line for the log: file, step, size and validation loss."""
        loss = self.validation
        step = f"step {self.step:,}, " if self.step else ""
        text = (
            f"{self.path}: {step}{self.network.num_parameters():,} parameters, "
            f"context {self.network.config.context_length}, tokenizer {self.tokenizer.name} "
            f"({self.tokenizer.n_vocab:,} tokens)"
        )
        if math.isnan(loss["bits_per_byte"]):  # an imported network
            return text
        return (
            f"{text}, validation {loss['nats_per_token']:.3f} nats per token, {loss['bits_per_byte']:.3f} bits per byte"
        )

    def export(self, path: Path) -> None:
        """Writes a safetensors file with the network and everything needed for sampling. Raises UserError."""
        metadata = checkpoint_metadata(self.network.config, self.tokenizer, self.step, self.validation)
        write_safetensors(path, metadata, self.network.state_dict())

    def export_gguf(self, path: Path) -> None:
        """Writes a GGUF file for llama.cpp and Ollama. Raises UserError if they cannot run the network or tokenizer."""
        write_gguf(path, self.network.config, self.tokenizer, self.network.state_dict(), path.stem)

    def export_directory(self, path: Path, generation: dict[str, Any], run: dict[str, Any]) -> str:
        """Writes a directory that Hugging Face transformers loads.

        Args:
            generation: entries of generation_config.json.
            run: what the model card says of the training run, see `model_card`.

        Returns:
            The lines with which transformers loads it.

        Raises:
            UserError: no architecture of transformers is this network, or a file cannot be written.
        """
        config, network = self.network.config, self.network
        architecture = architecture_for(config)
        card = model_card(
            architecture, config, self.tokenizer, self.validation, network.num_parameters(), self.step, run
        )
        write_directory(path, config, self.tokenizer, network.state_dict(), card, generation)
        return usage(architecture, path)


def checkpoint_metadata(
    config: GPTConfig, tokenizer: tiktoken.Encoding, step: int, validation: dict[str, float]
) -> dict:
    """Returns the `gpt` entry of a checkpoint."""
    return {
        "format": FORMAT,
        "model": asdict(config),
        "tokenizer": serialize(tokenizer),
        "step": step,
        "validation": validation,
    }


def record_validation(path: Path, validation: dict[str, float]) -> None:
    """Replaces the validation metrics in a checkpoint, unless the new ones are over fewer tokens."""
    content = read_checkpoint(path)
    if validation["tokens"] < content["gpt"]["validation"].get("tokens", 0):
        return
    content["gpt"]["validation"] = validation
    write_checkpoint(content, path)


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Loads a trained network and its tokenizer.

    Args:
        path: a .ckpt or .safetensors file, a Hugging Face directory or hf:OWNER/NAME, or a run directory, which
            stands for its best checkpoint.
        device: where to put the network.

    Raises:
        UserError: the file is missing, damaged, from an unsupported version, or its weights do not match its config.
    """
    path = checkpoint_path(path)
    entry, weights = read_network(path)
    config, tokenizer = check_entry(entry, weights, path)
    network = GPT(config)
    load_weights(network, weights, path)
    return Checkpoint(path, network.to(device).eval(), tokenizer, entry["step"], entry["validation"])


def read_network(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Reads the `gpt` entry and the weights from any kind of checkpoint. Raises UserError."""
    if is_directory(path):
        entry, weights = read_directory(path)
        return {"format": FORMAT, **entry}, weights
    if path.suffix == SUFFIX:
        return read_safetensors(path)
    content = read_checkpoint(path)
    return content["gpt"], network_weights(content, path)


def checkpoint_path(path: str | Path) -> Path:
    """The checkpoint that a path stands for: a file or Hugging Face directory itself, a run directory's best.

    Raises UserError if hf:OWNER/NAME cannot be found.
    """
    if str(path).startswith(HUB_PREFIX):
        return hub_directory(str(path).removeprefix(HUB_PREFIX))
    path = Path(path)
    if is_directory(path):
        return path
    return path / "checkpoints" / "best.ckpt" if path.is_dir() else path


def check_entry(
    entry: dict[str, Any], weights: dict[str, torch.Tensor], path: Path
) -> tuple[GPTConfig, tiktoken.Encoding]:
    """Validates a checkpoint's `gpt` entry; returns its model config and tokenizer.

    Raises UserError for an unsupported format, a value of the wrong type, or a network larger than the weights.
    """
    check_format(entry, path)
    try:
        check(entry, _ENTRY_SPEC, "gpt")
        config = GPTConfig(**_current_fields(entry))
        _check_size(config, weights)
        tokenizer = deserialize(entry["tokenizer"])
        if tokenizer.n_vocab != config.vocab_size:
            raise ValueError(f"tokenizer of {tokenizer.n_vocab} tokens, vocab_size {config.vocab_size}")
    except _BUILD_ERRORS as error:
        raise _incompatible(path, error) from error
    return config, tokenizer


def _current_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Translates GPTConfig's fields from earlier formats, which have other names and other window pattern letters."""
    if entry.get("format", 1) == FORMAT:
        return entry["model"]
    fields = {RENAMED_FIELDS.get(name, name): value for name, value in entry["model"].items()}
    if type(pattern := fields.get("window_pattern")) is str:  # L was a local layer and F a full one
        fields["window_pattern"] = pattern.translate(str.maketrans("LF", "SL"))
    return fields


def load_weights(network: GPT, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Loads a state_dict, strictly. Raises UserError if a name, shape or dtype does not match."""
    try:
        for name, weight in weights.items():
            if not weight.is_floating_point():
                raise TypeError(f"{name} has dtype {weight.dtype}")
        network.load_state_dict(weights)
    except _BUILD_ERRORS as error:
        raise _incompatible(path, error) from error


def _incompatible(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"{path} does not fit this version of the project ({reason}). Train again, or use another checkpoint."
    )


def _check_size(config: GPTConfig, weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if the config describes a network larger than the weights, before memory is allocated."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in weights.values()}  # tied ones once
    available, needed = sum(storages.values()), min_parameters(config)
    if needed > available or config.context_length * config.head_dim > MAX_ROPE_NUMEL:
        raise ValueError(f"it describes a network of {needed:,} weights, but has {available:,}")
    if config.num_layers * MIN_TENSORS_PER_LAYER > len(weights):
        raise ValueError(f"it describes {pluralize(config.num_layers, 'layer')}, but has {len(weights):,} tensors")


def network_weights(content: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Returns the GPT's state_dict from a checkpoint's content. Raises UserError for weights of anything else."""
    weights = content["state_dict"]
    if unknown := [name for name in weights if not name.startswith(NETWORK_PREFIX)]:
        raise _incompatible(path, ValueError(f"unknown weight {short_repr(unknown[0])} in its state_dict"))
    return {name.removeprefix(NETWORK_PREFIX): tensor for name, tensor in weights.items()}


def check_format(entry: dict[str, Any], path: Path) -> None:
    """Raises UserError for a checkpoint from a later version of the project."""
    written = entry.get("format", 1)
    if type(written) is not int or written not in READABLE_FORMATS:
        raise UserError(
            f"{path} has format {short_repr(written)}, but this version of the project reads formats up to {FORMAT}. "
            "Use the version that wrote it, or another checkpoint."
        )


def check_same_network(
    entry: dict[str, Any], saved: GPTConfig, config: GPTConfig, tokenizer: tiktoken.Encoding, path: Path
) -> None:
    """Raises UserError if a checkpoint's weights do not fit this model config, or if its tokenizer is another.

    Args:
        entry: the checkpoint's `gpt` entry.
        saved: the model config from `check_entry`.
    """
    theirs, ours = asdict(saved), asdict(config)
    differences = [
        f"model.{name} is {short_repr(ours[name])}, in the checkpoint {short_repr(theirs[name])}"
        for name in ours
        if name not in NON_WEIGHT_FIELDS and ours[name] != theirs[name]
    ]
    if not differences and serialize(tokenizer) != entry["tokenizer"]:
        differences = [f"tokenizer {tokenizer.name} has other tokens than the checkpoint's"]
    if differences:
        raise UserError(
            f"{path} is of another network: {'; '.join(differences)}. Use the same values, or another checkpoint."
        )


def check_same_weights(path: Path, network: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Raises UserError if a checkpoint is damaged, or if its model config or tokenizer is another."""
    saved = load_checkpoint(path)
    if saved.network.config != network.config or serialize(saved.tokenizer) != serialize(tokenizer):
        raise UserError(f"{path} is of another network, or has another tokenizer.")


def find_checkpoint(choice: str | None, runs_dir: str) -> Path:
    """Returns the checkpoint to use: the given file or run directory's best, or the best of the newest run.

    Raises UserError if there is no run.
    """
    if choice is not None:
        return checkpoint_path(choice)
    found = sorted(Path(runs_dir).glob("**/checkpoints/best.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"There is no trained run below {runs_dir!r} yet. Train one with: {script_command('train.py')}")
    return found[-1]
