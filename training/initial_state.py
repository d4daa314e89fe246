"""The checkpoint that a run resumes from, or takes its initial weights from."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tiktoken
import torch
from lightning.pytorch import Trainer

from checkpoint.checkpoint import (
    FORMAT,
    NON_WEIGHT_FIELDS,
    check_entry,
    check_format,
    check_same_network,
    find_checkpoint,
    load_weights,
    network_weights,
    read_network,
)
from checkpoint.io import read_checkpoint
from model.config import GPTConfig
from model.gpt import GPT
from system.checks import short_repr
from system.errors import UserError
from system.process import script_command
from system.text import pluralize
from training.config import RunConfig
from training.datamodule import TextDataModule
from training.progress import fractions_done
from training.resume import check_same_settings
from training.run_state import check_run_state


@dataclass(frozen=True)
class InitialState:
    """The content of a checkpoint, as far as the run needs it before it has a Trainer."""

    path: Path
    content: dict[str, Any]
    weights: dict[str, torch.Tensor]
    network: GPTConfig
    """The network of the checkpoint."""
    saved_tokenizer: tiktoken.Encoding
    is_resume: bool
    """Whether the run is resumed, with all of its state, or is a new run with these weights."""

    @property
    def run(self) -> dict[str, Any]:
        """The entry "run" of LastCheckpoint: times, hash of the text, fixed settings. Empty for a new run."""
        return self.content["run"] if self.is_resume else {}

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has done."""
        return self.content["global_step"] if self.is_resume else 0

    def tokenizer(self, config: RunConfig) -> tiktoken.Encoding | None:
        """The tokenizer of the checkpoint; None if the command line sets one, which has to be the same."""
        given = any(key.split(".")[0] == "tokenizer" for key in config.overridden_keys)
        return None if given else self.saved_tokenizer

    def check_matches(self, network: GPTConfig, data: TextDataModule) -> None:
        """Raises UserError if network, tokens or, for a resumed run, the text differ from those of the checkpoint."""
        check_same_network(self.content["gpt"], self.network, network, data.tokenizer, self.path)
        if self.is_resume and self.run["text"] != data.text_sha256:
            raise UserError(
                f"data.corpus is not the text the run was trained on: its SHA-256 is {data.text_sha256[:12]}…, was "
                f"{self.run['text'][:12]}…. Use that text, or start a new run with this one: init_from={self.path}"
            )

    def load_into(self, network: GPT) -> None:
        """Loads the weights into the network. Raises UserError for missing or unexpected weights."""
        load_weights(network, self.weights, self.path)

    def check_bounds(self, trainer: Trainer, config: RunConfig, batches_per_epoch: int, finished: bool) -> None:
        """Raises UserError if a bound of the run is already reached, so that nothing is left to train.

        An unfinished run that was stopped exactly at its end may still be resumed: its last validation is missing.
        """
        if not self.is_resume:
            return
        batches = self.content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
        epochs, seconds = batches / batches_per_epoch, self.run["train_seconds"]
        fractions = fractions_done(trainer, self.step, epochs, seconds)
        exceeded = [name for name, fraction in fractions.items() if fraction > 1 and name != "max_time"]
        reached = [name for name, fraction in fractions.items() if fraction >= 1] if finished else exceeded
        if not reached:
            return
        by_budget = config.trainer.get("max_time") in (None, "auto")
        key = {name: "budget" if name == "max_time" and by_budget else f"trainer.{name}" for name in fractions}
        done = {
            "max_steps": pluralize(self.step, "step"),
            "max_epochs": f"{epochs:.4g} epoch{'' if epochs == 1 else 's'}",
            "max_time": f"{seconds:.2f} s of training",
        }
        left = [key[name] for name in fractions if name not in reached]
        fix = f"Use a larger {' and '.join(key[name] for name in reached)}"
        if left:
            unset = " ".join(f"{key[name]}={'auto' if name == 'max_time' else -1}" for name in reached)
            fix += f", or {unset} so that only {' and '.join(left)} ends the run"
        raise UserError(
            f"{' and '.join(f'{key[name]}={config.get(key[name])}' for name in reached)} is reached: the "
            f"run has done {' and '.join(done[name] for name in reached)} already, so nothing is left to train. {fix}."
        )


def load_initial_state(config: RunConfig) -> InitialState | None:
    """Loads the checkpoint that the run starts from; None: new weights. Raises UserError for an invalid one."""
    resumed = config.resumed
    if resumed and resumed.checkpoint:
        path, content = resumed.checkpoint, _read_state(resumed.checkpoint)
        weights = network_weights(content, path)
    elif config.init_from is not None:
        path = find_checkpoint(config.init_from, config.runs_dir)
        entry, weights = read_network(path)
        content = {"gpt": entry}
    else:
        return None
    network, tokenizer = check_entry(content["gpt"], weights, path)
    if not resumed:
        network, weights = _with_context_length(network, weights, config)
    initial_state = InitialState(path, content, weights, network, tokenizer, is_resume=resumed is not None)
    if resumed:
        check_same_settings(initial_state.run.get("settings", {}), config)
    return initial_state


def _with_context_length(
    network: GPTConfig, weights: dict[str, torch.Tensor], config: RunConfig
) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Crops learned positions if a smaller context is set. RoPE has no weights: any length fits."""
    length = config.model.context_length
    if "model.context_length" not in config.explicit_keys:
        return network, weights
    if network.positions == "learned":
        if length >= network.context_length:
            return network, weights  # with_network_of raises for a longer one
        weights = weights | {"position_embedding.weight": weights["position_embedding.weight"][:length].clone()}
    return replace(network, context_length=length), weights


def with_network_of(initial_state: InitialState, config: RunConfig) -> RunConfig:
    """Returns the config with the network of the checkpoint. Raises UserError if the command line sets another."""
    differ, network = [], {}
    for name, value in asdict(initial_state.network).items():
        if name == "vocab_size" or name in NON_WEIGHT_FIELDS:
            continue
        ours = getattr(config.model, name)
        if ours != value and ("model" in config.overridden_keys or f"model.{name}" in config.explicit_keys):
            differ.append(f"model.{name} is {short_repr(ours)}, in the checkpoint {short_repr(value)}")
        network[f"model.{name}"] = value
    if differ:
        raise UserError(
            f"{initial_state.path} has another network: {'; '.join(differ)}. Leave these keys or init_from out."
        )
    return config.replace_values(network)


def _read_state(path: Path) -> dict[str, Any]:
    """Reads a checkpoint to resume from. Raises UserError that names another one if it is damaged."""
    try:
        content = read_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error} {_suggest_fallback(path)}") from error
    check_format(content["gpt"], path)
    if (written := content["gpt"].get("format", 1)) != FORMAT:
        raise UserError(
            f"{path} has format {written} of an earlier version of the project, but this one resumes runs of format "
            f"{FORMAT}. Resume it with that version, or start a new run with its weights: init_from={path}"
        )
    if "run" not in content:
        raise UserError(f"{path} only has weights: it cannot be resumed. Start a new run with them: init_from={path}")
    check_run_state(content, path)
    return content


def _suggest_fallback(damaged: Path) -> str:
    """Sentence that names the newest undamaged checkpoint of the run."""
    for name, setting in (("last.ckpt", "resume"), ("previous.ckpt", "resume"), ("best.ckpt", "init_from")):
        other = damaged.with_name(name)
        if other == damaged:
            continue
        try:
            content = read_checkpoint(other)
            check_entry(content["gpt"], network_weights(content, other), other)
        except UserError:
            continue
        step = content["gpt"]["step"]
        command = f"{script_command('train.py')} {setting}={other}"
        return f"{name} in the same directory, of step {step:,}, is not damaged: {command}"
    return "There is no other checkpoint in its directory: start a new run."
