"""Callbacks that Hydra calls during a sweep; `hydra.callbacks` in configs/train.yaml lists them."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from training.sweep_curves import compare_context_lengths


class SweepCurves(Callback):
    """Compares the runs of a finished sweep."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes curves over the context length, if it was swept."""
        compare_context_lengths(Path(config.hydra.sweep.dir))
