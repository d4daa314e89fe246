"""The report of Lightning's profiler."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class ProfilerReport(Callback):
    """Logs the report of `trainer.profiler`; Lightning logs it too, but its logger is silenced here."""

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Logs the report, if there is a profiler."""
        if trainer.is_global_zero and (report := trainer.profiler.summary()):
            logger.info(report)
