"""Where a run logs metrics, pictures and text. To add a logger: one module here, one entry in LOGGERS, one YAML file in
configs/logger/.

Names and options are checked before Lightning is imported, which takes seconds; so this module does not import it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from system.checks import short_repr
from system.errors import UserError
from system.process import python_command

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RegisteredLogger:
    """A logger as the config sees it."""

    class_name: str
    """In the module NAME_logger of this package. Its arguments: the run directory, and the options as keywords."""
    options: Mapping[str, type]
    """Its keys below `logger.NAME`; each may also be None."""
    package: str | None = None
    """What has to be installed for it."""


LOGGERS = {
    "tensorboard": RegisteredLogger("RunTensorBoardLogger", {}),
    "csv": RegisteredLogger("RunCSVLogger", {}),
    "wandb": RegisteredLogger("RunWandbLogger", {"project": str, "entity": str, "offline": bool}, "wandb"),
    "mlflow": RegisteredLogger("RunMLFlowLogger", {"experiment_name": str, "tracking_uri": str}, "mlflow"),
}


class RunLogger:
    """What a run asks of a logger beyond Lightning's Logger. Subclasses override what they support."""

    accepts_media = False
    """Whether `log_image` and `log_text` do anything."""

    def rewind(self, step: int) -> None:
        """Removes what was logged after this step, before a run is resumed from it."""

    def start(self) -> None:
        """Opens the log before training. Raises UserError if that fails."""

    def log_settings(self, settings: Mapping[str, float | str | None], varied: Collection[str]) -> None:
        """Logs the hyperparameters of the run.

        Args:
            varied: those that the user has set, or that differ between the runs of a sweep.
        """

    def log_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Logs an image (height, width, 3) of type uint8."""

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Logs plain text."""

    def close(self) -> None:
        """Ends the log after the last metrics."""

    def view_hint(self) -> str:
        """A line that says how to view the log; empty if the logger says it itself."""
        return ""


def check_loggers(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError for an unknown logger or option, and for a logger that is not installed."""
    if not isinstance(config, Mapping):
        raise UserError(f"logger is {short_repr(config)}, but must be one or more of {', '.join(LOGGERS)}.")
    for name, options in config.items():
        if name not in LOGGERS:
            raise UserError(f"logger={short_repr(name)} is unknown. Use one or more of {', '.join(LOGGERS)}.")
        registered = LOGGERS[name]
        for key, value in (options or {}).items():
            if key not in registered.options:
                known = ", ".join(registered.options) or "none"
                raise UserError(f"unknown key logger.{name}.{key}. The keys of logger.{name}: {known}.")
            if value is not None and type(value) is not registered.options[key]:
                kind = "true or false" if registered.options[key] is bool else "text"
                raise UserError(f"logger.{name}.{key} is {short_repr(value)}, but must be {kind}.")
        if registered.package and find_spec(registered.package) is None:
            raise UserError(
                f"logger={name} needs a package that is not installed. Install it with: "
                f"{python_command()} -m pip install {registered.package}"
            )


def build_loggers(config: Mapping[str, Mapping[str, Any]], run_dir: Path) -> list[RunLogger]:
    """The loggers of a run."""
    loggers = []
    for name, options in config.items():
        module = import_module(f"training.loggers.{name}_logger")
        loggers.append(getattr(module, LOGGERS[name].class_name)(run_dir, **(options or {})))
    return loggers


def saved_run_id(file: Path) -> str | None:
    """The id that a logger gave the run, if the run has been started before. Raises UserError for a damaged file."""
    if not file.is_file():
        return None
    run_id = file.read_text(encoding="utf-8", errors="replace")[:100]
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise UserError(f"{file} is damaged. Delete it to log the resumed run as a new one.")
    return run_id
