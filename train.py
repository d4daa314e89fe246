"""Trains a GPT:  python train.py [key=value ...]      the keys: configs/train.yaml

Text -> tokens -> batches -> network -> Lightning -> a run directory with checkpoints, TensorBoard
events, the config and summary.json.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import shlex
import shutil
import sys
import time
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from configs.command_line import run
from configs.errors import UserError
from configs.run_directory import job_start, log_to, new_run_dir, removed_if_refused, save_config
from configs.schema import build
from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, find_files
from model.config import GPTConfig, OptimizerConfig, SamplingConfig
from model.memory import refuse_beyond_memory

if TYPE_CHECKING:  # the slow imports are in main: a mistake on the command line is answered before them
    from lightning.pytorch import Trainer

    from model.callbacks import Metrics
    from model.gpt import GPT

VERSION = "0.1.0"
say = logging.getLogger("train").info


def main(config: DictConfig) -> None:
    """One training run, from the config to the summary. Raises UserError for what the user can mend."""
    started = job_start()
    # What can be refused without the text, and without the slow imports, is refused first.
    optimizer_config = build(OptimizerConfig, config.optimizer)
    data_config = build(DataConfig, config.data)
    build(TokenizerConfig, config.tokenizer)
    if not OmegaConf.is_missing(config.model, "vocab_size"):
        raise UserError("model.vocab_size comes from the tokenizer. Set tokenizer.vocab_size in its place.")
    refuse_beyond_memory(build(GPTConfig, config.model, vocab_size=1))
    log_to(None)
    Corpus(find_files(data_config.corpus), data_config.val_fraction)
    if not 0 <= config.seed < 2**32:
        raise UserError(f"seed is {config.seed}, but must be a whole number from 0 to {2**32 - 1}.")

    from lightning.pytorch import seed_everything

    from data.module import TextData
    from model.allocator import keep_freed_memory
    from model.budget import measured_speed, time_allowed, time_to_train, with_recipe
    from model.callbacks import KeepCheckpoint, Metrics, Progress, RunLogger, Snapshots, StopOnSignal, StoppedBySignal
    from model.checkpoint import record_validation
    from model.compilation import compile_if_wanted
    from model.gpt import GPT
    from model.lightning_module import GPTLightning
    from model.trainer import build_trainer, expected_device, refuse_time_on_several_devices, resolve

    keep_freed_memory()
    log_to(None)  # again: importing Lightning made its own loggers talk
    warnings.filterwarnings("ignore", module="lightning|torch")
    options = resolve(OmegaConf.to_container(config.trainer, resolve=True))
    budget = time_allowed(config)
    if budget:
        speed = measured_speed(expected_device(options))
        config, picked = with_recipe(config, budget, time.time() - started, speed)
    seed_everything(config.seed, verbose=False)

    data = TextData(data_config, build(TokenizerConfig, config.tokenizer), config.model.context_length, config.seed)
    data.prepare()
    network = GPT(build(GPTConfig, config.model, vocab_size=data.vocab_size))
    if budget:
        options["max_time"] = time_to_train(budget, time.time() - started, network, len(data.val_tokens), speed)
    module = GPTLightning(network, data.tokenizer, optimizer_config, config.seed)
    metrics = Metrics(hyperparameters(config, network))

    run_dir = new_run_dir(config)
    best, last = run_dir / "checkpoints" / "best.ckpt", run_dir / "checkpoints" / "last.ckpt"
    with removed_if_refused(run_dir):
        trainer = build_trainer(
            options,
            config.validations,
            len(data.train_dataloader()),
            default_root_dir=run_dir,
            logger=RunLogger(run_dir),
            callbacks=[
                metrics,
                Progress(metrics),
                Snapshots(data.val_passage(Snapshots.PASSAGE_TOKENS).tolist()),
                StopOnSignal(last),
                KeepCheckpoint(best, monitor="val/loss", save_weights_only=True),
                KeepCheckpoint(last),
            ],
            num_sanity_val_steps=0,
            enable_model_summary=False,
        )
        refuse_time_on_several_devices(trainer)
        precision = trainer.precision_plugin.forward_context()
        compile_if_wanted(network, config.compile, trainer.strategy.root_device, precision)

    save_config(config, run_dir)
    log_to(run_dir)
    if budget:
        say(picked)
    say(data.describe())
    say(describe(network, trainer))
    try:
        trainer.fit(module, datamodule=data)
    except StoppedBySignal as stop:
        say(f"stopped at step {trainer.global_step:,}; saved {shown(last)}")
        sys.exit(128 + stop.args[0])
    trainer.validate(module, data.whole_validation(), ckpt_path=best, verbose=False)
    if trainer.is_global_zero:
        record_validation(best, module.validation)
        finish(run_dir, best, trainer, metrics, started)


def describe(network: GPT, trainer: Trainer) -> str:
    """Two lines: what is trained and where; the loss at the start, from which one sees how far it has come."""
    c = network.config
    return (
        f"{network.num_parameters():,} parameters: {c.num_layers} layers, {c.num_heads} heads, width {c.d_model}, "
        f"context {c.context_length}; on {trainer.strategy.root_device} in {trainer.precision}\n"
        f"a uniform guess over {c.vocab_size:,} tokens costs {math.log(c.vocab_size):.3f} nats per token: the loss "
        "starts there"
    )


def hyperparameters(config: DictConfig, network: GPT) -> dict[str, int | float | str | bool]:
    """Every choice of the run as one flat row, for TensorBoard's table."""
    groups = OmegaConf.to_container(config, resolve=True)
    groups["model"] = asdict(network.config)
    row = {name: groups[name] for name in ("seed", "compile", "validations")}
    row["budget"] = str(config.budget)
    row["parameters"] = network.num_parameters()
    for group in ("model", "data", "tokenizer", "optimizer", "trainer"):
        for name, value in groups[group].items():
            row[f"{group}.{name}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return row


def finish(run_dir: Path, checkpoint: Path, trainer: Trainer, metrics: Metrics, started: float) -> None:
    """Writes summary.json and prints it, with a few lines of the best checkpoint's writing."""
    from model.checkpoint import load_checkpoint
    from model.generation import generate

    best = load_checkpoint(checkpoint)
    start = best.tokenizer.encode_ordinary("\n")
    text = best.tokenizer.decode(list(generate(best.network, start, SamplingConfig(max_new_tokens=150))))
    speed = (metrics.step_ms, metrics.tokens_per_second)
    trainer.logger.log_final(
        (*best.validation.values(), *speed), trainer.global_step, best.network.config.context_length
    )
    summary = {
        "val_nats_per_token": best.validation["nats_per_token"],
        "val_bits_per_byte": best.validation["bits_per_byte"],
        "seconds": round(time.time() - started, 2),
        "steps": trainer.global_step,
        "tokens": metrics.tokens,
        "tokens_per_second": round(metrics.tokens_per_second, 1),
        "step_ms": round(metrics.step_ms, 3),
        "peak_memory_mb": round(metrics.peak_memory_mb, 1),
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
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    python, place = this_python(), shlex.quote(str(shown(run_dir)))
    all_runs = shlex.quote(str(shown(run_dir.parent)))
    lines = [line for line in text.split("\n") if line.strip()]
    say(
        f"\nbest checkpoint, step {best.step:,} of {trainer.global_step:,}: validation "
        f"{summary['val_nats_per_token']:.3f} nats per token, {summary['val_bits_per_byte']:.3f} bits per byte\n"
        f"{summary['seconds']:.0f} seconds in all, {summary['tokens_per_second']:,.0f} tokens per second in training\n"
        f"run directory: {shown(run_dir)}\n\n"
        + "\n".join(f"    {line}" for line in lines[:5])
        + f"\n\nlet it write more:       {python} sample.py checkpoint={place} prompt='To be, or not'\n"
        f"curves and attention:    {python} -m tensorboard.main --logdir {all_runs} --samples_per_plugin images=100"
    )


def this_python() -> str:
    """The command that starts the Python running now, as one would type it here."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(str(shown(Path(sys.executable))))


def shown(path: Path) -> Path:
    """The path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    run(main, "train")
