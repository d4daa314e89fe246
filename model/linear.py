"""nn.Linear, through the faster of PyTorch's two float32 matrix libraries."""

import copy

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


class PackedLinear(nn.Module):
    """A Linear whose matrix is laid out for oneDNN once: reads it faster, cannot train, and holds it twice."""

    # One token through a matrix of so many numbers is faster in PyTorch's own product: oneDNN takes 10 us to start.
    MAX_SMALL = 1 << 17

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.small = self.weight.numel() <= self.MAX_SMALL
        self.packed = pack(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b: (..., in_features) -> (..., out_features)."""
        if self.small and x.numel() == x.size(-1):
            return F.linear(x, self.weight, self.bias)
        return packed_product(x, self.packed, self.bias)


@torch.no_grad()
def inference_copy(network: nn.Module) -> nn.Module:
    """The same modules around the same weights, in evaluation mode, as fast as they get without gradients.

    The original stays as it is. Its weights must not change while the copy is in use.
    """
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    network = copy.deepcopy(network, shared).eval()
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, Linear) and goes_through_onednn(layer.weight, layer.weight):
                setattr(parent, name, PackedLinear(layer))
    return network
