"""The same network around the same weights, made for decoding: as fast as it gets without gradients."""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import enabled, onednn
from model.layers import Dropout, Linear, RMSNorm


def pack(weight: Tensor) -> Tensor:
    """W (O, I) in the layout oneDNN multiplies by fastest, for `packed_product` alone."""
    rows = 64  # as many as the layout is chosen for; it is as fast for one, where one of its own would not be
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b without gradients: x (..., I), `packed` made of W (O, I) -> (..., O), float32."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


# One vector through a matrix of at most so many numbers is faster in PyTorch's own product, since oneDNN takes 10 us to
# start: if all matrices of the network fit into the processor's cache, and if they come from memory each time.
SMALL, SMALL_FROM_MEMORY = 3 << 17, 1 << 17
CACHE = 1 << 23  # numbers: 32 MB


def packed(linear: nn.Linear, small: int) -> Callable[[Tensor], Tensor]:
    """The layer as a function without gradients, its matrix copied into the layout that oneDNN reads fastest.

    Args:
        small: up to so many numbers, a single vector (in_features,) goes through PyTorch's own product.
    """
    weight, bias, layout = linear.weight.detach(), linear.bias, pack(linear.weight)
    if weight.numel() > small:
        return lambda x: packed_product(x, layout, bias)
    columns = weight.t().contiguous().t()  # the same, but columns lie in one piece: a sixth faster

    def product(x: Tensor) -> Tensor:
        """x W^T + b: (..., in_features) -> (..., out_features)."""
        if x.ndim > 1:
            return packed_product(x, layout, bias)
        return torch.mv(columns, x) if bias is None else torch.addmv(bias, columns, x)

    return product


def small_matrix(network: nn.Module) -> int:
    """Numbers in a matrix up to which `packed` should call it small, in this network."""
    numbers = sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, Linear))
    return SMALL if numbers <= CACHE else SMALL_FROM_MEMORY


@torch.no_grad()
def inference_copy(network: nn.Module) -> nn.Module:
    """The same network around the same weights, in evaluation mode, as fast as it gets without gradients.

    Its layers are plain functions: calling a module takes longer than a small layer's work.
    The original stays as it is. Its weights must not change while the copy is in use.
    """
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    network = copy.deepcopy(network, shared).eval()
    small = small_matrix(network)
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            function = plain_function(layer, small)
            if function is not None:
                delattr(parent, name)  # a module's place takes no plain function
                setattr(parent, name, function)
    return network


def plain_function(layer: nn.Module, small: int) -> Callable[[Tensor], Tensor] | None:
    """What a layer computes in evaluation mode, as a function. None for a module made of others, or not of ours."""
    if type(layer) is Linear:
        if enabled(layer.weight) and onednn.onednn_is_faster():
            return packed(layer, small)
        return partial(F.linear, weight=layer.weight, bias=layer.bias)
    if type(layer) is nn.LayerNorm:
        shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    if type(layer) is RMSNorm:
        return layer.forward
    if type(layer) in (Dropout, nn.Identity):
        return lambda x: x
    if type(layer) is nn.Embedding:
        look_up = partial(torch.embedding, layer.weight)
        look_up.weight = layer.weight  # of positions GPT reads a row
        return look_up
    return None
