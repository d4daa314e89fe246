"""Weights & Biases."""

from collections.abc import Collection, Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np
import wandb
from lightning.pytorch.loggers import WandbLogger

from system.errors import UserError
from training.loggers import RunLogger, saved_run_id


class RunWandbLogger(RunLogger, WandbLogger):
    """Logs a run to wandb under the name of its directory; a resumed run keeps its id."""

    accepts_media = True

    def __init__(self, run_dir: Path, project: str = "tiny-gpt", entity: str | None = None, offline: bool = False):
        self.id_file = run_dir / "wandb_run_id"
        run_id = saved_run_id(self.id_file) or uuid4().hex[:8]
        # save_dir=None is WANDB_DIR or ./wandb. A run directory cannot have wandb's links and config.yaml.
        super().__init__(
            name=run_dir.name, save_dir=None, id=run_id, project=project, entity=entity, offline=offline or False
        )

    def start(self) -> None:
        """Connects to wandb. Raises UserError if that fails, for example without a login."""
        if wandb.run is not None:  # the previous run of a sweep, which failed
            wandb.finish(exit_code=1)
        try:
            run_id = self.experiment.id
        except Exception as error:  # noqa: BLE001 -- wandb has many kinds
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"logger=wandb: {reason}. Log in with: wandb login, or use logger.wandb.offline=true"
            ) from error
        self.id_file.write_text(run_id, encoding="utf-8")

    def log_settings(self, settings: Mapping[str, float | str | None], varied: Collection[str]) -> None:
        """Logs the config of the run."""
        self.log_hyperparams(dict(settings))

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Logs an image (height, width, 3)."""
        WandbLogger.log_image(self, tag, [image], step=step)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Logs text as a table with one cell."""
        WandbLogger.log_text(self, tag, columns=["text"], data=[[text]], step=step)

    def close(self) -> None:
        """Uploads what is left; wandb allows one open run per process."""
        wandb.finish()
