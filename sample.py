"""Generates text with a trained GPT:  python sample.py prompt="To be, or not"      (keys: configs/sample.yaml)"""

from __future__ import annotations

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sampling.config import SampleConfig, SamplingConfig
from system.deferred_imports import deferred_imports
from system.errors import UserError
from system.files import read_prompt
from system.streams import for_terminal, print_note
from system.text import escape_json

if TYPE_CHECKING:  # torch is imported after the checks that do not need it
    from checkpoint.checkpoint import Checkpoint
    from sampling.text import Scores

SUFFIX, GGUF_SUFFIX = ".safetensors", ".gguf"
# Minimum surprisal in bits, and the foreground color (of xterm's 256) for it.
COLORS = ((0, 244), (1, 71), (3, 178), (6, 208), (9, 196))


def main(config: SampleConfig) -> None:
    """Loads a checkpoint and generates or scores text with it. Raises UserError."""
    prompt = read_prompt(config.prompt, config.prompt_file)
    check_settings(config, prompt)

    with deferred_imports():
        from checkpoint.checkpoint import find_checkpoint, load_checkpoint
        from model import kernels
        from sampling.text import score_text

    kernels.set_enabled(config.kernels)
    device = pick_device(config.device)
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint, config.runs_dir), device)
    if config.export is not None:
        usage = export(checkpoint, config)
    print_note(checkpoint.describe())
    as_json = config.format == "jsonl"
    if config.export is not None:
        print_note(f"exported: {config.export}{usage}")
    elif config.mode == "write":
        write_samples(checkpoint, prompt, config, as_json)
    elif config.mode == "interactive":
        run_interactive(checkpoint, config, as_json)
    else:
        show_scores(checkpoint, score_text(checkpoint, prompt), as_json)


def check_settings(config: SampleConfig, prompt: str) -> None:
    """Raises UserError for invalid settings and combinations."""
    if config.mode == "interactive" and prompt:
        raise UserError("mode=interactive reads prompts line by line. Leave prompt and prompt_file out.")
    if config.export is not None and (prompt or config.mode != "write"):
        raise UserError("export does not generate text. Leave prompt, prompt_file and mode out.")
    suffix = "" if config.export is None or config.export.endswith("/") else Path(config.export).suffix
    if suffix not in ("", SUFFIX, GGUF_SUFFIX):
        raise UserError(
            f"export is {config.export!r}, but must be a file that ends in {SUFFIX} or, for llama.cpp, {GGUF_SUFFIX}, "
            "or a directory for Hugging Face transformers: export=my-model/"
        )
    if config.mode == "score" and not prompt:
        raise UserError('There is no text to score. Give one: prompt="To be, or not", or prompt_file=poem.txt')


def export(checkpoint: Checkpoint, config: SampleConfig) -> str:
    """Writes the network to a file or a Hugging Face directory; returns the lines with which transformers loads it."""
    path = Path(config.export)
    if not config.export.endswith("/") and path.suffix:
        checkpoint.export(path) if path.suffix == SUFFIX else checkpoint.export_gguf(path)
        return ""
    from configs.saved_config import training_command

    generation = {
        "do_sample": config.temperature > 0,
        "max_length": checkpoint.network.config.context_length,
        "temperature": config.temperature or None,
        **{name: getattr(config, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
    }
    generation["top_k"] = config.top_k or 0  # transformers has a default of 50
    run = training_command(checkpoint.path.parent.parent)
    return "\n" + checkpoint.export_directory(path, {k: v for k, v in generation.items() if v is not None}, run)


def write_samples(checkpoint: Checkpoint, prompt: str, config: SamplingConfig, as_json: bool, first: int = 0) -> None:
    """Streams the continuations of a prompt, or prints a JSON object for each. `first` is the first one's index."""
    from sampling.text import generate_text, prompt_ids

    num_tokens, context = len(prompt_ids(checkpoint.tokenizer, prompt)), checkpoint.network.config.context_length
    if num_tokens > context:
        print_note(f"the prompt has {num_tokens} tokens; the model sees the last {context}")
    begun = None
    for sample, piece in generate_text(checkpoint, prompt, config, first, logprobs=as_json):
        if as_json:
            if sample.finish_reason:
                print(escape_json(json.dumps({"prompt": prompt} | asdict(sample), ensure_ascii=False)), flush=True)
            continue
        if sample.index != begun:
            begun = sample.index
            if config.num_samples > 1:
                print(f"\n--- sample {begun - first + 1} ---")
            print(for_terminal(prompt), end="")
        print(for_terminal(piece), end="\n" if sample.finish_reason else "", flush=True)


def run_interactive(checkpoint: Checkpoint, config: SamplingConfig, as_json: bool) -> None:
    """Reads one prompt per line and continues each. Ctrl-C stops a continuation; at the prompt, it ends the program."""
    print_note("one prompt per line; Ctrl-C stops a text, Ctrl-D ends")
    read_line = line_reader()
    first = 0
    while (line := read_line()) is not None:
        try:
            write_samples(checkpoint, line, config, as_json, first)
        except KeyboardInterrupt:
            print()
        first += config.num_samples  # so that the same prompt gets another continuation


def line_reader() -> Callable[[], str | None]:
    """Returns a function that reads a line of standard input, or returns None at its end.

    In a terminal, lines can be edited and recalled with the arrow keys, on platforms with readline.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):

        def read_plain_line() -> str | None:
            print("> " * sys.stdin.isatty(), end="", file=sys.stderr, flush=True)
            return line.rstrip("\n") if (line := sys.stdin.readline()) else None

        return read_plain_line
    with suppress(ImportError):  # Windows has line editing of its own
        import readline  # noqa: F401 -- input() uses it

    def read_line() -> str | None:
        try:
            return input("> ")
        except EOFError:
            print()
            return None

    return read_line


def show_scores(checkpoint: Checkpoint, scores: Scores, as_json: bool) -> None:
    """Prints bits per byte and nats per token, and in a terminal the text colored by surprisal; or a JSON object."""
    if as_json:
        print(json.dumps(asdict(scores) | {"bits_per_byte": scores.bits_per_byte}))
        return
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        print(colored(checkpoint, scores))
        legend = "  ".join(f"\033[38;5;{color}m{bits} bits or more\033[0m" for bits, color in COLORS)
        print(f"\neach token by its surprise: {legend}")
    nats = -sum(scores.logprobs) / len(scores.tokens)
    print(f"{scores.bytes:,} bytes, {len(scores.tokens):,} tokens: {scores.bits_per_byte:.3f} bits per byte, "
          f"{nats:.3f} nats per token")  # fmt: skip


def colored(checkpoint: Checkpoint, scores: Scores) -> str:
    """The scored text with terminal colors. A character of several tokens has the color of the last one."""
    from data.tokenizer import StreamingDetokenizer

    decoder, pieces = StreamingDetokenizer(checkpoint.tokenizer), []
    for token, logprob in zip(scores.tokens, scores.logprobs, strict=True):
        color = max(color for color in COLORS if color[0] <= -logprob / math.log(2))[1]
        pieces.append(f"\033[38;5;{color}m{for_terminal(decoder.push(token))}")
    return "".join(pieces) + "\033[0m"


def pick_device(choice: str) -> str:
    """Returns the fastest device for auto, else the choice. Raises UserError if this machine does not have it."""
    import torch

    gpus = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))] * torch.cuda.is_available()
    present = [*gpus, *["mps"] * torch.backends.mps.is_available(), "cpu"]
    if choice == "auto":
        return present[0]
    if choice not in present:
        raise UserError(f"device is {choice!r}, but this machine has {', '.join(present)}.")
    return choice


if __name__ == "__main__":
    entry_point(main, "sample")
