"""Shortcuts past work that Lightning does in every step, which is a noticeable part of a small network's step.

`SHORTCUTS` names them and `without(name)` switches one off, so that a benchmark can measure what each one saves.
Training computes the same numbers with and without them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

_STEP_HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
_STEP_HOOKS += ("on_before_optimizer_step", "on_train_batch_end")


class LowOverheadModule(pl.LightningModule):
    """LightningModule with cheaper versions of methods that Lightning calls in every step."""

    def __setattr__(self, name: str, value: object) -> None:
        """Bypasses nn.Module, whose attribute setting is slow: Lightning notes about forty times a step where it is."""
        plain = name in ("_current_fx_name", "last_loss")
        object.__setattr__(self, name, value) if plain else super().__setattr__(name, value)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Returns a batch that is on the device already; Lightning would search it for tensors first."""
        there = isinstance(batch, Tensor) and batch.device == device
        return batch if there else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clips gradients if `trainer.gradient_clip_val` is set; Lightning takes longer to find that it is not."""
        if gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer, optimizer_closure=None) -> None:
        """Updates the weights and frees the gradients; Lightning would keep their memory until the next backward."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, *args) -> None:
        """Does nothing: `optimizer_step` has freed the gradients."""


class NoProfiler(PassThroughProfiler):
    """PassThroughProfiler with one shared context; a step enters about sixty."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Returns the shared context."""
        return self._nothing


def skip_profiler(trainer: Trainer) -> None:
    """Replaces Lightning's default profiler, which measures nothing, with a cheaper one."""
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = NoProfiler()


def skip_empty_hooks(trainer: Trainer) -> None:
    """Removes the hooks that a callback does not implement; Lightning prepares about fifty of these calls per step."""
    for callback in trainer.callbacks:
        for hook in _STEP_HOOKS:
            # The callback's own attribute counts, not its class's: LambdaCallback sets its hooks on the instance.
            if getattr(getattr(callback, hook), "__func__", None) is getattr(Callback, hook):
                setattr(callback, hook, None)  # Lightning calls only what is callable


def cached_signature(function: Callable) -> Callable:
    """Decorator: stores the signature of `training_step`, which Lightning would determine again in every step."""
    function.__signature__ = inspect.signature(function)
    SHORTCUTS["cached_signature"] = ((function, "__signature__"),)
    return function


def reduce_overhead(trainer: Trainer) -> None:
    """Applies the shortcuts that change the Trainer; those that change the module are in LowOverheadModule."""
    for shortcut in (skip_profiler, skip_empty_hooks):
        if shortcut.__name__ not in _switched_off:
            shortcut(trainer)


SHORTCUTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "skip_profiler": (),
    "skip_empty_hooks": (),
    "fast_setattr": ((LowOverheadModule, "__setattr__"),),
    "transfer_batch_to_device": ((LowOverheadModule, "transfer_batch_to_device"),),
    "configure_gradient_clipping": ((LowOverheadModule, "configure_gradient_clipping"),),
    "zero_grad_after_step": ((LowOverheadModule, "optimizer_step"), (LowOverheadModule, "optimizer_zero_grad")),
}
"""Name -> the attributes that make up the shortcut; none for a function that `reduce_overhead` calls."""
_switched_off: set[str] = set()


@contextmanager
def without(name: str) -> Iterator[None]:
    """Switches off one of SHORTCUTS, for Trainers that are built and used inside: for benchmarks."""
    saved = [(owner, attribute, vars(owner)[attribute]) for owner, attribute in SHORTCUTS[name]]
    _switched_off.add(name)
    for owner, attribute, _ in saved:
        delattr(owner, attribute)
    try:
        yield
    finally:
        _switched_off.remove(name)
        for owner, attribute, value in saved:
            setattr(owner, attribute, value)
