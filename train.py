"""Trains a GPT:  python train.py [key=value ...]      the keys: configs/train.yaml

Text -> tokens -> batches -> network -> Lightning -> a run directory with checkpoints, TensorBoard
events, the config and summary.json. A run that was stopped goes on with resume=RUN_DIR.
"""

from __future__ import annotations

from configs.entry_point import VERSION, entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import json
import logging
import math
import platform
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from configs.schema import build
from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, find_files
from data.tokenizers import TOKENIZERS
from model.config import GPTConfig, SamplingConfig
from model.flops import least_weights
from system.deferred_imports import slow_imports
from system.errors import UserError
from system.files import written_whole
from system.memory import refuse_beyond_memory
from system.running_clock import running_seconds
from system.text import counted
from training.config import OptimizerConfig
from training.final_metrics import compute_final_metrics
from training.ranks import end_with_parent, ignore_stray_variables, is_first
from training.resume import Resumed, resumed_run
from training.run_dir import (
    claimed,
    given_keys,
    job_start,
    log_to,
    new_run_dir,
    removed_if_refused,
    save_config,
    shown,
    tensorboard_command,
    this_python,
)

if TYPE_CHECKING:  # the slow imports are in main: a mistake on the command line is answered before them
    from lightning.pytorch import Trainer

    from checkpoint.checkpoint import Checkpoint
    from model.gpt import GPT
    from training.setup import Run

say = logging.getLogger("train").info


def main(config: DictConfig) -> None:
    """One training run, from the config to the summary. Raises UserError for what the user can mend."""
    began = job_start()
    end_with_parent()
    ignore_stray_variables()
    resumed = resumed_run(config)  # None: a new run
    config = resumed.config if resumed else config
    refuse_early(config)

    with slow_imports():
        from system.allocator import keep_freed_memory
        from training.checkpointing import StopOnSignal
        from training.error_context import memory_explained, writing_explained
        from training.initial_state import old_weights
        from training.processes import together
        from training.setup import build_parts, prepare

    keep_freed_memory()
    log_to(None)  # again: importing Lightning made its own loggers talk
    warnings.filterwarnings("ignore", module="lightning|torch")
    with StopOnSignal() as stop_on_signal, memory_explained(config):
        run = prepare(config, old_weights(config, resumed), began)
        run_dir = resumed.run_dir if resumed else new_run_dir(run.config)

        def kept() -> bool:
            return bool(resumed or run.metrics.tokens)

        with claimed(run_dir), removed_if_refused(run_dir, unless=kept):
            with writing_explained(run_dir, resume_command(run_dir), kept), memory_explained(run.config):
                trainer = build_parts(run, run_dir, stop_on_signal)
                open_directory(run, run_dir, resumed)
                answer = partial(say_stopped, trainer, run_dir)
                with answered(answer), together(trainer, stop_on_signal, resume_command(run_dir), answer):
                    fit(run, trainer, run_dir)
                    summarise(run, trainer, run_dir)


def refuse_early(config: DictConfig) -> None:
    """Raises UserError for what can be refused without the text, and without the slow imports."""
    build(OptimizerConfig, config.optimizer)
    data_config = build(DataConfig, config.data)
    tokenizer = build(TokenizerConfig, config.tokenizer)
    refuse_size_of_fixed_vocabulary(tokenizer)
    if not OmegaConf.is_missing(config.model, "vocab_size"):
        raise UserError("model.vocab_size comes from the tokenizer. Set tokenizer.vocab_size in its place.")
    refuse_beyond_memory(least_weights(build(GPTConfig, config.model, vocab_size=1)))
    log_to(None)
    Corpus(find_files(data_config.corpus), data_config.val_fraction)
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed is {config.seed}, but must be a whole number from 0 to {2**32 - 1}.")


def refuse_size_of_fixed_vocabulary(tokenizer: TokenizerConfig) -> None:
    """Raises UserError where the command line gives a size to a tokenizer that has its own."""
    kind, size = tokenizer.kind, tokenizer.vocab_size
    registered = TOKENIZERS[kind]
    fixed = not registered.learned and size not in (None, registered.vocab_size)
    if fixed and "tokenizer.vocab_size" in given_keys():
        own = f"has {registered.vocab_size} tokens" if registered.vocab_size else "has a vocabulary of its own"
        raise UserError(
            f"tokenizer.vocab_size is {size}, but tokenizer={kind} {own}. Leave it out, or use tokenizer=bpe alone."
        )


def open_directory(run: Run, run_dir: Path, resumed: Resumed | None) -> None:
    """Makes the directory that of a run in progress: config.yaml, train.log, and nothing from after the checkpoint."""
    from training.checkpointing import tidy_checkpoints
    from training.tensorboard import rewind_events

    first = is_first()  # of the processes of several devices
    if first:
        save_config(run.config, run_dir)
    log_to(run_dir)
    if resumed and first:
        (run_dir / "summary.json").unlink(missing_ok=True)
        rewind_events(run_dir, run.old.step if run.old else -1)
        tidy_checkpoints(run_dir / "checkpoints", resumed.checkpoint, run.network, run.data.tokenizer)
        changes = f"; changed: {', '.join(resumed.changes)}" if resumed.changes else ""
        say(f"going on with {shown(run_dir)} at step {run.old.step if run.old else 0:,}{changes}")


@contextmanager
def answered(answer: Callable[[], None]) -> Iterator[None]:
    """Calls `answer` when a signal stops the run."""
    from training.checkpointing import StoppedBySignal

    try:
        yield
    except StoppedBySignal:
        answer()
        raise


def say_stopped(trainer: Trainer, run_dir: Path) -> None:
    """One line: what is saved of a run that a signal stopped, and how to resume it."""
    from training.checkpointing import saved_step

    step, saved = trainer.global_step, saved_step(trainer)
    what = "nothing was saved yet" if not saved else "saved" if saved == step else f"saved is step {saved:,}"
    say(f"stopped at step {step:,}; {what}; go on with: {resume_command(run_dir)}")


def fit(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Trains, from the old weights on if there are any, and validates the best ones on the whole split."""
    from checkpoint.checkpoint import record_validation
    from training.checkpointing import best_or_last

    if run.picked:
        say(run.picked)
    say(run.data.describe())
    say(describe(run.network, trainer))
    if warning := run.warn_of_short_text():
        say(warning)
    goes_on = run.old is not None and run.old.goes_on
    trainer.fit(run.module, datamodule=run.data, ckpt_path=run.old.path if goes_on else None)
    best = best_or_last(run_dir / "checkpoints")
    if run.timer and run.timer.out_of_time(run.module.validation["tokens"]):  # it would see fewer tokens than that
        say("the budget leaves no time for a last validation: the figures are those of one in training")
        return
    whole = run.data.whole_validation()
    trainer.validate(run.module, whole, ckpt_path=best, verbose=False)
    if whole.cut:
        say(f"the last validation saw {run.module.validation['tokens']:,} tokens: the budget leaves no time for more")
    if trainer.is_global_zero:
        record_validation(best, run.module.validation)


def describe(network: GPT, trainer: Trainer) -> str:
    """Two lines: what is trained and where; the loss at the start, from which one sees how far it has come."""
    c = network.config
    return (
        f"{network.num_parameters():,} parameters: {counted(c.num_layers, 'layer')}, {counted(c.num_heads, 'head')}, "
        f"width {c.d_model}, context {c.context_length}; on {trainer.strategy.root_device} in {trainer.precision}\n"
        f"a uniform guess over {c.vocab_size:,} tokens costs {math.log(c.vocab_size):.3f} nats per token: the loss "
        "starts there"
    )


def summarise(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Writes summary.json, with which the run is finished, and prints what it came to."""
    from checkpoint.checkpoint import load_checkpoint
    from sampling.sampler import generate

    if not trainer.is_global_zero:
        return

    best = load_checkpoint(run_dir / "checkpoints" / "best.ckpt")
    start = best.tokenizer.encode_ordinary("\n")
    text = best.tokenizer.decode(list(generate(best.network, start, SamplingConfig(max_new_tokens=150))))
    final = compute_final_metrics(best, run.metrics)
    trainer.logger.log_final(final, trainer.global_step, best.network.config.context_length)
    summary = {**final, **figures(run, trainer, best, run_dir)}
    with written_whole(run_dir / "summary.json", run_dir / "summary.tmp") as file:  # then the run is finished
        file.write((json.dumps(summary, indent=2) + "\n").encode())
    (run_dir / "checkpoints" / "previous.ckpt").unlink(missing_ok=True)
    say(conclusion(summary, text, run_dir, best.network.config.vocab_size))


def figures(run: Run, trainer: Trainer, best: Checkpoint, run_dir: Path) -> dict[str, Any]:
    """What summary.json has beside the final metrics: how long the run was, and of what size."""
    return {
        "val_tokens": int(best.validation.get("tokens", 0)),
        "val_tokens_in_split": len(run.data.val_tokens) - 1,
        "seconds": round(running_seconds() - run.began, 2),
        "steps": trainer.global_step,
        "tokens": run.metrics.tokens,
        "context_length": best.network.config.context_length,
        "parameters": best.network.num_parameters(),
        "checkpoint": str(best.path.relative_to(run_dir)),
        "best_step": best.step,
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "lightning": metadata.version("lightning"),
            "tiny_gpt": VERSION,
        },
    }


def conclusion(summary: dict[str, Any], text: str, run_dir: Path, vocab_size: int) -> str:
    """The last lines of a run: its figures, a little of what the best checkpoint writes, and what to do with it."""
    place = shlex.quote(str(shown(run_dir)))
    lines = [line for line in text.split("\n") if line.strip()]
    seen, whole = summary["val_tokens"], summary["val_tokens_in_split"]
    cut = f", over {seen:,} of {whole:,} tokens" if seen < whole else ""
    return (
        f"\nbest checkpoint, step {summary['best_step']:,} of {summary['steps']:,}: validation "
        f"{summary['val_nats_per_token']:.3f} nats per token, {summary['val_bits_per_byte']:.3f} bits per byte{cut}\n"
        + _uniform_or_worse(summary["val_nats_per_token"], summary["val_bits_per_byte"], vocab_size)
        + f"{summary['seconds']:.0f} seconds in all, "
        f"{summary['tokens_per_second']:,.0f} tokens per second in training\n"
        f"run directory: {shown(run_dir)}\n\n"
        + "\n".join(f"    {line}" for line in lines[:5])
        + f"\n\nlet it write more:       {this_python()} sample.py checkpoint={place} prompt='To be, or not'\n"
        f"curves and attention:    {tensorboard_command(run_dir.parent)}"
    )


def _uniform_or_worse(nats_per_token: float, bits_per_byte: float, vocab_size: int) -> str:
    """A line that says so, where a loss is no better than that of guessing; else nothing."""
    if nats_per_token >= math.log(vocab_size):
        guess = f"over {vocab_size:,} tokens ({math.log(vocab_size):.3f} nats per token)"
    elif bits_per_byte >= 8:
        guess = "over bytes (8 bits per byte)"
    else:
        return ""
    return (
        f"warning: no better than a uniform guess {guess}: nothing was learned that helps with the validation text. "
        "Train longer, use a longer text, or a smaller network.\n"
    )


def resume_command(run_dir: Path) -> str:
    """What goes on with the run."""
    return f"{this_python()} train.py resume={shlex.quote(str(shown(run_dir)))}"


if __name__ == "__main__":
    entry_point(main, "train", sweeps=True)
