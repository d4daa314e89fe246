"""What `--help` prints: how a program is used, and its keys with their defaults and meanings."""

import ast
import inspect
import re
from itertools import pairwise

from configs.defaults import CONFIG_DIR, choices, default_config
from configs.schema import CONFIG_CLASSES, GROUPS
from sampling.config import SamplingConfig


def help_text(description: str, config_name: str | None) -> str:
    """All of it.

    Args:
        description: the program's docstring.
        config_name: the file of configs/ that has its keys; None: it has none.
    """
    if config_name is None:
        return description.strip()
    written = (CONFIG_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    parts = [part for part in written.split("\n\n") if not re.search(r"^(defaults|hydra):", part, re.MULTILINE)]
    config = default_config(config_name)
    groups = [group for group in (*GROUPS, "experiment") if re.search(rf"^  - {group}:", written, re.MULTILINE)]
    return "\n".join(
        [
            description.strip(),
            "",
            "Keys, given as key=value, with their defaults:",
            "",
            *"\n\n".join(parts).strip().splitlines(),
            "",
            *_described({key: config[key] for key in config if key in _meanings(SamplingConfig)}, SamplingConfig),
            *(line for group in groups for line in _group(group, config.get(group, {}))),
        ]
    )


def _group(group: str, values: dict) -> list[str]:
    prefixed = {f"{group}.{key}": value for key, value in values.items()}
    return ["", f"{group}= one of {', '.join(choices(group))}", *_described(prefixed, CONFIG_CLASSES.get(group))]


def _described(values: dict, config_class: type | None) -> list[str]:
    meanings = _meanings(config_class) if config_class else {}
    lines = []
    for key, value in values.items():
        if key == "model.vocab_size" and value is None:  # not for the user to give
            continue
        lines.append(f"  {key}={'null' if value is None else value}")
        lines += [f"      {line.strip()}" for line in meanings.get(key.rpartition(".")[2], "").splitlines()]
    return lines


def _meanings(config_class: type) -> dict[str, str]:
    """Field -> the text under it."""
    body = ast.parse(inspect.getsource(config_class)).body[0].body
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
