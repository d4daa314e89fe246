"""From the command line as the user typed it to arguments that Hydra's grammar accepts."""

import argparse
import os
import re
from functools import partial

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Quote, QuotedString

from configs import schema
from configs.defaults import choices
from configs.error_lines import abbreviated_repr, usage_hint
from configs.saved_config import escape_interpolation
from system.errors import UserError
from system.files import expand_user

# Hydra's own settings that a user may change. The others would move runs to other directories or execute other code.
HYDRA_KEYS = ("hydra.mode", "hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher", "hydra.verbose")
# Hydra's flags that read a file that can name code to execute: a pickle, or YAML with _target_.
REJECTED_FLAGS = ("config_name", "config_path", "config_dir", "experimental_rerun")
PATH_KEYS = (
    *("checkpoint", "resume", "init_from", "prompt_file", "export", "runs_dir", "png", "html", "logdir"),
    *("data.corpus", "data.cache_dir", "corpus"),
)
# Keys with free text as value. It is quoted, because Hydra would parse commas, quotes, = and ${ in it.
LITERAL_KEYS = ("prompt", "stop", "token", "ablate", "corrupted", "answers", *PATH_KEYS)


def hydra_arguments(arguments: list[str], config_name: str) -> list[str]:
    """The arguments with flags first and free text quoted. Raises UserError for unsupported flags and keys."""
    is_sweep = bool({"-m", "--multirun"} & set(arguments))
    return move_flags_first([quote_literal(argument, config_name, is_sweep) for argument in arguments], config_name)


def check_no_arguments(arguments: list[str]) -> None:
    """Raises UserError if there are arguments, for a program that takes none."""
    if arguments:
        raise UserError(f"{abbreviated_repr(arguments[0])} is given, but this program takes no settings. Leave it out.")


def move_flags_first(arguments: list[str], config_name: str) -> list[str]:
    """Hydra's flags before the settings, because Hydra rejects a setting after a flag.

    Raises:
        UserError: an unknown flag, or one that is not supported here.
    """
    settings = [argument for argument in arguments if re.match(r"[^-][^=]*=|~", argument)]
    flags = [argument for argument in arguments if argument not in settings]
    parser = get_args_parser()
    parser.error = partial(_raise_flag_error, config_name)  # argparse would print the usage of all flags
    known, unknown = parser.parse_known_args(flags)
    if unknown:
        raise UserError(f"{unknown[0]!r} is an unknown option: {usage_hint(config_name)}")
    for name in REJECTED_FLAGS:
        if getattr(known, name) is not None:
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} is not supported. Put a file of settings into configs/experiment/ and choose it with "
                "experiment=NAME."
            )
    return flags + settings


def _raise_flag_error(config_name: str, message: str) -> None:
    raise UserError(f"{message}: {usage_hint(config_name)}")


def quote_literal(argument: str, config_name: str, is_sweep: bool = False) -> str:
    """Quotes the value of a key that takes free text; returns other arguments unchanged.

    In a sweep, commas separate the values of data.corpus and init_from.

    Raises:
        UserError: the argument is not a setting that this program accepts.
    """
    if not argument.isascii() and any("\ud800" <= char <= "\udfff" for char in argument):  # undecodable bytes
        raise UserError(f"{argument.partition('=')[0]!r} or its value is not UTF-8. Convert it, or rename the file.")
    key, equals, value = argument.partition("=")
    if equals and re.match(r"[+~]*hydra\b", key) and not key.lstrip("+~").startswith(HYDRA_KEYS):
        raise UserError(f"{argument} cannot be set. To choose where runs are written, use runs_dir=DIRECTORY.")
    if not key.strip("+~ "):
        raise UserError(f"{argument!r} is not a setting: {usage_hint(config_name)}")
    key = key.lstrip("+")
    if argument == "logger=null":  # no logger; Hydra does not accept null for a group
        return "logger=[]"
    if key in (*schema.GROUPS, "experiment") and re.fullmatch(r"null|true|false|[-+\d.e]+", value):
        raise UserError(f"{argument} does not exist. Choose from: {', '.join(choices(key))}.")
    if key in PATH_KEYS and value == "" and equals:
        raise UserError(f"{key} is empty. Give a path, or leave it out.")
    if not equals or key not in LITERAL_KEYS or (value == "null" and key != "prompt"):
        return argument
    if value == "???":  # OmegaConf's marker for a missing value
        return f"{key}=${{three_question_marks:}}"
    values = split_files(value) if is_sweep and key in ("data.corpus", "init_from") else [value]
    unquoted = "null" if len(values) > 1 else None
    quoted = [
        text if text == unquoted else QuotedString(escape_interpolation(text), Quote.single).with_quotes()
        for text in values
    ]
    return f"{key}={','.join(quoted)}"


def split_files(value: str) -> list[str]:
    """File names separated by commas. A name with a comma must exist or be in quotes."""
    if os.path.lexists(expand_user(value)):
        return [value]
    found = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]+)""", value)
    return [text[1:-1] if text[0] in "'\"" and text[0] == text[-1] else text for text in found] or [value]


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """Hydra's flags among the arguments."""
    return get_args_parser().parse_known_args(arguments)[0]


def only_shows_config(arguments: list[str]) -> bool:
    """Whether Hydra only prints the config or information about it, without a run."""
    flags = parse_flags(arguments)
    return flags.cfg is not None or flags.info is not None
