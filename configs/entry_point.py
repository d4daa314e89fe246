"""The entry point of every program. Import it first, because Ctrl-C may arrive during the other imports.

from configs.entry_point import entry_point  # isort: skip
...
if __name__ == "__main__":
    entry_point(main, "sample")
"""

import system.interrupts  # noqa: F401  # isort: skip

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from system.streams import handle_broken_pipe, open_closed_streams, use_utf8
from system.version import VERSION

open_closed_streams()


def entry_point(main: Callable[[Any], None], config_name: str | None = None, sweeps: bool = False) -> None:
    """Runs a program, from its command line to its exit code.

    Handles, in the same way for all programs: Ctrl-C, closed or full output streams, `--help`, `--help-all`,
    `--version`, and one line for every user error and for lack of memory.

    Args:
        main: is called with the typed config, or without a config_name with the arguments.
        config_name: the file of configs/ with the program's keys.
        sweeps: whether `-m` runs the program once per combination of values.
    """
    from configs.cli import run  # slow imports
    from configs.compose import compose
    from configs.error_lines import exit_on_user_error
    from configs.help_text import full_help_text, help_text

    use_utf8()
    logging.raiseExceptions = False  # a log handler whose stream fails: handle_broken_pipe reports it
    arguments = sys.argv[1:]
    with handle_broken_pipe(), exit_on_user_error(config_name):
        if {"--help", "-h", "--help-all"} & set(arguments):
            text = full_help_text if "--help-all" in arguments else help_text
            print(text(inspect.unwrap(main).__globals__["__doc__"], config_name))
        elif "--version" in arguments:
            print(f"tiny-gpt-lab {VERSION}")
        elif config_name is None:
            main(arguments)
        elif sweeps:
            run(main, config_name)
        else:
            main(compose(config_name, arguments))
