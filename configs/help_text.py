"""The text of `--help`: what a program does, its common settings, the recipes; and of `--help-all`: every key."""

import ast
import inspect
import json
import re
import textwrap
from itertools import pairwise
from typing import Any

from configs.defaults import CONFIG_DIR, choices, default_config, flatten
from configs.schema import CONFIG_CLASSES, GROUPS
from sampling.config import SamplingConfig

# The keys that users change most. Programs that are not listed have few keys, and --help shows those at the top level.
COMMON_KEYS = {
    "train": (
        *("data.corpus", "budget", "model", "model.num_layers", "model.num_heads", "model.context_length"),
        *("data.batch_size", "optimizer.lr", "trainer.max_steps", "seed"),
    ),
    "sample": (
        *("prompt", "prompt_file", "checkpoint", "mode", "max_new_tokens", "num_samples"),
        *("temperature", "top_k", "top_p", "seed"),
    ),
}
_MAX_STEPS = (-1, "optimizer steps, which end the run instead of the budget; -1: no limit")  # an option of Lightning
_WIDTH, _MAX_COLUMN = 110, 34


def help_text(description: str, config_name: str | None) -> str:
    """The answer to `--help`.

    Args:
        description: the program's docstring.
        config_name: the file of configs/ with its keys; None: it has no keys.
    """
    if config_name is None:
        return description.strip()
    defaults, file = flatten(default_config(config_name)), (CONFIG_DIR / f"{config_name}.yaml").read_text("utf-8")
    groups = dict(re.findall(r"^  - (\w+): (\w+)", file, re.MULTILINE))  # with the default choice
    meanings = _comments(file) | (_meanings(SamplingConfig) if config_name == "sample" else {})
    rows = []
    for key in COMMON_KEYS.get(config_name) or [key for key in defaults if "." not in key and key not in groups]:
        group, _, name = key.rpartition(".")
        if key in groups:
            rows.append((key, groups[key], f"one of {', '.join(choices(key))}"))
        elif key == "trainer.max_steps":
            rows.append((key, *_MAX_STEPS))
        else:
            meaning = _meanings(CONFIG_CLASSES[group]).get(name, "") if group else meanings.get(name, "")
            rows.append((key, defaults[key], meaning))
    lines = [description.strip(), "", "Common settings, given as key=value, with their defaults:", "", *_table(rows)]
    if "experiment" in groups:
        recipes = [f"  {name:<{_MAX_COLUMN - 18}}{_first_comment(name)}" for name in choices("experiment")]
        lines += ["", "Recipes, chosen with experiment=NAME:", "", *recipes]
    command = re.search(r"python (-m )?[\w.]+", description)[0]
    lines += ["", f"All keys:        {command} --help-all"]
    if command == "python train.py":
        lines += [
            "The config:      python train.py --cfg job              shows it, with your settings, without training",
            'Tab completion:  eval "$(python train.py -sc install=bash)"    for keys and choices, in this bash',
        ]
    return "\n".join(lines)


def _table(rows: list[tuple[str, Any, str]]) -> list[str]:
    """One line per key, with its meaning wrapped in a second column."""
    settings = [f"  {key}={_as_typed(value)}" for key, value, _ in rows]
    column = min(_MAX_COLUMN, max(len(setting) for setting in settings) + 2)
    lines = []
    for setting, (_, _, meaning) in zip(settings, rows, strict=True):
        text = re.sub(r"\bNone\b", "null", " ".join(meaning.split())).removesuffix(".")
        if len(text) > 2 * _WIDTH:
            text = text.partition(". ")[0]
        if text[1:2].islower():
            text = text[0].lower() + text[1:]
        if len(setting) + 2 > column:
            lines.append(setting)
            setting = ""
        indents = {"initial_indent": setting.ljust(column), "subsequent_indent": " " * column}
        lines += textwrap.wrap(text, _WIDTH, **indents) or [setting] * bool(setting)
    return lines


def _first_comment(recipe: str) -> str:
    """The first comment of a recipe, after the line for Hydra."""
    text = (CONFIG_DIR / "experiment" / f"{recipe}.yaml").read_text(encoding="utf-8")
    return next(iter(re.findall(r"^# *(?!@package)(?! )(\S.*)$", text, re.MULTILINE)), "")


def full_help_text(description: str, config_name: str | None) -> str:
    """The answer to `--help-all`. Arguments as in `help_text`."""
    if config_name is None:
        return description.strip()
    file = (CONFIG_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    parts = [part for part in file.split("\n\n") if not re.search(r"^(defaults|hydra):", part, re.MULTILINE)]
    config = default_config(config_name)
    groups = [group for group in (*GROUPS, "experiment") if re.search(rf"^  - {group}:", file, re.MULTILINE)]
    sampling_keys = [key for key in _meanings(SamplingConfig) if config_name == "sample"]
    return "\n".join(
        [
            description.strip(),
            "",
            "Keys, given as key=value, with their defaults:",
            "",
            *"\n\n".join(parts).strip().splitlines(),
            "",
            *_described({key: config[key] for key in sampling_keys}, SamplingConfig),
            *(line for group in groups for line in _group(group, config.get(group, {}))),
        ]
    )


def _group(group: str, values: dict[str, Any]) -> list[str]:
    prefixed = {f"{group}.{key}": value for key, value in values.items()}
    return ["", f"{group}= one of {', '.join(choices(group))}", *_described(prefixed, CONFIG_CLASSES.get(group))]


def _described(values: dict[str, Any], config_class: type | None) -> list[str]:
    meanings = _meanings(config_class) if config_class else {}
    lines = []
    for key, value in values.items():
        if key == "model.vocab_size" and value is None:  # cannot be set by the user
            continue
        lines.append(f"  {key}={_as_typed(value)}")
        lines += [f"      {line.strip()}" for line in meanings.get(key.rpartition(".")[2], "").splitlines()]
    return lines


def _as_typed(value: Any) -> str:
    """A value as a user would type it on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _meanings(config_class: type) -> dict[str, str]:
    """Field -> its docstring."""
    body = ast.parse(inspect.getsource(config_class)).body[0].body
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _comments(file: str) -> dict[str, str]:
    """Key -> the comment behind its value and on the lines below that have nothing else."""
    found: dict[str, str] = {}
    key = None
    for line in file.splitlines():
        if match := re.match(r"(\w+):[^#]*(?:# ?(.*))?$", line):
            key = match[1]
            found[key] = match[2] or ""
        elif key and (match := re.match(r"\s+# ?(.*)$", line)):
            found[key] += f" {match[1]}"
        else:
            key = None
    return found
