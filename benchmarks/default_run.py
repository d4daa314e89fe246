"""The run that train.py makes of its defaults, shortened, for benchmarks that look at a part of it."""

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import Callback

from model.gpt import GPT
from system.allocator import keep_freed_memory
from training.callbacks import Metrics, Progress, Snapshots
from training.checkpointing import KeepLast, StopOnSignal
from training.config import RunConfig
from training.datamodule import TextData
from training.lightning_module import GPTLightning
from training.setup import trainer_in
from training.trainer import resolve


def prepared_text(config: RunConfig) -> TextData:
    """The run's text, encoded; from here on Lightning's warnings are silent."""
    keep_freed_memory()
    warnings.filterwarnings("ignore", module="lightning|torch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = TextData(config.data, config.tokenizer, config.model.context_length, 0)
    data.prepare()
    return data


def new_network(config: RunConfig, data: TextData) -> GPT:
    """The same weights every time."""
    torch.manual_seed(config.seed)
    return GPT(replace(config.model, vocab_size=data.vocab_size))


def snapshots_of(data: TextData) -> Snapshots:
    """What train.py draws."""
    return Snapshots(data.val_passage(Snapshots.PASSAGE_TOKENS).tolist())


def train(
    config: RunConfig, data: TextData, run_dir: Path, steps: int, validations: int, first: Callback, drawing: Callback
) -> None:
    """Runs so many steps in train.py's Trainer on the CPU. The clock of a run bounded by time runs too.

    Args:
        validations: 0 for none.
        first: a callback that sees each hook before all others.
        drawing: what stands in the place of Snapshots.
    """
    module = GPTLightning(new_network(config, data), data.tokenizer, config.optimizer, config.seed)
    metrics = Metrics({})
    options = resolve(config.trainer | {"max_steps": steps, "max_time": "1h", "accelerator": "cpu"})
    kept = KeepLast(run_dir / "last.ckpt", metrics)
    callbacks = [first, metrics, Progress(metrics), drawing, StopOnSignal(), kept]
    trainer = trainer_in(run_dir, options, max(1, validations), data, callbacks)
    if not validations:
        trainer.limit_val_batches = 0
    trainer.fit(module, datamodule=data)
    data.trainer = None
