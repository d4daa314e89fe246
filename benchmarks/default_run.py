"""A shortened default run of train.py, for benchmarks that measure a part of it."""

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import Callback

from model.gpt import GPT
from system.memory import disable_malloc_trim
from training.callbacks.checkpoints import LastCheckpoint
from training.callbacks.graceful_stop import GracefulStop
from training.callbacks.metrics_logger import MetricsLogger
from training.callbacks.progress_bar import RunProgressBar
from training.callbacks.validation_images import ValidationImages
from training.config import RunConfig
from training.datamodule import TextDataModule
from training.lightning_module import GPTLightning
from training.setup import make_trainer, validation_images
from training.trainer import resolve_trainer_options


def prepared_text(config: RunConfig) -> TextDataModule:
    """Prepares the encoded text of the run. Also silences Lightning's warnings."""
    disable_malloc_trim()
    warnings.filterwarnings("ignore", module="lightning|torch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = TextDataModule(config.data, config.tokenizer, config.model.context_length, 0)
    data.prepare()
    return data


def new_network(config: RunConfig, data: TextDataModule) -> GPT:
    """A new network with the same initial weights on every call."""
    torch.manual_seed(config.seed)
    return GPT(replace(config.model, vocab_size=data.vocab_size))


def validation_images_of(config: RunConfig, data: TextDataModule) -> ValidationImages:
    """The callback that draws in train.py."""
    return validation_images(data, config.model, MetricsLogger({}))


def train(
    config: RunConfig,
    data: TextDataModule,
    run_dir: Path,
    steps: int,
    num_validations: int,
    first: Callback,
    drawing: Callback,
) -> None:
    """Trains for a number of steps in train.py's Trainer on the CPU, with max_time set.

    Args:
        num_validations: 0 disables validation.
        first: a callback whose hooks run before all others.
        drawing: the callback to use as ValidationImages.
    """
    module = GPTLightning(new_network(config, data), data.tokenizer, config.optimizer, config.seed)
    metrics = MetricsLogger({})
    options = resolve_trainer_options(config.trainer | {"max_steps": steps, "max_time": "1h", "accelerator": "cpu"})
    kept = LastCheckpoint(run_dir / "last.ckpt", metrics)
    callbacks = [first, metrics, RunProgressBar(metrics), drawing, GracefulStop(), kept]
    trainer = make_trainer(run_dir, options, max(1, num_validations), data, callbacks)
    if not num_validations:
        trainer.limit_val_batches = 0
    trainer.fit(module, datamodule=data)
    data.trainer = None
