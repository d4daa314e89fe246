"""Sweeps (`-m`): what happens around their runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from configs.compose import swept_overrides
from configs.error_lines import format_hydra_error
from system.errors import UserError
from system.streams import print_error
from training.ranks import is_duplicate_error, launcher
from training.run_dir import remove


class Sweep:
    """Collects the failed runs of a sweep. They do not end it; they are named at its end."""

    def __init__(self, config_name: str):
        self.failed: dict[str, list[str]] = {}  # error message -> the runs that it ended
        self._config_name = config_name
        self._num_runs = 0
        self._directory: Path | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run, of a sweep or alone. The UserError of a single run passes through."""
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            yield
            return
        self._directory, self._num_runs = Path(HydraConfig.get().sweep.dir), self._num_runs + 1
        try:
            yield
        except (UserError, HydraException, OmegaConfBaseException) as error:
            message = str(error) if isinstance(error, UserError) else format_hydra_error(error, self._config_name)
            self.failed.setdefault(message, []).append(", ".join(swept_overrides()))

    def report(self) -> None:
        """Prints one line per error, and removes the directory of a sweep in which no run was trained."""
        for message, runs in self.failed.items():
            which = "" if len(runs) == self._num_runs else f"{'; '.join(runs)}: "
            if not is_duplicate_error():
                print_error(f"{which}{message}")
        if self.failed and not any(path.is_dir() for path in self._directory.iterdir()):
            remove(self._directory)


def check_no_sweep_in_launcher() -> None:
    """Raises UserError for a sweep under torchrun or srun: each of its processes would start a sweep of its own."""
    if launcher() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            f"a sweep starts the processes of its runs itself. Use python train.py -m, without {launcher()}."
        )
