"""Turns every user error, including those of Hydra and OmegaConf, into one line that says how to fix it."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from configs.defaults import CONFIG_DIR, choices, default_config
from configs.unknown_keys import explain_unknown_key
from system.errors import UserError
from system.interrupts import is_keyboard_interrupt
from system.memory import is_out_of_memory
from system.streams import print_error
from training.ranks import is_duplicate_error

# The keys that determine how much memory each program needs.
OUT_OF_MEMORY_HINTS = {
    "train": "data.batch_size, model.context_length, model.num_layers or model.d_model",
    "sample": "num_samples, or give a shorter prompt",
    "see": "the length of the text (for an untrained model also model.context_length or model.d_model)",
    "lessons": "lengths",
    "context_cost": "lengths or tokens_per_batch",
    "attention_speed": "lengths or tokens_per_batch",
    "training_speed": "vocab_size",
    "kernels": "vocab_size",
}
PLUGINS = {"hydra/launcher=joblib": "hydra-joblib-launcher", "hydra/sweeper=optuna": "hydra-optuna-sweeper"}


@contextmanager
def exit_on_user_error(config_name: str | None) -> Iterator[None]:
    """Prints errors that the user can fix as one line on standard error, and exits with code 2."""
    try:
        yield
    except Exception as error:
        message = error_line(error, config_name)
        if message is None:
            raise
        if not is_duplicate_error():
            print_error(message)
        sys.exit(2)


def error_line(error: Exception, config_name: str | None) -> str | None:
    """The message for an error that the user can fix. None: it is a bug, and the traceback is needed."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return format_hydra_error(error, config_name or "train")
    if is_out_of_memory(error):
        hint = OUT_OF_MEMORY_HINTS.get(config_name, "the size of the task")
        return f"out of memory. Lower {hint}, or close other programs."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{abbreviated_repr(error.filename)} cannot be read or written: {error.strerror}. Give another path."
    return None


def abbreviated_repr(value: object, max_chars: int = 100) -> str:
    """The repr of a value, with its middle left out if it is long."""
    text = repr(os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else value)
    return text if len(text) <= max_chars else f"{text[: max_chars // 2]} … {text[-max_chars // 4 :]}"


def usage_hint(config_name: str) -> str:
    """How settings are written, with one of the program's keys as an example."""
    key, value = next(item for item in default_config(config_name).items() if type(item[1]) is int)
    return f"write key=value, for example {key}={value}; configs/{config_name}.yaml lists the keys."


def format_hydra_error(error: Exception, config_name: str) -> str:
    """An error of Hydra or OmegaConf in one line: the value, what was expected, how to fix it.

    Raises:
        KeyboardInterrupt: it is the cause of the error.
    """
    if is_keyboard_interrupt(error):
        raise KeyboardInterrupt
    reason: BaseException | None = error
    while reason is not None:  # errors of our own resolvers arrive wrapped
        if isinstance(reason, UserError):
            return str(reason)
        reason = reason.__context__
    text, _, full_key = str(error).strip().partition("\n    full_key: ")  # how OmegaConf names the key
    cause = " ".join(str(error.__cause__ or "").split("\n    full_key")[0].split())
    if match := re.search(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'", text):
        return explain_missing_plugin(match[1], match[2])
    if match := re.search(r"In '(\w+/\w+)': (?:\w+ raised while composing config: )?(.*)", " ".join(text.split())):
        return format_file_error(match[1], match[2], full_key.partition("\n")[0], config_name)
    if match := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        return explain_unknown_key(match[1], config_name)
    if match := re.search(r"Error merging override (.+)", text):
        key, _, value = match[1].lstrip("+").partition("=")
        if "is not a ListConfig" in cause:
            return f"{key} is {value}, but must be a list: {key}=[{value}]"
        return f"{match[1]} has a value of the wrong type: {cause}."
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        key, _, value = match[1].lstrip("+").partition("=")
        if isinstance(default_config(config_name).get(key), list):
            return f"{key} is {value}, but must be a list: {key}=[{value}]"
        sweep = "add -m to sweep over them, or " if config_name == "train" else ""
        return f"{match[1]} lists several values: {sweep}give one."
    if match := re.search(r"Sweep parameters '([^']+)' requires --multirun", text):
        return f"{match[1]} has several values: add -m to sweep over them, or give one."
    if "does not support sweep type" in text:
        return (
            "an interval has no values to list, so it needs hydra/sweeper=optuna, which tries values in it. Add that, "
            "or list values: key=1,2,3."
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={name} does not exist. Choose from: {', '.join(error.options)}."
    if match := re.search(r"Could not load '(\w+)/([^']+)'", text):  # one of several, as in logger=[csv,x]
        return f"{match[1]}={match[2]} does not exist. Choose from: {', '.join(choices(match[1]))}."
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not a setting: {usage_hint(config_name)}"
    if isinstance(error, ConfigCompositionException) and cause:
        text += f" ({cause})"
    text = " ".join(text.split("See https")[0].split())
    return f"{full_key.split()[0]}: {text}. Give a plain value." if full_key else text


def explain_missing_plugin(group: str, name: str) -> str:
    """One line for a launcher or sweeper that is not installed, or does not exist."""
    if package := PLUGINS.get(f"hydra/{group}={name}"):
        return f"hydra/{group}={name} is an optional package. Install it with: pip install {package}"
    known = ", ".join(key.partition("=")[2] for key in PLUGINS if key.startswith(f"hydra/{group}="))
    return f"hydra/{group}={name} does not exist. Choose from: basic, {known}."


def format_file_error(name: str, reason: str, key: str, config_name: str) -> str:
    """An error in a file of a config group, such as "experiment/my_recipe", in one line."""
    path = f"configs/{name}.yaml"
    if name.startswith("experiment/") and not re.search(
        r"^# *@package +_global_\s*$", (CONFIG_DIR / f"{name}.yaml").read_text(encoding="utf-8"), re.MULTILINE
    ):
        return f"{path} is not a recipe yet. Make this its first line: # @package _global_"
    if re.match(r"Key '.*' (is )?not in", reason):
        return f"{path}: {explain_unknown_key(key, config_name)}"
    if match := re.match(rf"Could not find '{name.partition('/')[0]}/(\w+)/(\w+)'", reason):
        return f"{path}: its list of defaults must say override /{match[1]}: {match[2]}"
    return f"{path}: {key + ': ' if key else ''}{reason.rstrip('.')}. Give a plain value."
