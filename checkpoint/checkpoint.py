"""What a checkpoint holds, and how a network comes back out of one.

A checkpoint is a dictionary of plain values and tensors: Lightning's own entries, and under the key
`gpt` all it takes to write text: {"format", "model": GPTConfig's fields, "tokenizer": the merges, "step",
"validation": {"nats_per_token", "bits_per_byte", "tokens"}}. How it lies on the disk, and why reading it runs no code,
is in checkpoint/io.py; the other way to keep a network in checkpoint/safetensors_io.py.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch

from checkpoint.io import read_checkpoint, write_checkpoint
from checkpoint.safetensors_io import SUFFIX, read_safetensors, write_safetensors
from data.tokenizer import deserialize, serialize
from model.config import RENAMED_FIELDS, GPTConfig
from model.flops import min_parameters
from model.gpt import GPT
from system.checks import COUNT, Bounded, check, short_repr
from system.errors import UserError
from system.text import pluralize

MAX_ROPE_NUMBERS = 1 << 25  # a million positions of 32: the one part that no weights bound
FORMAT = 3  # of the `gpt` entry; raised when an older version of the project could not read it
READABLE_FORMATS = (
    1,
    2,
    FORMAT,
)  # in 1 the weights of lm_head are called output; in 2 fields of GPTConfig have other names
NETWORK_PREFIX = "network."  # GPTLightning keeps the GPT under this name
MAX_TENSORS_PER_LAYER = 4  # at least: of attention and MLP two matrices each
_FIGURE = Bounded(float, 0, 1e9, allow_nan=True)  # nan: before the first validation
_ENTRY = {
    "model": {str: object},  # GPTConfig checks each
    "tokenizer": {str: object},  # and so does deserialize
    "step": COUNT,
    "validation": {"nats_per_token": _FIGURE, "bits_per_byte": _FIGURE},
}
# What building a network may raise from values that this version of the project did not write.
_UNFIT = (UserError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)
NOT_IN_WEIGHTS = ("dropout", "bigram_dropout", "init")  # fields of GPTConfig that may differ for the same weights


@dataclass(frozen=True)
class Checkpoint:
    """A trained network, ready to write."""

    path: Path
    network: GPT
    tokenizer: tiktoken.Encoding
    step: int
    validation: dict[str, float]

    def describe(self) -> str:
        """One line: what was loaded."""
        loss = self.validation
        return (
            f"{self.path}: step {self.step:,}, {self.network.num_parameters():,} parameters, "
            f"context {self.network.config.context_length}, tokenizer {self.tokenizer.name} "
            f"({self.tokenizer.n_vocab:,} tokens), validation {loss['nats_per_token']:.3f} nats per token, "
            f"{loss['bits_per_byte']:.3f} bits per byte"
        )

    def export(self, path: Path) -> None:
        """Writes the network and what it takes to sample from it as safetensors. Raises UserError."""
        entry = checkpoint_metadata(self.network.config, self.tokenizer, self.step, self.validation)
        write_safetensors(path, entry, self.network.state_dict())


def checkpoint_metadata(
    config: GPTConfig, tokenizer: tiktoken.Encoding, step: int, validation: dict[str, float]
) -> dict:
    """The `gpt` entry of a checkpoint."""
    return {
        "format": FORMAT,
        "model": asdict(config),
        "tokenizer": serialize(tokenizer),
        "step": step,
        "validation": validation,
    }


def record_validation(path: Path, validation: dict[str, float]) -> None:
    """Replaces the validation figures in a checkpoint by those of the last one, unless that saw fewer tokens."""
    content = read_checkpoint(path)
    if validation["tokens"] < content["gpt"]["validation"].get("tokens", 0):
        return
    content["gpt"]["validation"] = validation
    write_checkpoint(content, path)


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Builds the network and the tokenizer a checkpoint describes, and fills in its weights, strictly.

    Raises:
        UserError: no such file, not a checkpoint of this project or of this version, or weights that do not fit.
    """
    if path.suffix == SUFFIX:
        entry, weights = read_safetensors(path)
    else:
        content = read_checkpoint(path)
        entry, weights = content["gpt"], network_weights(content)
    config, tokenizer = check_entry(entry, weights, path)
    network = GPT(config)
    load_weights(network, weights, path)
    return Checkpoint(path, network.to(device).eval(), tokenizer, entry["step"], entry["validation"])


def check_entry(
    entry: dict[str, Any], weights: dict[str, torch.Tensor], path: Path
) -> tuple[GPTConfig, tiktoken.Encoding]:
    """The network and the tokenizer that a checkpoint describes, each value of the kind that is expected, and the
    network no larger than its weights. Raises UserError."""
    check_format(entry, path)
    try:
        check(entry, _ENTRY, "gpt")
        config = GPTConfig(**_current_fields(entry))
        _check_size(config, weights)
        tokenizer = deserialize(entry["tokenizer"])
        if tokenizer.n_vocab != config.vocab_size:
            raise ValueError(f"{tokenizer.n_vocab} tokens, but a network for {config.vocab_size}")
    except _UNFIT as error:
        raise _does_not_fit(path, error) from error
    return config, tokenizer


def _current_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of GPTConfig, where an earlier format has other names, and other letters for the window pattern."""
    if entry.get("format", 1) == FORMAT:
        return entry["model"]
    fields = {RENAMED_FIELDS.get(name, name): value for name, value in entry["model"].items()}
    if type(pattern := fields.get("window_pattern")) is str:  # L was a local layer, F a full one
        fields["window_pattern"] = pattern.translate(str.maketrans("LF", "SL"))
    return fields


def load_weights(network: GPT, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Fills in the weights, strictly. Raises UserError where a name, a shape or a type is another."""
    try:
        for name, weight in weights.items():
            if not weight.is_floating_point():
                raise TypeError(f"{name} has numbers of {weight.dtype}")
        network.load_state_dict(weights)
    except _UNFIT as error:
        raise _does_not_fit(path, error) from error


def _does_not_fit(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{path} does not fit this version of the project ({reason}). Train again, or use another.")


def _check_size(config: GPTConfig, weights: dict[str, torch.Tensor]) -> None:
    """Before a network takes memory: raises ValueError where its config asks for more than the weights there are."""
    data = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in weights.values()}  # tied ones once
    there, needed = sum(data.values()), min_parameters(config)
    if needed > there or config.context_length * config.head_dim > MAX_ROPE_NUMBERS:
        raise ValueError(f"it describes a network of {needed:,} weights, but has {there:,}")
    if config.num_layers * MAX_TENSORS_PER_LAYER > len(weights):
        raise ValueError(f"it describes {pluralize(config.num_layers, 'layer')}, but has {len(weights):,} tensors")


def network_weights(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of the GPT in a checkpoint, by their names there."""
    return {
        name.removeprefix(NETWORK_PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }


def check_format(entry: dict[str, Any], path: Path) -> None:
    """Raises UserError for a checkpoint that a later version of the project wrote."""
    written = entry.get("format", 1)
    if type(written) is not int or written not in READABLE_FORMATS:
        raise UserError(
            f"{path} has format {short_repr(written)}, but this version of the project reads formats up to {FORMAT}. "
            "Use the version that wrote it, or another checkpoint."
        )


def check_same_network(
    entry: dict[str, Any], saved: GPTConfig, config: GPTConfig, tokenizer: tiktoken.Encoding, path: Path
) -> None:
    """Raises UserError where the weights of a checkpoint are not for this network, or not for these tokens.

    Args:
        saved: what `check_entry` made of the entry.
    """
    theirs, ours = asdict(saved), asdict(config)
    differ = [
        f"model.{name} is {short_repr(ours[name])}, in the checkpoint {short_repr(theirs[name])}"
        for name in ours
        if name not in NOT_IN_WEIGHTS and ours[name] != theirs[name]
    ]
    if not differ and serialize(tokenizer) != entry["tokenizer"]:
        differ = [f"tokenizer {tokenizer.name} has other tokens than the checkpoint's"]
    if differ:
        raise UserError(f"{path} is of another network: {'; '.join(differ)}. Give the same, or another checkpoint.")


def check_same_weights(path: Path, network: GPT, tokenizer: tiktoken.Encoding) -> None:
    """Raises UserError for a checkpoint that is damaged, or not of such a network with these tokens."""
    saved = load_checkpoint(path)
    if saved.network.config != network.config or serialize(saved.tokenizer) != serialize(tokenizer):
        raise UserError(f"{path} is of another network, or has other tokens.")


def find_checkpoint(choice: str | None, runs_dir: str) -> Path:
    """The checkpoint to use: a .ckpt or .safetensors file, a run directory's best, or the newest run's best.

    Raises UserError where there is none.
    """
    if choice is not None:
        path = Path(choice)
        return path / "checkpoints" / "best.ckpt" if path.is_dir() else path
    found = sorted(Path(runs_dir).glob("**/checkpoints/best.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"There is no trained run below {runs_dir!r} yet. Train one with: python train.py")
    return found[-1]
