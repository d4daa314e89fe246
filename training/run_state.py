"""Checks the training state in a checkpoint, which may come from a stranger, before it is restored.

Lightning and PyTorch restore whatever a file has: counters of any type, optimizer states of any shape. Here each value
is compared with what this run would save itself, and only matching values are passed on.
"""

import math
import re
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import Trainer

from system.checks import COUNT, SECONDS, Bounded, Predicate, check
from system.errors import UserError
from training.callbacks.checkpoints import BestCheckpoint
from training.callbacks.metrics_logger import MetricsLogger

_VERSION = re.compile(r"[2-9]\d{0,3}(\.\d{1,4}){1,2}([.+]?[a-z]\w{0,30})?", re.ASCII)
_FACTOR = Bounded(float, 0, 1e38)

RUN_STATE = {
    "epoch": COUNT,
    "global_step": COUNT,
    "pytorch-lightning_version": Predicate(
        "the version of Lightning", lambda v: type(v) is str and _VERSION.fullmatch(v)
    ),
    "loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {"processed": COUNT}}}},
    "callbacks": {
        MetricsLogger.__qualname__: MetricsLogger.STATE,
        BestCheckpoint.__qualname__: BestCheckpoint.STATE,
        "Timer": {"time_elapsed": {"train": SECONDS}},
    },
    "optimizer_states": [{"state": {int: {str: object}}, "param_groups": [{"params": [COUNT]}]}],
    "run": {
        "text": str,
        "budget": (SECONDS, NoneType),
        "max_time": (SECONDS, NoneType),
        "seconds": SECONDS,
        "train_seconds": SECONDS,
        "settings?": {str: str | float | bool | None},
    },
    "MixedPrecision?": {  # PyTorch's GradScaler
        **{name: _FACTOR for name in ("scale", "growth_factor", "backoff_factor")},
        **{name: COUNT for name in ("growth_interval", "_growth_tracker")},
    },
}
"""Entries of last.ckpt that other checkpoints do not have; system/checks.py explains the notation."""


def check_run_state(content: dict[str, Any], path: Path) -> None:
    """Raises UserError if an entry that a resumed run needs is missing or invalid."""
    try:
        check(content, RUN_STATE, "it")
        run, step = content["run"], content["global_step"]
        if run["budget"] is not None and run["max_time"] is None:
            raise ValueError("run.budget needs run.max_time")
        if content["gpt"].get("step") != step:
            raise ValueError(f"gpt.step is not global_step, {step}")
    except ValueError as error:
        raise _cannot_resume(path, error) from error


def restorable_state(content: dict[str, Any], trainer: Trainer, optimizer: torch.optim.Optimizer, path: Path) -> dict:
    """Returns the part of a checkpoint that Lightning may restore: only values that this run would save itself.

    Args:
        content: content of a checkpoint that `check_run_state` accepts and that the network's weights came from.
        optimizer: new optimizer for the network of the run.

    Raises:
        UserError: loop counters or optimizer state do not fit the run.
    """
    step = content["global_step"]
    try:
        fit_loop = _matching(content["loops"]["fit_loop"], trainer.fit_loop.state_dict(), "loops.fit_loop")
        done = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
        epochs = fit_loop["epoch_progress"]["current"]["processed"]
        if (done, epochs) != (step, content["epoch"]):
            raise ValueError(f"loops say step {done} and epoch {epochs}, it says {step} and {content['epoch']}")
        if len(content["optimizer_states"]) != 1:
            raise ValueError(f"it has {len(content['optimizer_states'])} optimizer_states, but needs 1")
        optimizer_state = _optimizer_state(content["optimizer_states"][0], optimizer, step)
    except (ValueError, KeyError) as error:
        raise _cannot_resume(path, error) from error
    ours = {callback.state_key for callback in trainer.callbacks}
    scaler = {name: content[name] for name in ("MixedPrecision",) if name in content}
    return {
        **{name: content[name] for name in ("epoch", "global_step", "pytorch-lightning_version")},
        "lr_schedulers": [],  # they follow from the progress of the run
        "state_dict": content["state_dict"],
        "loops": {"fit_loop": fit_loop},
        "callbacks": {name: state for name, state in content["callbacks"].items() if name in ours},
        "optimizer_states": [optimizer_state],
        **scaler,
    }


def _matching(value: Any, ours: Any, name: str) -> Any:
    """Keeps the counters and flags that `ours` has; a missing one gets the value of `ours`."""
    if isinstance(ours, dict):
        check(value, dict, name)
        return {key: _matching(value.get(key, inner), inner, f"{name}.{key}") for key, inner in ours.items()}
    check(value, bool if isinstance(ours, bool) else COUNT, name)
    return value


def _optimizer_state(saved: dict[str, Any], optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """The saved state with the settings of this run. Raises ValueError if a state does not fit its weight."""
    ours = optimizer.state_dict()["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], ours)]
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in ours]:
        raise ValueError(f"its optimizer has groups of {sizes[0][:10]} weights, but this run of {sizes[1]}")
    if step > 0 or saved["state"]:
        for group, own in zip(optimizer.param_groups, ours, strict=True):
            for index, weight in zip(own["params"], group["params"], strict=True):
                shapes = _state_of(weight, group["muon"])
                check(saved["state"], {index: shapes}, "optimizer_states.0.state")
                if saved["state"][index].keys() != shapes.keys():
                    raise ValueError(f"optimizer_states.0.state.{index} has other keys than {', '.join(shapes)}")
        if len(saved["state"]) != sum(sizes[1]):
            raise ValueError(f"its optimizer has the state of {len(saved['state'])} weights, not of {sum(sizes[1])}")
    groups = [{**group, "initial_lr": group["lr"]} for group in ours]  # as set by the scheduler
    return {"state": saved["state"], "param_groups": groups}


def _state_of(weight: torch.Tensor, muon: bool) -> dict[str, Predicate]:
    """The state that the optimizer keeps for a weight."""
    tensor_like = Predicate(
        f"a floating-point tensor of shape {tuple(weight.shape)}",
        lambda value: type(value) is torch.Tensor and value.is_floating_point() and value.shape == weight.shape,
    )
    count = Predicate(
        "a count of steps",
        lambda value: type(value) is torch.Tensor and value.dtype == torch.float32 and value.ndim == 0
        and 0 <= float(value) < math.inf,
    )  # fmt: skip
    return {"momentum": tensor_like} if muon else {"step": count, "exp_avg": tensor_like, "exp_avg_sq": tensor_like}


def _cannot_resume(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is not a state that this run can resume from ({str(error)[:200]}). Resume another checkpoint, or "
        f"start a new run with its weights: init_from={path}"
    )
