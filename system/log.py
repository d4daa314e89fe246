"""Where the project's lines go: the screen and a log file."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from system.streams import write_nowhere
from system.text import escape_control_chars


def setup_logging(file: Path | None, silent: bool = False) -> None:
    """Sends the project's lines to the screen, above a progress bar, and to a file; or nowhere, if `silent`."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_Screen()]
    if silent:
        handlers = [logging.NullHandler()]
    elif file is not None:
        handlers.append(_LogFile(file, encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(_Harmless("%(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for library in ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "matplotlib", "PIL", "rustbpe"):
        logging.getLogger(library).setLevel(logging.ERROR)


class _Harmless(logging.Formatter):
    """Lines for a terminal, of which train.log is one day shown on one too."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


class _Screen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()  # a pipe or a file would keep the line until the end
        except OSError:  # nobody reads any more, or the disk is full: the run goes on, train.log has its lines
            write_nowhere(sys.stdout)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # a full disk: the run ends with one line, where logging would print a traceback and go on
