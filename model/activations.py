"""The MLP's activations by name, `model.mlp=NAME`.

To add one: one function here (docs/extending.md). GPTConfig checks names before torch is imported, which takes seconds;
so functions here import what they need when a network is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Build = Callable[[], "Callable[[Tensor], Tensor]"]


@dataclass(frozen=True)
class RegisteredActivation:
    """What the network needs to know of an activation."""

    build: Build
    inputs: int
    """Numbers from the first matrix for each that goes on to the second; 2 for a gate and a value."""


ACTIVATIONS: dict[str, RegisteredActivation] = {}  # by the value of model.mlp


def activation(inputs: int = 1) -> Callable[[Build], Build]:
    """Registers a function by its name. It returns what is applied: (..., inputs x mlp_width) -> (..., mlp_width)."""

    def register(build: Build) -> Build:
        ACTIVATIONS[build.__name__] = RegisteredActivation(build, inputs)
        return build

    return register


@activation()
def gelu() -> Callable[[Tensor], Tensor]:
    """GELU in GPT-2's tanh form (arXiv:1606.08415)."""
    from model.layers import gelu

    return gelu


@activation(inputs=2)
def swiglu() -> Callable[[Tensor], Tensor]:
    """SwiGLU, Llama's (arXiv:2002.05202)."""
    from model.layers import swiglu

    return swiglu


@activation()
def relu2() -> Callable[[Tensor], Tensor]:
    """Squared ReLU, nanochat's (arXiv:2109.08668)."""
    from model.layers import squared_relu

    return squared_relu
