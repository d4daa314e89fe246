"""From the command line to a config, and from any mistake of the user to one line."""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs import schema
from configs.errors import UserError
from configs.run_directory import started_by_lightning, sweep_removed_if_refused

CONFIG_DIR = Path(__file__).resolve().parent
# Their values are taken exactly as typed: Hydra would read commas, quotes, = and ${ as its own grammar.
LITERAL_KEYS = (
    *("prompt", "prompt_file", "stop", "checkpoint", "token", "data.corpus", "data.cache_dir", "runs_dir"),
    *("png", "html", "logdir", "resume", "init_from"),
)


def run(task: Callable[[DictConfig], None], config_name: str) -> None:
    """Composes the config, runs the task (once, or once a job of a sweep), and ends the process on an error."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come through to us, instead of being printed by Hydra
    with one_line_errors(config_name):
        schema.register()
        if not started_by_lightning():  # which passes on what this line made of the arguments
            sys.argv[1:] = flags_first([as_literal(argument) for argument in sys.argv[1:]])

        @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)
        def job(config: DictConfig) -> None:
            with (
                quiet_end(),
                one_line_errors(config_name),
                sweep_removed_if_refused(),
            ):  # here too: Hydra would print a line first
                refuse_unknown(config, config_name)
                task(config)

        job()


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The config alone, without Hydra's run directory or sweeps."""
    schema.register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose(config_name, [as_literal(override) for override in overrides])


def read_prompt(config: DictConfig) -> str:
    """The prompt's text: given, from a file, or from standard input. Raises UserError."""
    if config.prompt is not None and config.prompt_file is not None:
        raise UserError("prompt and prompt_file are both given. Leave one out.")
    if config.prompt_file is None:
        prompt = config.prompt or ""
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):  # bytes Python cannot read
            raise UserError("prompt is not UTF-8. Convert it to UTF-8.")
        return prompt
    name = config.prompt_file
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_file {name} is not UTF-8 at byte {error.start}. Convert it to UTF-8.") from error
    except OSError as error:
        raise UserError(f"prompt_file {name} cannot be read: {error.strerror}. Give a text file, or - .") from error


def flags_first(arguments: list[str]) -> list[str]:
    """Hydra's flags before the settings: it would not take a setting after a flag. Raises UserError for others."""
    from hydra._internal.utils import get_args_parser

    settings = [argument for argument in arguments if re.match(r"[^-][^=]*=|~", argument)]
    flags = [argument for argument in arguments if argument not in settings]
    _, unknown = get_args_parser().parse_known_args(flags)
    if unknown:
        raise UserError(f"{unknown[0]!r} is no option: write key=value, for example model.num_heads=8.")
    return flags + settings


def as_literal(argument: str) -> str:
    """Quotes the value of a key whose text must reach us as it is; other arguments stay. Raises UserError."""
    key, equals, value = argument.partition("=")
    if key in schema.GROUPS and value == "null":
        raise UserError(f"{argument} leaves the run without a {key}. Choose one: configs/{key}/ has them.")
    if not equals or key not in LITERAL_KEYS or (value == "null" and key != "prompt"):
        return argument
    if value == "???":  # OmegaConf's mark of a missing value
        return f"{key}=${{three_question_marks:}}"
    # OmegaConf would resolve ${...}: a backslash makes it text, and backslashes before it count double.
    value = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


@contextmanager
def one_line_errors(config_name: str) -> Iterator[None]:
    """Ends the process with one line on standard error and exit code 2 where the user can mend it."""
    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        message = str(error) if isinstance(error, UserError) else explain(error, config_name)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def quiet_end() -> Iterator[None]:
    """Ctrl-C ends the process with exit code 130, a reader that has had enough of its output with 0; both silently."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print()
        sys.exit(130)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # what they still hold would fail again at the end
            os.dup2(nowhere, stream.fileno())
        sys.exit(0)


def explain(error: Exception, config_name: str) -> str:
    """Hydra's or OmegaConf's complaint in one line: the value, what was expected, how to mend it."""
    text = str(error).strip()
    cause = " ".join(str(error.__cause__ or "").split("\n    full_key")[0].split())
    if match := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text):
        return unknown_key(match[1], config_name)
    if match := re.search(r"Error merging override (.+)", text):
        return f"{match[1]} has a value of the wrong type: {cause}."
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]} lists several values: add -m to sweep over them, or give one."
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = [option for option in error.options if option != "schema"]
        return f"{group}={name} does not exist. Choose from: {', '.join(options)}."
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is no setting: write key=value, for example model.num_heads=8."
    if isinstance(error, ConfigCompositionException) and cause:
        text += f" ({cause})"
    return " ".join(text.split("See https")[0].split())


def refuse_unknown(config: DictConfig, config_name: str) -> None:
    """Raises UserError for a key that Hydra let in because of a leading +."""
    known = [f.name for f in dataclasses.fields(schema.ROOTS[config_name])]
    for key in config:
        if key not in known:
            raise UserError(unknown_key(str(key), config_name))


def unknown_key(key: str, config_name: str) -> str:
    """Names the keys nearest to one that does not exist."""
    near = difflib.get_close_matches(key, known_keys(config_name), n=3)
    mend = f"Did you mean {' or '.join(near)}?" if near else f"configs/{config_name}.yaml lists the keys."
    return f"{key} is no key of the config. {mend}"


def known_keys(config_name: str) -> list[str]:
    """Every dotted key of the default config."""
    GlobalHydra.instance().clear()  # a run that failed may have left it in use
    config = OmegaConf.to_container(compose(config_name, []))
    keys: list[str] = []

    def walk(node: dict, prefix: str) -> None:
        for name, value in node.items():
            keys.append(prefix + name)
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(config, "")
    return keys
