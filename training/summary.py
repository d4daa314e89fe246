"""What a run reports at its start, when it is stopped, and at its end, on the screen and in summary.json."""

import json
import logging
import math
import platform
import shlex
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from checkpoint.checkpoint import Checkpoint, load_checkpoint
from data.tokenizer import decode
from model import kernels
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.files import atomic_write, relative
from system.process import script_command
from system.running_clock import running_seconds
from system.text import pluralize
from system.version import VERSION
from training.callbacks.checkpoints import saved_step
from training.final_metrics import compute_final_metrics
from training.report import suggested_prompt, write_report
from training.run_dir import resume_command
from training.setup import Run

PARAMETERS_PER_TOKEN = 1000  # of training text; with more, the network memorizes the text
OVERFIT_SHARE = 2 / 3  # of the run; a best checkpoint before that is a sign of overfitting

logger = logging.getLogger(__name__)


def log_start(run: Run, trainer: Trainer) -> None:
    """Logs what the budget has picked, the text, the network, and a warning if the text is too short."""
    switched_off = "" if kernels.enabled() else "kernels are off: only plain PyTorch operators are used"
    network = describe(run.network, trainer, new_weights=run.initial_state is None)
    about = (run.data.describe(), network, short_text_warning(run))
    for line in (run.budget_summary, switched_off, *about):
        if line:
            logger.info(line)


def describe(network: GPT, trainer: Trainer, new_weights: bool = True) -> str:
    """Two lines: the network and the device; and the loss of a uniform guess, where training starts."""
    c = network.config
    return (
        f"{network.num_parameters():,} parameters: {pluralize(c.num_layers, 'layer')}, "
        f"{pluralize(c.num_heads, 'head')}, width {c.d_model}, context {c.context_length}; "
        f"on {trainer.strategy.root_device} in {trainer.precision}\n"
        f"a uniform guess over {c.vocab_size:,} tokens costs {math.log(c.vocab_size):.3f} nats per token"
        + (": the loss starts there" if new_weights else "")
    )


def short_text_warning(run: Run) -> str:
    """A warning if the text is far too short for the network or for a batch; otherwise empty."""
    tokens, parameters = len(run.data.train_tokens), run.network.num_parameters()
    batches = run.data.train_dataloader()
    reasons = []
    if parameters > PARAMETERS_PER_TOKEN * tokens:
        reasons.append(f"{tokens:,} tokens to train on for {parameters:,} parameters")
    if batches.windows_per_epoch < batches.batch_size:
        windows = f"{pluralize(batches.windows_per_epoch, 'window')} of {batches.context_length} tokens"
        reasons.append(f"{windows} for a batch of {batches.batch_size}")
    if not reasons:
        return ""
    return (
        f"warning: the text is far too short: {'; '.join(reasons)}. The network will memorize it. "
        "Use a longer text, or lower model.d_model, model.num_layers and model.context_length, and data.batch_size."
    )


def log_stopped(trainer: Trainer, run_dir: Path) -> None:
    """Logs what is saved of a run that a signal has stopped, and how to resume it."""
    step, saved = trainer.global_step, saved_step(trainer)
    what = "nothing was saved yet" if not saved else "saved" if saved == step else f"step {saved:,} is saved"
    try:
        if trainer.is_global_zero and (report := write_report(run_dir)):
            logger.info(f"report of the run: {relative(report)}")
    finally:
        logger.info(f"stopped at step {step:,}; {what}; resume with: {resume_command(run_dir)}")


def summarize(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Writes summary.json, which marks the run as finished, and reports the results."""
    if not trainer.is_global_zero:
        return

    best = load_checkpoint(run_dir / "checkpoints" / "best.ckpt")
    start = best.tokenizer.encode_ordinary("\n")
    text = decode(best.tokenizer, generate(best.network, start, SamplingConfig(max_new_tokens=150)))
    final = compute_final_metrics(best, run.metrics)
    for log in trainer.loggers:
        log.log_metrics({f"final/{name}": value for name, value in final.items()}, trainer.global_step)
        log.save()
        log.close()
    summary = {**final, **run_statistics(run, trainer, best, run_dir)}
    report = write_report(run_dir, summary)
    with atomic_write(run_dir / "summary.json", run_dir / "summary.tmp") as file:  # marks the run as finished
        file.write((json.dumps(summary, indent=2) + "\n").encode())
    (run_dir / "checkpoints" / "previous.ckpt").unlink(missing_ok=True)
    hints = [log.view_hint() for log in trainer.loggers]
    vocab_size, prompt = best.network.config.vocab_size, suggested_prompt(run)
    if report:
        hints.append(f"report of the run:       {relative(report)}")
    logger.info(final_report(summary, text, run_dir, vocab_size, prompt, hints))


def run_statistics(run: Run, trainer: Trainer, best: Checkpoint, run_dir: Path) -> dict[str, Any]:
    """Further entries of summary.json: duration and size of the run."""
    return {
        "val_tokens": int(best.validation.get("tokens", 0)),
        "val_tokens_in_split": len(run.data.val_tokens) - 1,
        "seconds": round(running_seconds() - run.started_at, 2),
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


def final_report(
    summary: dict[str, Any], text: str, run_dir: Path, vocab_size: int, prompt: str, hints: Iterable[str] = ()
) -> str:
    """The last lines of a run: results, a sample from the best checkpoint, and commands to try next."""
    checkpoint = shlex.quote(str(relative(run_dir)))
    lines = [line for line in text.split("\n") if line.strip()]
    seen, whole = summary["val_tokens"], summary["val_tokens_in_split"]
    cut = f", over {seen:,} of {whole:,} tokens" if seen < whole else ""
    return (
        f"\nbest checkpoint, step {summary['best_step']:,} of {summary['steps']:,}: validation "
        f"{summary['val_nats_per_token']:.3f} nats per token, {summary['val_bits_per_byte']:.3f} bits per byte{cut}\n"
        + _overfitting(summary["best_step"], summary["steps"])
        + _uniform_or_worse(summary["val_nats_per_token"], summary["val_bits_per_byte"], vocab_size)
        + f"{summary['seconds']:.0f} seconds in all, "
        f"{summary['tokens_per_second']:,.0f} tokens per second in training\n"
        f"run directory: {relative(run_dir)}\n\n"
        + "\n".join(f"    {line}" for line in lines[:5])
        + f"\n\ngenerate more text:      {script_command('sample.py')} checkpoint={checkpoint} "
        f"prompt={shlex.quote(prompt)}\n" + "\n".join(hint for hint in hints if hint)
    )


def _overfitting(best_step: int, steps: int) -> str:
    """A hint if the validation loss was lowest long before the end; otherwise empty."""
    if best_step >= OVERFIT_SHARE * steps:
        return ""
    return (
        "overfitting: the validation loss did not improve after that step. Use a longer text, a smaller network, "
        "model.dropout=0.2, or fewer steps.\n"
    )


def _uniform_or_worse(nats_per_token: float, bits_per_byte: float, vocab_size: int) -> str:
    """A warning if the loss is no better than that of a uniform guess; otherwise empty."""
    if nats_per_token >= math.log(vocab_size):
        guess = f"over {vocab_size:,} tokens ({math.log(vocab_size):.3f} nats per token)"
    elif bits_per_byte >= 8:
        guess = "over bytes (8 bits per byte)"
    else:
        return ""
    return (
        f"warning: no better than a uniform guess {guess}: the network has learned nothing that helps with the "
        "validation text. Train longer, use a longer text, or a smaller network.\n"
    )
