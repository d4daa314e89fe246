"""nn.Linear, through the faster of PyTorch's two float32 matrix libraries."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.onednn import goes_through_onednn, onednn_product, pack, packed_product


class Linear(nn.Linear):
    """nn.Linear: (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if not goes_through_onednn(x, self.weight):
            return F.linear(x, self.weight, self.bias)
        y = onednn_product(x, self.weight)
        return y if self.bias is None else y + self.bias


# One token through a matrix of at most so many numbers is faster in PyTorch's own product: oneDNN takes 10 us to start.
SMALL = 1 << 17


def packed(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer as a function without gradients, its matrix copied into the layout that oneDNN reads fastest."""
    weight, bias, layout = linear.weight, linear.bias, pack(linear.weight)
    small = weight.numel() <= SMALL

    def product(x: Tensor) -> Tensor:
        """x W^T + b: (..., in_features) -> (..., out_features)."""
        if small and x.numel() == x.size(-1):
            return F.linear(x, weight, bias)
        return packed_product(x, layout, bias)

    return product


@torch.no_grad()
def inference_copy(network: nn.Module) -> nn.Module:
    """The same modules around the same weights, in evaluation mode, as fast as they get without gradients.

    The original stays as it is. Its weights must not change while the copy is in use.
    """
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    network = copy.deepcopy(network, shared).eval()
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear) and goes_through_onednn(layer.weight, layer.weight):
                delattr(parent, name)  # a module's place takes no plain function
                setattr(parent, name, packed(layer))
    return network
