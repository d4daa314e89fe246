"""Logging to the terminal and to a log file."""

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from system.streams import redirect_to_devnull
from system.text import escape_control_chars


def setup_logging(file: Path | None, silent: bool = False) -> None:
    """Logs to the terminal, above the progress bar, and to a file if one is given; to nothing if `silent`."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_ConsoleHandler()]
    if silent:
        handlers = [logging.NullHandler()]
    elif file is not None:
        handlers.append(_LogFileHandler(file, encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(_EscapingFormatter("%(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for library in ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "matplotlib", "PIL", "rustbpe"):
        logging.getLogger(library).setLevel(logging.ERROR)


def share_terminal(prefix: str) -> None:
    """From now on, begins each line on the terminal with this text, because other processes print there too."""
    _ConsoleHandler.prefix = prefix


def shares_terminal() -> bool:
    """Whether other processes print on the terminal too, so that this one must not draw a progress bar."""
    return bool(_ConsoleHandler.prefix)


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters, also in the log file, which somebody may print in a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


class _ConsoleHandler(logging.Handler):
    prefix = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write("\n".join(self.prefix + line for line in self.format(record).split("\n")))
            sys.stdout.flush()  # a pipe or a file would buffer the line
        except OSError:  # a closed pipe or a full disk must not end the run; train.log has the lines
            redirect_to_devnull(sys.stdout)


class _LogFileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # on a full disk end the run with one line; logging would print a traceback and continue
