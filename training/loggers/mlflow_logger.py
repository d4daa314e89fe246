"""MLflow."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import MLFlowLogger

from system.errors import UserError
from training.loggers import RunLogger, saved_run_id


class RunMLFlowLogger(RunLogger, MLFlowLogger):
    """Logs a run to MLflow under the name of its directory; a resumed run keeps its id.

    Without `tracking_uri` and MLFLOW_TRACKING_URI, the database mlflow.db next to the run directory is used.
    """

    accepts_media = True

    def __init__(self, run_dir: Path, experiment_name: str = "tiny-gpt", tracking_uri: str | None = None):
        self.id_file = run_dir / "mlflow_run_id"
        tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        local = run_dir.parent.absolute()
        try:
            super().__init__(
                experiment_name,
                run_name=run_dir.name,
                tracking_uri=tracking_uri or f"sqlite:///{local / 'mlflow.db'}",
                artifact_location=None if tracking_uri else (local / "mlflow_artifacts").as_uri(),
                run_id=saved_run_id(self.id_file),
            )
        except Exception as error:  # noqa: BLE001 -- MLflow has many kinds
            raise connection_error(error) from error

    def start(self) -> None:
        """Connects to MLflow. Raises UserError if that fails."""
        try:
            self.experiment.update_run(self.run_id, status="RUNNING")
        except Exception as error:  # noqa: BLE001
            raise connection_error(error) from error
        self.id_file.write_text(self.run_id, encoding="utf-8")

    def log_settings(self, settings: Mapping[str, float | str | None], varied: Collection[str]) -> None:
        """Logs the parameters of the run. MLflow does not allow a resumed run to change them."""
        saved = self.experiment.get_run(self.run_id).data.params
        self.log_hyperparams({name: value for name, value in settings.items() if name not in saved})

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Logs an image (height, width, 3)."""
        self.experiment.log_image(self.run_id, image, key=tag, step=step)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Logs text as a file."""
        self.experiment.log_text(self.run_id, text, f"{tag}/step_{step}.txt")

    def view_hint(self) -> str:
        """The command that opens MLflow's page."""
        return f"metrics:                 mlflow ui --backend-store-uri {self._tracking_uri}"


def connection_error(error: Exception) -> UserError:
    """The error for a tracking server or database that cannot be used."""
    reason = " ".join(str(error).split())[:300]
    return UserError(f"logger=mlflow: {reason} Check logger.mlflow.tracking_uri and MLFLOW_TRACKING_URI.")
