"""Metrics as a table: metrics.csv in the run directory."""

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from system.files import relative
from training.loggers import RunLogger


class RunCSVLogger(RunLogger, CSVLogger):
    """Writes metrics.csv, with one column per metric and one row per time of logging."""

    def __init__(self, run_dir: Path):
        super().__init__(run_dir, name="", version="", flush_logs_every_n_steps=1)
        self.file = run_dir / "metrics.csv"
        self._rows: list[dict[str, str]] = []  # of a resumed run, up to its checkpoint

    def rewind(self, step: int) -> None:
        """Keeps the rows up to this step, without the final metrics."""
        if not self.file.is_file():
            return
        with self.file.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                kept = {name: value for name, value in row.items() if name and value and not name.startswith("final/")}
                if kept.keys() > {"step"} and kept["step"].isdigit() and int(kept["step"]) <= step:
                    self._rows.append(kept)

    def start(self) -> None:
        """Writes the rows of a resumed run again: Lightning's logger begins an empty file."""
        self.file.unlink(missing_ok=True)  # or it would warn that it deletes the file
        self.experiment.metrics = self._rows
        self.save()

    def view_hint(self) -> str:
        """The path of the file."""
        return f"metrics:                 {relative(self.file)}"
