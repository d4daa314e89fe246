"""The learning-rate schedule that all optimizers follow: warmup-stable-decay."""

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from training.config import OptimizerConfig


class WarmupStableDecay(LRScheduler):
    """Sets the learning rates by how much of the run is done, whether steps, epochs or time end it.

    Args:
        optimizer: at its peak learning rates.
        progress: returns the fraction of the run that will be done after so many more steps.
    """

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig, progress: Callable[[int], float]):
        self.config = config
        self.progress = progress
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The learning rate of the next step in each parameter group."""
        factor = warmup_stable_decay(self.progress(0), self.config, self.progress(1))
        return [base_lr * factor for base_lr in self.base_lrs]

    def step(self, epoch: None = None) -> None:
        """Sets the learning rates for the next step. Keeps no count, so it may be called at any time."""
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict:
        """Empty: the learning rates follow from the progress of the run."""
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores nothing."""


def warmup_stable_decay(progress: float, config: OptimizerConfig, progress_after: float | None = None) -> float:
    """Factor on the peak learning rate: linear warmup over `warmup_fraction`, then constant, then linear decay to 0
    over `cooldown_fraction`.

    Args:
        progress: fraction of the run that is done before the step, 0 to 1.
        progress_after: the same after the step, which the warmup uses so that the first step has a learning rate
            above 0. None: `progress`.
    """
    warmed_up = progress if progress_after is None else progress_after
    up = warmed_up / config.warmup_fraction if config.warmup_fraction else 1.0
    down = (1 - progress) / config.cooldown_fraction if config.cooldown_fraction else 1.0
    return max(0.0, min(1.0, up, down))
