"""Lightning's Trainer from the `trainer` group of the config: times such as 5m, and `auto`."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from model.kernels.bfloat16 import BFLOAT16_PRODUCTS, bfloat16_products, has_bfloat16_units
from system.errors import UserError

_REFUSED = {
    "check_val_every_n_epoch": "Use validations=5, or trainer.val_check_interval=100 for every 100 batches.",
    "fast_dev_run": "Use trainer.max_steps=1 for a short run.",
    "logger": "A run always writes TensorBoard events.",
    "callbacks": "training/setup.py lists them.",
    "default_root_dir": "Use runs_dir=DIRECTORY.",
    "enable_checkpointing": "The best checkpoint is what a run is for.",
    "num_sanity_val_steps": "The first validation comes early enough: validations=5.",
    "enable_model_summary": "train.py says what is trained.",
    "barebones": "Use python -m benchmarks.training_speed to measure.",
}
_STEP_HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
_STEP_HOOKS += ("on_before_optimizer_step", "on_train_batch_end")
_COUNTS = ("max_steps", "max_epochs", "min_steps", "min_epochs", "accumulate_grad_batches", "log_every_n_steps")


def build_trainer(
    options: dict[str, Any], validations: int, batches_per_epoch: int, callbacks: list[Callback], **ours: Any
) -> Trainer:
    """A Trainer with the user's options; `ours` are logger and the like.

    Args:
        options: what `resolve` made of the `trainer` group.
        validations: passes over the validation split, evenly spread; the last one is at the end of the run.

    Raises:
        UserError: an option Lightning does not have, or a value it does not take.
    """
    if "val_check_interval" not in options:
        options["val_check_interval"] = every(options, validations, batches_per_epoch)
    elif isinstance(options["val_check_interval"], float):  # a share of an epoch
        options["val_check_interval"] = max(1, round(options["val_check_interval"] * batches_per_epoch))
    share = options.get("limit_train_batches")
    if isinstance(share, float) and share * batches_per_epoch < 1:
        raise UserError(
            f"trainer.limit_train_batches is {share}, which of {batches_per_epoch:,} batches an epoch leaves none. "
            f"Use at least {1 / batches_per_epoch:.2g}."
        )
    options["check_val_every_n_epoch"] = None  # count batches of the run, so that an interval may exceed an epoch
    if options.get("precision") == BFLOAT16_PRODUCTS:
        del options["precision"]
        ours["plugins"] = [*ours.get("plugins", []), BFloat16Products()]
    if options.get("profiler") is None:
        options["profiler"] = NoProfiler()
    # Always there, so that a run bounded by steps knows its time too, should it be extended by time.
    timer = Timer(options.pop("max_time", None), verbose=False)
    try:
        trainer = Trainer(callbacks=[*callbacks, timer], **ours, **options)
    except (MisconfigurationException, TypeError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        also = f", and here auto and {BFLOAT16_PRODUCTS}" if reason.startswith("Precision ") else ""
        raise UserError(f"trainer: {reason}{also}") from error
    skip_empty_hooks(trainer)
    return trainer


def skip_empty_hooks(trainer: Trainer) -> None:
    """Takes away the hooks of each step in which a callback does nothing: Lightning calls only what is callable.

    It prepares some 50 such calls a step, which for a small network is a noticeable part of it.
    """
    for callback in trainer.callbacks:
        for hook in _STEP_HOOKS:
            # Asked of the callback and not of its class: Lightning's LambdaCallback has its hooks itself.
            if getattr(getattr(callback, hook), "__func__", None) is getattr(Callback, hook):
                setattr(callback, hook, None)


class NoProfiler(PassThroughProfiler):
    """Lightning's own way not to profile, at less cost: a step goes through it some sixty times."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """One context for all."""
        return self._nothing


class BFloat16Products(Precision):
    """What Lightning calls a precision: training steps make their products in bfloat16, validation does not."""

    precision = BFLOAT16_PRODUCTS

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Around each training step's forward pass. What was multiplied there in bfloat16, its gradient is too."""
        with bfloat16_products():
            yield


def refuse_time_on_several_devices(trainer: Trainer) -> None:
    """Raises UserError: each process has a clock of its own, so that they would disagree about rates and the end."""
    if trainer.world_size > 1 and trainer.max_steps == -1 and trainer.max_epochs == -1:
        raise UserError(
            f"{trainer.world_size} devices cannot be bounded by time, be it budget or trainer.max_time. Give "
            "trainer.max_steps or trainer.max_epochs in its place, or train on one: trainer.devices=1."
        )


def resolve(options: dict[str, Any]) -> dict[str, Any]:
    """Options as Lightning takes them: times as timedelta, `auto` decided, unknown names refused.

    `precision` is always among them.
    """
    known = inspect.signature(Trainer.__init__).parameters
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            mend = f"Did you mean {' or '.join(f'trainer.{n}' for n in near)}?" if near else "See Lightning's Trainer."
            raise UserError(f"trainer.{name} is no option of Lightning's Trainer. {mend}")
    for name, mend in _REFUSED.items():
        if name in options:
            raise UserError(f"trainer.{name} cannot be set. {mend}")
    if options.get("limit_val_batches") == 0:
        raise UserError("trainer.limit_val_batches is 0, but the best checkpoint is chosen by validation.")
    for name in _COUNTS:
        value = options.get(name)
        if value not in (None, -1) and (type(value) is not int or value < 1):
            raise UserError(f"trainer.{name} is {value!r}, but must be a whole number of at least 1.")
    clip = options.get("gradient_clip_val")
    if isinstance(clip, int | float) and not 0 <= clip < math.inf:
        raise UserError(f"trainer.gradient_clip_val is {clip}, but must be above 0, for example 1.0; null is off.")
    for name in ("limit_train_batches", "limit_val_batches", "val_check_interval"):
        value = options.get(name)
        if isinstance(value, int | float) and not (0 < value <= 1 or (type(value) is int and value > 1)):
            raise UserError(
                f"trainer.{name} is {value}, but must be a number of batches, at least 1, or a share up to 1.0."
            )
    options = {
        "max_epochs": -1,
        **options,
        "precision": options.get("precision") or "32-true",
        "max_steps": -1 if options.get("max_steps") is None else options["max_steps"],
    }
    bounded = _given(options, "max_steps") or _given(options, "max_epochs")
    if options.get("max_time") == "auto":
        options["max_time"] = None  # budget decides
    elif options.get("max_time") is not None:
        options["max_time"] = parse_duration(options["max_time"], "trainer.max_time")
    elif not bounded:
        raise UserError(
            "trainer: nothing ends this run. Give trainer.max_time (auto: budget decides), trainer.max_steps or "
            "trainer.max_epochs."
        )
    if options["precision"] == "auto":
        options["precision"] = best_precision(expected_device(options))
    elif options["precision"] == BFLOAT16_PRODUCTS and expected_device(options).type != "cpu":
        raise UserError(f"trainer.precision={BFLOAT16_PRODUCTS} is for CPUs. Use auto, bf16-mixed or 32-true.")
    return options


def best_precision(device: torch.device) -> str:
    """bfloat16 where the device has units for it, to the extent that it pays there; float32 elsewhere."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(False):
        return "bf16-mixed"
    return BFLOAT16_PRODUCTS if device.type == "cpu" and has_bfloat16_units() else "32-true"


def expected_device(options: Mapping[str, Any]) -> torch.device:
    """Where Lightning is going to train with these options, before there is a Trainer."""
    wanted = options.get("accelerator", "auto")
    if wanted in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if wanted in ("auto", "gpu", "mps") and torch.backends.mps.is_available() else "cpu")


def bounds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the user's options that end the run, each with the value that would not."""
    unset = {"max_time": "auto", "max_steps": -1, "max_epochs": -1}
    return {name: value for name, value in unset.items() if options.get(name) not in (None, value)}


def _given(options: Mapping[str, Any], bound: str) -> bool:
    return options.get(bound) not in (None, -1)


def every(options: dict[str, Any], validations: int, batches_per_epoch: int) -> int | timedelta:
    """How far apart validations are: batches if the run is bounded by steps or epochs, else time."""
    if validations < 1:
        raise UserError(f"validations is {validations}, but must be at least 1: the best checkpoint is chosen by it.")
    batches = []
    if _given(options, "max_steps"):
        batches.append(options["max_steps"] * options.get("accumulate_grad_batches", 1))
    if _given(options, "max_epochs"):
        batches.append(options["max_epochs"] * batches_per_epoch)
    if batches:
        return max(1, -(-min(batches) // validations))
    return 1.02 * options["max_time"] / validations  # a little late, so that the end and its validation come first


def parse_duration(text: Any, name: str) -> timedelta:
    """90, "60s", "5m", "1h30m" or Lightning's own "DD:HH:MM:SS" as a timedelta. Raises UserError."""
    pattern = r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m(?:in)?)?(?:([\d.]+)s)?"
    try:
        if isinstance(text, dict):
            parts = text
        elif isinstance(text, (int, float)) and not isinstance(text, bool):
            parts = {"seconds": text}
        else:
            written = re.sub(r"\s", "", str(text))
            match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", written) or re.fullmatch(pattern, written)
            values = [float(part or 0) for part in match.groups()] if match else [0.0]
            parts = dict(zip(("days", "hours", "minutes", "seconds"), values, strict=False))
        duration = timedelta(**parts)
    except (TypeError, ValueError, OverflowError):  # not a number, no unit of time, or beyond all time
        duration = timedelta()
    if duration <= timedelta():
        raise UserError(f"{name} is {text!r}, but must be a time such as 60s, 5m, 1h30m or 00:01:30:00.")
    return duration
