"""What Hydra calls besides a run; `hydra.callbacks` in configs/train.yaml names it."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from training.sweep_curves import compare_context_lengths


class SweepCurves(Callback):
    """After a sweep: its runs beside each other."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compares the context lengths, if there are several."""
        compare_context_lengths(Path(config.hydra.sweep.dir))
