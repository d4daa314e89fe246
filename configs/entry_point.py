"""What every program begins and ends with. Imported before all else: Ctrl-C may come during the other imports.

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
    """Runs a program from its command line to its exit code.

    Ctrl-C, closed, full and other streams, `--help`, `--version`, and any mistake of the user or lack of memory in
    one line are handled here, for all programs alike.

    Args:
        main: gets the composed config; without a config_name the arguments as they are.
        config_name: the file of configs/ that has the keys.
        sweeps: whether `-m` runs it once a combination of values.
    """
    from configs.cli import compose, exit_on_user_error, run  # takes a moment
    from configs.help_text import help_text

    use_utf8()
    logging.raiseExceptions = False  # of a handler whose stream fails: the stream's own end is handled here
    arguments = sys.argv[1:]
    with handle_broken_pipe(), exit_on_user_error(config_name):
        if {"--help", "-h"} & set(arguments):
            print(help_text(inspect.unwrap(main).__globals__["__doc__"], config_name))
        elif "--version" in arguments:
            print(f"tiny-gpt-lab {VERSION}")
        elif config_name is None:
            main(arguments)
        elif sweeps:
            run(main, config_name)
        else:
            main(compose(config_name, arguments))
