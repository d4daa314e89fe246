"""The library: train, load, generate, score and attention, for notebooks and programs. docs/library.md has examples.

    import tiny_gpt

    run = tiny_gpt.train("my.txt", budget="20s")
    gpt = tiny_gpt.load(run)
    print(tiny_gpt.generate(gpt, "To be", max_new_tokens=100))
    tiny_gpt.attention(gpt, "To be, or not to be")

Mistakes raise UserError, and nothing here exits the process. Importing this module takes milliseconds; PyTorch and
Lightning are imported by the first call that needs them.
"""

from __future__ import annotations

import gc
import html
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_ROOT = Path(__file__).resolve().parent


def _import_own(*names: str) -> list[ModuleType]:
    """Imports modules of this project by name, also where a file beside a notebook has the same name."""
    sys.path.insert(0, str(_ROOT))
    try:
        modules = [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(_ROOT))
    for name, module in zip(names, modules, strict=True):
        if Path(module.__file__ or "") not in (_ROOT / name / "__init__.py", _ROOT / f"{name}.py"):
            raise ImportError(
                f"tiny_gpt has a module named {name}, but {module.__file__} was imported under this name. Rename that "
                "file, or import tiny_gpt first."
            )
    return modules


# The packages are empty. Once they are imported, all modules in them are found.
_import_own("analysis", "checkpoint", "configs", "data", "model", "sampling", "system", "training")

from system.errors import TrainingInterrupted, UserError  # noqa: E402
from system.version import VERSION  # noqa: E402

if TYPE_CHECKING:
    import numpy as np

    from analysis.text_measures import TextMeasures
    from checkpoint.checkpoint import Checkpoint
    from sampling.text import Scores

__version__ = VERSION
__all__ = ["train", "load", "generate", "score", "attention", "Run", "Attention", "UserError", "TrainingInterrupted"]


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    run_dir: Path
    """config.yaml, train.log, checkpoints, TensorBoard events and summary.json."""

    @property
    def summary(self) -> dict[str, Any]:
        """The final metrics, such as summary["val_bits_per_byte"], and the run's length and size."""
        return json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))

    @property
    def checkpoint(self) -> Path:
        """The file with the weights of the lowest validation loss."""
        return self.run_dir / self.summary["checkpoint"]

    @property
    def history(self) -> dict[str, list[tuple[int, float]]]:
        """The curves of the run: TensorBoard tag -> (step, value) pairs."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.run_dir), size_guidance={"scalars": 0}).Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(*settings: str | Path, **keys: Any) -> Run:
    """Trains a GPT, with the settings of `python train.py`.

        tiny_gpt.train("my.txt", budget="20s")
        tiny_gpt.train("model=llama", "model.num_heads=8", budget="1m")
        tiny_gpt.train(model="llama", budget="1m", **{"model.num_heads": 8})

    Args:
        settings: key=value, as on the command line; or the text to train on, a path without "=".
        keys: the same as arguments, with Python values.

    Raises:
        UserError: settings that cannot work.
        TrainingInterrupted: Ctrl-C, or "interrupt" in a notebook. The step is finished and everything is saved; it is a
            KeyboardInterrupt with the attribute run_dir.
    """
    with _process_left_alone():
        from configs.compose import compose
        from system.running_clock import running_seconds

        started_at = running_seconds()
        overrides = [_setting(setting) for setting in settings]
        overrides += [f"{key}={_value(value)}" for key, value in keys.items()]
        config = compose("train", overrides)
        devices = config.trainer.get("devices")
        if devices in (None, "auto"):
            config = config.replace_values({"trainer.devices": 1})
        elif devices != 1 and not (isinstance(devices, list) and len(devices) == 1):
            raise UserError(
                f"trainer.devices is {devices}, but tiny_gpt.train uses one device. Set it to 1, or train with "
                "python train.py, which starts a process per device."
            )
        (script,) = _import_own("train")
        return Run(script.train(config, started_at, exit_on_signal=False).absolute())


def load(source: Run | str | Path | None = None, device: str = "cpu") -> Checkpoint:
    """Loads a trained GPT: its `network`, a PyTorch module in eval mode, and its `tokenizer`.

    Args:
        source: a run, a run directory, or a .ckpt or .safetensors file. None: the best checkpoint of the newest run
            under runs/.
        device: of the weights.

    Raises:
        UserError: there is no such checkpoint, or it is not one of this project.
    """
    from checkpoint.checkpoint import find_checkpoint, load_checkpoint

    path = source.run_dir if isinstance(source, Run) else source
    return load_checkpoint(find_checkpoint(None if path is None else str(path), "runs"), device)


def generate(gpt: Checkpoint, prompt: str = "", **options: Any) -> str | list[str]:
    """Continues a prompt.

    Args:
        gpt: what `load` returns.
        options: fields of sampling.config.SamplingConfig: max_new_tokens, temperature, top_k, top_p, min_p,
            repetition_penalty, stop, seed, num_samples.

    Returns:
        The prompt and its continuation; with num_samples above 1 a list of them.

    Raises:
        UserError: options that cannot work.
    """
    from sampling.config import SamplingConfig
    from sampling.text import generate_text

    if isinstance(options.get("stop"), (list, tuple)):
        options["stop"] = json.dumps(options["stop"])
    completions = {}
    for completion, _ in generate_text(gpt, prompt, SamplingConfig(**options)):
        completions[completion.index] = completion
    texts = [prompt + completion.text for completion in completions.values()]
    return texts[0] if len(texts) == 1 else texts


def score(gpt: Checkpoint, text: str) -> Scores:
    """How well a GPT predicts a text: `bits_per_byte`, and the log probability of each token. Raises UserError."""
    from sampling.text import score_text

    return score_text(gpt, text)


def attention(gpt: Checkpoint, text: str) -> Attention:
    """The attention weights of every head over a text.

    Raises:
        UserError: the text is empty, or has more tokens than the context.
    """
    import torch

    from data.tokenizer import encode, token_labels

    ids, context = encode(gpt.tokenizer, text).tolist(), gpt.network.config.context_length
    if not 0 < len(ids) <= context:
        raise UserError(f"the text has {len(ids)} tokens, but must have 1 to {context}, the context of this model.")
    maps = gpt.network.attention_maps(torch.tensor([ids], device=next(gpt.network.parameters()).device))
    labels, page_labels = (token_labels(gpt.tokenizer, ids, most) for most in (12, 40))
    return Attention(torch.cat(maps).cpu().numpy(), labels, page_labels, partial(_measure, gpt, ids))


def _measure(gpt: Checkpoint, ids: list[int]) -> TextMeasures:
    from analysis.text_measures import measure_text

    return measure_text(gpt.network, gpt.tokenizer, ids)


@dataclass(frozen=True)
class Attention:
    """Attention weights over a text. A notebook shows them as a picture."""

    maps: np.ndarray
    """(L, H, T, T): layer, head, query token, key token. Rows sum to 1."""
    labels: list[str]
    """The T tokens in printable form: "·" is a space, "↵" a new line."""
    page_labels: list[str]
    """The same, less abbreviated."""
    measure: Callable[[], TextMeasures] | None = field(default=None, repr=False, compare=False)
    """Measures what the heads are worth for the text; called for an interactive page."""

    def save(self, path: str | Path) -> None:
        """Saves a picture (.png) or an interactive page (.html). Raises UserError if it cannot be written."""
        from analysis.attention_html import save_page
        from analysis.attention_plot import save
        from system.files import check_suffix

        if str(path).endswith(".html"):
            save_page(self._page(), Path(path))
        else:
            check_suffix("path", str(path), ".png")
            save(self._picture(scale=2), Path(path))

    def page(self) -> _Page:
        """An interactive page, for the last line of a notebook's cell: point at a token to see where it attends."""
        return _Page(self._page())

    def _page(self) -> str:
        from analysis.attention_html import attention_page

        measures = self.measure and self.measure()
        return attention_page(self.maps, self.page_labels, "", (0, 0, len(self.labels) - 1), measures)

    def _picture(self, scale: int) -> np.ndarray:
        from analysis.attention_plot import draw_attention

        return draw_attention(self.maps, self.labels, scale=scale)

    def _repr_png_(self) -> bytes:
        from analysis.attention_plot import to_png

        return to_png(self._picture(scale=1))

    def __repr__(self) -> str:
        layers, heads, tokens = self.maps.shape[:3]
        return f"<Attention: {layers} layers, {heads} heads, {tokens} tokens>"


@dataclass(frozen=True)
class _Page:
    """HTML in a frame of its own, so that its styles and scripts stay apart from the notebook's."""

    html: str

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html)}" width="100%" height="640" style="border:0"></iframe>'


def _setting(setting: str | Path) -> str:
    return f"data.corpus={setting}" if isinstance(setting, Path) or "=" not in setting else setting


def _value(value: Any) -> str:
    """A Python value as the command line writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Restores what a training run changes for the whole process: logging, warnings, and the hook for tracebacks."""
    gc.collect()  # a previous run, before `deferred_imports` excludes all existing objects from collection
    root = logging.getLogger()
    handlers, level, hook = root.handlers[:], root.level, sys.excepthook
    root.handlers[:] = []
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, for bars that are not used here
            yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.excepthook = hook
