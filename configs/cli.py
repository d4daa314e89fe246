"""From the command line to a typed config, and from any mistake of the user to one line."""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs import schema
from configs.saved_config import escape_interpolation, merge_saved_config
from system.errors import UserError
from system.files import expand_user
from system.interrupts import is_keyboard_interrupt
from system.memory import is_out_of_memory
from system.streams import handle_broken_pipe, print_error
from training.config import RENAMED_KEYS, RunConfig, SweepJob, keys_of
from training.ranks import is_child_process, is_duplicate_error, launcher
from training.run_dir import remove

CONFIG_DIR = Path(__file__).resolve().parent
# Of Hydra's own settings a run may choose how a sweep goes; the rest would move or run things behind our back.
HYDRA_KEYS = ("hydra.mode", "hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher", "hydra.verbose")
# Hydra's flags that read a file which names what to run: a pickle, or YAML with _target_.
REJECTED_FLAGS = ("config_name", "config_path", "config_dir", "experimental_rerun")
# What takes a program's memory.
OUT_OF_MEMORY_HINTS = {
    "train": "data.batch_size, model.context_length, model.num_layers or model.d_model",
    "sample": "num_samples, or give a shorter prompt",
    "see": "the length of the text; of an untrained model also model.context_length or model.d_model",
    "lessons": "lengths",
    "context_cost": "lengths or tokens_per_batch",
    "attention_speed": "lengths or tokens_per_batch",
    "training_speed": "vocab_size",
    "kernels": "vocab_size",
}
# Their values are taken exactly as typed: Hydra would read commas, quotes, = and ${ as its own grammar.
PATH_KEYS = (
    *("checkpoint", "resume", "init_from", "prompt_file", "export", "runs_dir", "png", "html", "logdir"),
    *("data.corpus", "data.cache_dir", "corpus"),
)
LITERAL_KEYS = ("prompt", "stop", "token", *PATH_KEYS)
YES, NO = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")


def run(task: Callable[[Any], None], config_name: str) -> None:
    """Builds the config, runs the task (once, or once a job of a sweep), and ends the process on an error."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come through to us, instead of being printed by Hydra
    with exit_on_user_error(config_name):
        schema.register()
        if not is_child_process():  # which passes on what this line made of the arguments
            many = bool({"-m", "--multirun"} & set(sys.argv))
            literal = [quote_literal(argument, config_name, many) for argument in sys.argv[1:]]
            sys.argv[1:] = move_flags_first(literal, config_name)
            schema.register(only_shown=shows_config(sys.argv[1:]))

        composed: list[DictConfig] = []  # empty: an error is one of composing the config
        sweep = Sweep(config_name)

        @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)
        def job(config: DictConfig) -> None:
            # One line here too: Hydra would print one of its own first.
            with handle_broken_pipe(), exit_on_user_error(config_name), sweep.run():
                composed.append(config)
                check_keys(config, config_name)
                check_no_sweep_in_launcher()
                resolve_paths(config)
                task(run_config(config))

        try:
            job()
        except Exception as error:
            if composed:
                raise
            raise UserError(format_hydra_error(error, config_name)) from error
        finally:
            sweep.report()
        if sweep.failed:
            sys.exit(2)


class Sweep:
    """What became of the runs of a sweep. One that is refused does not end it, and is named at its end."""

    def __init__(self, config_name: str):
        self.failed: dict[str, list[str]] = {}  # what was wrong, and with which runs
        self._config_name = config_name
        self._num_runs = 0
        self._directory: Path | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run, of a sweep or alone. Raises UserError for one alone."""
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
        """One line for each thing that was wrong; a sweep without a run that trained leaves nothing."""
        for message, runs in self.failed.items():
            which = "" if len(runs) == self._num_runs else f"{'; '.join(runs)}: "
            if not is_duplicate_error():
                print_error(f"{which}{message}")
        if self.failed and not any(path.is_dir() for path in self._directory.iterdir()):
            remove(self._directory)


def check_no_sweep_in_launcher() -> None:
    """Raises UserError: each of the launcher's processes would have a sweep of its own."""
    if launcher() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            f"a sweep starts the processes of its runs itself. Use python train.py -m, without {launcher()}."
        )


def swept_overrides() -> list[str]:
    """The settings of this run of a sweep that are not the same in all of its runs."""
    given = {argument.partition("=")[0]: argument for argument in sys.argv}  # as typed: the same in all
    return [text for text in HydraConfig.get().overrides.task if given.get(text.partition("=")[0]) != text]


def run_config(config: DictConfig) -> RunConfig:
    """The typed config of a run, from what Hydra composed; that of a resumed run is made of its config.yaml.

    Raises UserError for values that cannot work.
    """
    hydra_config, sweep_job = HydraConfig.get(), None
    if hydra_config.mode == RunMode.MULTIRUN:
        sweep_job = SweepJob(Path(hydra_config.sweep.dir), hydra_config.job.num, ",".join(swept_overrides()))
        if config.resume not in (None, "false"):
            raise UserError("resume goes on with one run, so there is nothing to sweep over. Leave out -m.")
    overrides = tuple(hydra_config.overrides.task)
    config, resumed = merge_saved_config(config, keys_of(overrides))
    return typed_config(config, "train", overrides, sweep_job=sweep_job, resumed=resumed)


def typed_config(config: DictConfig, config_name: str, overrides: Sequence[str], **derived: Any) -> Any:
    """The composed config as the frozen dataclass that a program takes. Raises UserError for values that cannot work.

    Args:
        overrides: the settings of the command line, as Hydra takes them.
        derived: fields that are no keys.
    """
    root = schema.ROOTS[config_name]
    names = [field.name for field in dataclasses.fields(root)]
    if "overrides" in names:
        derived["overrides"] = tuple(overrides)
    if "explicit_keys" in names:
        derived["explicit_keys"] = explicit_keys(config, config_name, keys_of(overrides))
    return schema.build(root, config, **derived)


def explicit_keys(config: DictConfig, config_name: str, overridden: frozenset[str]) -> frozenset[str]:
    """Keys that the command line gives, or a file that it chooses gives another value than the default."""
    if not overridden & {*schema.GROUPS, "experiment"}:
        return overridden
    default = OmegaConf.to_container(hydra.compose(config_name, []), resolve=True)
    ours, default = _flat(OmegaConf.to_container(config, resolve=True)), _flat(default)
    return overridden.union(key for key in ours if key not in default or ours[key] != default[key])


def compose(config_name: str, overrides: list[str]) -> Any:
    """The typed config alone, without Hydra's run directory or sweeps. Raises UserError."""
    schema.register()
    overrides = [quote_literal(override, config_name) for override in overrides]
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            config = hydra.compose(config_name, overrides)
        except Exception as error:  # of what kind, Hydra does not promise
            raise UserError(format_hydra_error(error, config_name)) from error
        check_keys(config, config_name)
        resolve_paths(config)
        return typed_config(config, config_name, overrides)


def resolve_paths(config: DictConfig) -> None:
    """Expands a leading ~ in every path of the config. Raises UserError for what cannot be the path of anything."""
    for key in PATH_KEYS:
        value = OmegaConf.select(config, key)
        if not isinstance(value, str):
            continue
        if key == "resume" and value.lower() in YES + NO:  # a directory of that name: resume=./1
            expanded = "true" if value.lower() in YES else None
        else:
            expanded = expand_user(value)
            try:
                os.lstat(expanded)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except (OSError, ValueError) as error:  # too long, not permitted; a NUL
                long = f"a text of {len(value):,} characters ({abbreviated_repr(value, 40)})"
                what = long if len(value) > 255 else abbreviated_repr(value)
                reason = getattr(error, "strerror", None) or error
                raise UserError(f"{key} is {what}, but must be a path that can be looked up: {reason}.") from error
        if expanded != value:
            OmegaConf.update(config, key, None if expanded is None else escape_interpolation(expanded))


def check_no_arguments(arguments: list[str]) -> None:
    """Raises UserError where there are any, for a program without settings."""
    if arguments:
        raise UserError(f"{abbreviated_repr(arguments[0])} is given, but this program has no settings. Leave it out.")


def move_flags_first(arguments: list[str], config_name: str) -> list[str]:
    """Hydra's flags before the settings: it would not take a setting after a flag. Raises UserError for others."""
    from hydra._internal.utils import get_args_parser

    settings = [argument for argument in arguments if re.match(r"[^-][^=]*=|~", argument)]
    flags = [argument for argument in arguments if argument not in settings]
    parser = get_args_parser()
    parser.error = partial(_unknown_flag, config_name)  # argparse itself would print how to use all flags
    known, unknown = parser.parse_known_args(flags)
    if unknown:
        raise UserError(f"{unknown[0]!r} is no option: {usage_hint(config_name)}")
    for name in REJECTED_FLAGS:
        if getattr(known, name) is not None:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is not taken here. Put a file of settings into configs/experiment/.")
    return flags + settings


def _unknown_flag(config_name: str, message: str) -> None:
    raise UserError(f"{message}: {usage_hint(config_name)}")


def quote_literal(argument: str, config_name: str, sweep: bool = False) -> str:
    """Quotes the value of a key whose text must reach us as it is; other arguments stay. Raises UserError.

    In a sweep, commas between the files of data.corpus and init_from separate values.
    """
    if not argument.isascii() and any("\ud800" <= char <= "\udfff" for char in argument):  # bytes Python cannot read
        raise UserError(f"{argument.partition('=')[0]!r} or its value is not UTF-8. Convert it, or rename the file.")
    key, equals, value = argument.partition("=")
    if equals and re.match(r"[+~]*hydra\b", key) and not key.lstrip("+~").startswith(HYDRA_KEYS):
        raise UserError(f"{argument} is not for a run to set. runs_dir=DIRECTORY says where runs go.")
    if not key.strip("+~ "):
        raise UserError(f"{argument!r} is no setting: {usage_hint(config_name)}")
    group = key.lstrip("+")
    if group in (*schema.GROUPS, "experiment") and re.fullmatch(r"null|true|false|[-+\d.e]+", value):
        raise UserError(f"{argument} is no choice of {group}. Choose one: configs/{group}/ has them.")
    if group in PATH_KEYS and value == "" and equals:
        raise UserError(f"{group} is empty. Give a path, or leave it out.")
    if not equals or group not in LITERAL_KEYS or (value == "null" and group != "prompt"):
        return argument
    if value == "???":  # OmegaConf's mark of a missing value
        return f"{group}=${{three_question_marks:}}"
    values = separate_files(value) if sweep and group in ("data.corpus", "init_from") else [value]
    none = "null" if len(values) > 1 else None
    quotes = [
        text if text == none else QuotedString(escape_interpolation(text), Quote.single).with_quotes()
        for text in values
    ]
    return f"{group}={','.join(quotes)}"


def separate_files(value: str) -> list[str]:
    """The files that commas separate; one whose name has a comma is there, or in quotes."""
    if os.path.lexists(expand_user(value)):
        return [value]
    found = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]+)""", value)
    return [text[1:-1] if text[0] in "'\"" and text[0] == text[-1] else text for text in found] or [value]


def shows_config(arguments: list[str]) -> bool:
    """Whether Hydra only shows what it would run with: then nothing is made."""
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(arguments)
    return known.cfg is not None or known.info is not None


@contextmanager
def exit_on_user_error(config_name: str | None) -> Iterator[None]:
    """Ends the process with one line on standard error and exit code 2 where the user can mend it."""
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
    """What the user can do about an error; None: nothing, it is a bug, and its traceback is what helps."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return format_hydra_error(error, config_name or "train")
    if is_out_of_memory(error):
        return (
            f"out of memory. Lower {OUT_OF_MEMORY_HINTS.get(config_name, 'what is asked for')}, or end other programs."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{abbreviated_repr(error.filename)} cannot be read or written: {error.strerror}. Give another path."
    return None


def abbreviated_repr(value: object, most: int = 100) -> str:
    """A value as an error line names it: in quotes, and its middle left out where it is long."""
    text = repr(os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else value)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"


def format_hydra_error(error: Exception, config_name: str) -> str:
    """Hydra's or OmegaConf's complaint in one line: the value, what was expected, how to mend it.

    Raises KeyboardInterrupt where that is what it comes from.
    """
    if is_keyboard_interrupt(error):
        raise KeyboardInterrupt
    reason: BaseException | None = error
    while reason is not None:  # what one of our resolvers says is inside what Hydra and OmegaConf say of it
        if isinstance(reason, UserError):
            return str(reason)
        reason = reason.__context__
    text, _, where = str(error).strip().partition("\n    full_key: ")  # OmegaConf's way to say which key
    cause = " ".join(str(error.__cause__ or "").split("\n    full_key")[0].split())
    if match := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        return unknown_key(match[1], config_name)
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
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={name} does not exist. Choose from: {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is no setting: {usage_hint(config_name)}"
    if isinstance(error, ConfigCompositionException) and cause:
        text += f" ({cause})"
    said = " ".join(text.split("See https")[0].split())
    return f"{where.split()[0]}: {said}. Give a plain value." if where else said


def check_keys(config: DictConfig, config_name: str) -> None:
    """Raises UserError for a key that Hydra let in because of a leading +, or that ~key or key=??? took away."""
    known = schema.keys_of(schema.ROOTS[config_name])
    for key in config:
        if key not in known:
            raise UserError(unknown_key(str(key), config_name))
    missing = {key for key in known if key not in config} | OmegaConf.missing_keys(config)
    for key in sorted(missing):
        raise UserError(f"{key} has no value. Give one, or leave it out for the default.")


def unknown_key(key: str, config_name: str) -> str:
    """Names the keys nearest to one that does not exist."""
    known = known_keys(config_name)
    if key in known:
        return f"{key} cannot be set: another setting took {key.rpartition('.')[0] or key} away. Leave one out."
    if key in RENAMED_KEYS:
        letters = " Its letters are now S (sliding window) and L (all tokens)." if key.endswith("_pattern") else ""
        return f"{key} is now called {RENAMED_KEYS[key]}.{letters}"
    near = difflib.get_close_matches(key, known, n=3)
    fix = f"Did you mean {' or '.join(near)}?" if near else f"configs/{config_name}.yaml lists the keys."
    return f"{key} is an unknown key. {fix}"


def usage_hint(config_name: str) -> str:
    """How a key is given, with one of the program's own as example, and where the others are."""
    key, value = next(item for item in default_config(config_name).items() if type(item[1]) is int)
    return f"write key=value, for example {key}={value}; configs/{config_name}.yaml lists the keys."


def default_config(config_name: str) -> dict:
    """The config without any settings, as plain values."""
    GlobalHydra.instance().clear()  # a run that failed may have left it in use
    schema.register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(config_name, []))


def known_keys(config_name: str) -> list[str]:
    """Every dotted key of the default config, and every group."""
    return list(_flat(default_config(config_name)))


def _flat(config: dict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, for the groups too."""
    flat = {}
    for name, value in config.items():
        flat[prefix + name] = value
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
    return flat
