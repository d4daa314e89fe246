"""TensorBoard events in the run directory."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams

from training.final_metrics import FINAL_METRICS
from training.loggers import RunLogger
from training.loggers.event_file import rewind_events
from training.run_dir import tensorboard_command


class RunTensorBoardLogger(RunLogger, TensorBoardLogger):
    """Writes all events of a run into one file in its directory."""

    accepts_media = True

    def __init__(self, run_dir: Path):
        super().__init__(str(run_dir), name="", version="", default_hp_metric=False)
        self.run_dir = run_dir

    def rewind(self, step: int) -> None:
        """Removes events after this step."""
        rewind_events(self.run_dir, step)

    def log_settings(self, settings: Mapping[str, float | str | None], varied: Collection[str]) -> None:
        """Logs the run's row in the table HParams, whose metrics are the `final/` scalars."""
        metrics = {f"final/{name}": 0.0 for name in FINAL_METRICS}  # only names: the values are those of the scalars
        # TensorBoard takes the columns of all runs from one of them, so columns without a value are named too.
        columns = {name: 0.0 if value is None else value for name, value in settings.items()}
        experiment, _, end = hparams(columns, metrics)
        _, start, _ = hparams(dict(settings), metrics)
        for summary in (mark_columns(experiment, varied), start, end):
            self.experiment.file_writer.add_summary(summary)

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Logs an image (height, width, 3)."""
        self.experiment.add_image(tag, image, step, dataformats="HWC")

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Logs text as an indented code block, which shows Markdown and HTML as they are."""
        # Markdown treats \r as a line break, too.
        self.experiment.add_text(tag, "\n".join("    " + line for line in text.splitlines()), step)

    def save(self) -> None:
        """Flushes. Lightning's logger would also write hparams.yaml, but config.yaml has all settings."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Flushes. Lightning's logger would close the file after fit, and the final metrics would open another."""
        self.save()

    def view_hint(self) -> str:
        """The command that opens TensorBoard on all runs."""
        return f"curves and attention:    {tensorboard_command(self.run_dir.parent)}"


def mark_columns(experiment: Summary, varied: Collection[str]) -> Summary:
    """Marks the hyperparameters that differ between runs: TensorBoard shows five columns, and these first."""
    (value,) = experiment.value
    content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in varied
    value.metadata.plugin_data.content = content.SerializeToString()
    return experiment
