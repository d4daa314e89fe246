"""Registry of the MLP's activation functions: `model.mlp=NAME`.

To add one, write one function here (see docs/extending.md). GPTConfig validates names before the slow import of torch,
so these functions import what they need when a network is built.
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
    """A registered activation function."""

    build: Build
    inputs: int
    """Input features per output feature: 1, or 2 for a gated activation (a gate and a value)."""


ACTIVATIONS: dict[str, RegisteredActivation] = {}  # model.mlp -> activation


def activation(inputs: int = 1) -> Callable[[Build], Build]:
    """Registers a function under its name. The function returns the activation: (..., inputs x I) -> (..., I)."""

    def register(build: Build) -> Build:
        ACTIVATIONS[build.__name__] = RegisteredActivation(build, inputs)
        return build

    return register


@activation()
def gelu() -> Callable[[Tensor], Tensor]:
    """GELU with GPT-2's tanh approximation (arXiv:1606.08415)."""
    from model.layers import gelu

    return gelu


@activation(inputs=2)
def swiglu() -> Callable[[Tensor], Tensor]:
    """SwiGLU, as in Llama (arXiv:2002.05202)."""
    from model.layers import swiglu

    return swiglu


@activation()
def relu2() -> Callable[[Tensor], Tensor]:
    """Squared ReLU, as in nanochat (arXiv:2109.08668)."""
    from model.layers import squared_relu

    return squared_relu
