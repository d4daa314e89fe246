"""Builds Lightning's Trainer from the `trainer` group of the config."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from data.batches import BatchLimits
from model import kernels
from model.kernels.bfloat16 import BF16_MATMUL, bf16_matmul, has_bf16_units
from system.checks import short_repr
from system.errors import UserError
from training.lightning_overhead import reduce_overhead
from training.processes import check_processes, cluster_environment, launched_devices
from training.progress import NEVER, RunTimer, ValidationSchedule
from training.trainer_options import HANDLED_HERE, REJECTED

_SWITCHES = ("enable_progress_bar", "inference_mode", "detect_anomaly", "benchmark")
_COUNTS = ("max_steps", "max_epochs", "min_steps", "min_epochs", "accumulate_grad_batches", "log_every_n_steps")


def build_trainer(
    options: Mapping[str, Any],
    num_validations: int,
    callbacks: list[Callback],
    timer: RunTimer | None = None,
    **ours: Any,
) -> Trainer:
    """Builds a Trainer from the user's options; `ours` are further arguments, such as the logger.

    Args:
        options: result of `resolve_trainer_options`.
        num_validations: number of validations, evenly spread; the last one is at the end of the run.
        timer: of a run with a budget; None: a timer for `trainer.max_time`.

    Raises:
        UserError: Lightning does not accept a value.
    """
    if num_validations < 1:
        raise UserError(
            f"num_validations is {num_validations}, but must be at least 1: validations choose the best checkpoint."
        )
    passed = {name: value for name, value in options.items() if name not in HANDLED_HERE}
    if passed.get("precision") == BF16_MATMUL:
        del passed["precision"]
        ours["plugins"] = [*ours.get("plugins", []), BF16Matmul()]
    timer = timer or RunTimer(options.get("max_time"), options.get("min_steps"), options.get("min_epochs"))
    schedule = ValidationSchedule(num_validations, options.get("val_check_interval"))
    # ValidationSchedule decides when to validate, by the batches of the whole run: an interval may exceed an epoch.
    ours |= {"val_check_interval": NEVER, "check_val_every_n_epoch": None}
    passed = launched_devices() | passed
    ours["plugins"] = [*ours.get("plugins", []), cluster_environment()]
    try:
        trainer = Trainer(callbacks=[timer, *callbacks, schedule], **ours, **passed)
    except (MisconfigurationException, TypeError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        also = f", and here auto and {BF16_MATMUL}" if reason.startswith("Precision ") else ""
        raise UserError(f"trainer: {reason}{also}") from error
    check_processes(trainer, options.get("strategy"))
    trainer._signal_connector.register_signal_handlers = lambda: None  # GracefulStop handles signals
    reduce_overhead(trainer)
    return trainer


class BF16Matmul(Precision):
    """Lightning plugin for trainer.precision=bf16-matmul: training steps multiply matrices in bfloat16."""

    precision = BF16_MATMUL

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Context of the forward pass of a training step. Products in bfloat16 have gradients in bfloat16, too."""
        with bf16_matmul():
            yield


def check_time_bounds(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Raises UserError: the clocks of several processes differ, and so would their learning rates and their end."""
    if trainer.world_size == 1:
        return
    if trainer.max_steps == -1 and trainer.max_epochs == -1:
        raise UserError(
            f"{trainer.world_size} devices cannot be bounded by time: neither by budget nor by trainer.max_time. Use "
            "trainer.max_steps or trainer.max_epochs instead, or train on one device: trainer.devices=1."
        )
    for name in ("max_time", "val_check_interval"):
        if isinstance(options.get(name), timedelta):
            raise UserError(
                f"trainer.{name} is a time, but each of {trainer.world_size} devices has a clock of its own. "
                "Use steps, epochs or batches instead, or train on one device: trainer.devices=1."
            )


def batch_limits(options: Mapping[str, Any]) -> BatchLimits:
    """The options that limit the number of batches."""
    return BatchLimits(**{field.name: options[field.name] for field in fields(BatchLimits) if field.name in options})


def resolve_trainer_options(options: dict[str, Any]) -> dict[str, Any]:
    """Converts options for Lightning: times become timedelta, `auto` is resolved, unknown names raise UserError.

    The result always has `precision`.
    """
    known = inspect.signature(Trainer.__init__).parameters
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            fix = f"Did you mean {' or '.join(f'trainer.{n}' for n in near)}?" if near else "See Lightning's Trainer."
            raise UserError(f"unknown key trainer.{name}: Lightning's Trainer has no such option. {fix}")
    options = {name: value for name, value in options.items() if value is not None}  # null means the default
    if options.get("overfit_batches") == 0:
        del options["overfit_batches"]  # Lightning's value for off
    for name, fix in REJECTED.items():
        if name in options:
            raise UserError(f"trainer.{name} cannot be set. {fix}")
    _check_values(options)
    if "val_check_interval" in options and not isinstance(options["val_check_interval"], int | float):
        options["val_check_interval"] = parse_duration(options["val_check_interval"], "trainer.val_check_interval")
    options = {"max_epochs": -1, "max_steps": -1, "precision": "32-true", **options}
    bounded = options["max_steps"] != -1 or options["max_epochs"] != -1
    if options.get("max_time") == "auto":
        options["max_time"] = None  # budget decides
    elif options.get("max_time") is not None:
        options["max_time"] = parse_duration(options["max_time"], "trainer.max_time")
    elif not bounded:
        raise UserError(
            "trainer: nothing ends this run. Set trainer.max_time (auto: budget decides), trainer.max_steps or "
            "trainer.max_epochs."
        )
    if options["precision"] == "bf16-products":
        raise UserError(f"trainer.precision=bf16-products is now called {BF16_MATMUL}.")
    if options["precision"] == "auto":
        options["precision"] = best_precision(expected_device(options))
    elif options["precision"] == BF16_MATMUL and expected_device(options).type != "cpu":
        raise UserError(f"trainer.precision={BF16_MATMUL} is for CPUs. Use auto, bf16-mixed or 32-true.")
    elif options["precision"] == BF16_MATMUL and not kernels.enabled():
        raise UserError(f"trainer.precision={BF16_MATMUL} is a kernel, and kernels are off. Use auto or 32-true.")
    return options


def _check_values(options: Mapping[str, Any]) -> None:
    """Raises UserError for invalid values that Lightning would accept, or reject late or unclearly."""
    for name in _COUNTS:
        value = options.get(name, 1)
        unbounded = value == -1 and name in ("max_steps", "max_epochs")
        if not unbounded and (type(value) is not int or value < 1):
            raise UserError(f"trainer.{name} is {short_repr(value)}, but must be a whole number of at least 1.")
    for what in ("steps", "epochs"):
        least, most = options.get(f"min_{what}", 1), options.get(f"max_{what}", -1)
        if most != -1 and least > most:
            raise UserError(f"trainer.min_{what} is {least:,}, but trainer.max_{what} is {most:,}. Raise the latter.")
    for name in _SWITCHES:
        if type(options.get(name, True)) is not bool:
            raise UserError(f"trainer.{name} is {short_repr(options[name])}, but must be true or false.")
    if options.get("deterministic", True) not in (True, False, "warn"):
        raise UserError(f"trainer.deterministic is {options['deterministic']!r}, but must be true, false or warn.")
    clip = options.get("gradient_clip_val", 1.0)
    if type(clip) not in (int, float) or not 0 <= clip < math.inf:
        raise UserError(
            f"trainer.gradient_clip_val is {short_repr(clip)}, but must be above 0, for example 1.0; null is off."
        )
    if "gradient_clip_algorithm" in options and "gradient_clip_val" not in options:
        raise UserError("trainer.gradient_clip_algorithm has no effect without a value: trainer.gradient_clip_val=1.0.")
    if options.get("limit_val_batches") == 0:
        raise UserError(
            "trainer.limit_val_batches is 0, but must be at least 1: validations choose the best checkpoint."
        )
    for name in ("limit_train_batches", "limit_val_batches", "overfit_batches", "val_check_interval"):
        value = options.get(name, 1)
        if name == "val_check_interval" and isinstance(value, str | Mapping):  # a time
            continue
        if not (type(value) in (int, float) and (0 < value <= 1 or (type(value) is int and value > 1))):
            raise UserError(
                f"trainer.{name} is {short_repr(value)}, but must be a number of batches or a fraction up to 1.0."
            )
    if options.get("profiler", "simple") not in ("simple", "advanced"):
        raise UserError(
            f"trainer.profiler is {short_repr(options['profiler'])}, but must be simple or advanced; null is off. "
            "Lightning's pytorch profiler fails when training ends."
        )


def best_precision(device: torch.device) -> str:
    """The fastest safe precision: bfloat16 where the device has hardware for it, float32 elsewhere."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(False):
        return "bf16-mixed"
    return BF16_MATMUL if device.type == "cpu" and has_bf16_units() and kernels.enabled() else "32-true"


def expected_device(options: Mapping[str, Any]) -> torch.device:
    """The device on which Lightning will train with these options."""
    wanted = options.get("accelerator", "auto")
    if wanted in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if wanted in ("auto", "gpu", "mps") and torch.backends.mps.is_available() else "cpu")


def stop_conditions(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options that end the run, each with the value that unsets it."""
    unset = {"max_time": "auto", "max_steps": -1, "max_epochs": -1}
    return {name: value for name, value in unset.items() if options.get(name) not in (None, value)}


def parse_duration(text: Any, name: str) -> timedelta:
    """Parses 90, "60s", "5m", "1h30m" or Lightning's "DD:HH:MM:SS". Raises UserError."""
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
    except (TypeError, ValueError, OverflowError):  # not a number, an unknown unit, or too large
        duration = timedelta()
    if duration <= timedelta():
        raise UserError(f"{name} is {short_repr(text)}, but must be a time such as 60s, 5m, 1h30m or 00:01:30:00.")
    return duration
