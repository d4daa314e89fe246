"""Exceptions: a mistake that the user can fix, and a training run that Ctrl-C stopped."""

from pathlib import Path


class UserError(Exception):
    """An error that the user can fix. The message is one line: the value, what was expected, and how to fix it."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a training run in a program that continues, such as a notebook.

    Args:
        run_dir: where everything is saved; None if training had not started.
    """

    def __init__(self, run_dir: Path | None):
        super().__init__(
            f"resume with tiny_gpt.train(resume={str(run_dir)!r})" if run_dir else "nothing was trained yet"
        )
        self.run_dir = run_dir
