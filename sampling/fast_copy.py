"""A copy of a network for inference, which shares its weights and calls them with less overhead."""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import enabled, onednn
from model.layers import Dropout, Linear, RMSNorm

# torch.mv multiplies a vector faster than oneDNN, which has an overhead of 10 us per call, if the matrix has at
# most this many numbers. The limit depends on whether all matrices of the network fit into the processor's cache.
MAX_MV_NUMEL_CACHED, MAX_MV_NUMEL_UNCACHED = 3 << 17, 1 << 17
PROCESSOR_CACHE_NUMEL = 1 << 23  # float32 numbers in 32 MB


def pack_weight(weight: Tensor) -> Tensor:
    """Copies a weight (O, I) to oneDNN's blocked layout, for `packed_linear`."""
    batch_size = 64  # the layout for this batch size is as fast for 1, while the layout for 1 is slow for others
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), batch_size)


def packed_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32 without gradients: x (..., I), packed W (O, I) -> (..., O)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed_weight, bias, "none", [], "")


def packed_linear_function(linear: nn.Linear, max_mv_numel: int) -> Callable[[Tensor], Tensor]:
    """Returns a linear layer as a function without gradients, with a packed copy of its weight.

    Args:
        max_mv_numel: for a weight of at most this many numbers, a single vector is multiplied with torch.mv.
    """
    weight, bias, packed_weight = linear.weight.detach(), linear.bias, pack_weight(linear.weight)
    if weight.numel() > max_mv_numel:
        return lambda x: packed_linear(x, packed_weight, bias)
    column_major = weight.t().contiguous().t()  # makes torch.mv a sixth faster

    def linear_function(x: Tensor) -> Tensor:
        """x W^T + b: (..., in_features) -> (..., out_features)."""
        if x.ndim > 1:
            return packed_linear(x, packed_weight, bias)
        return torch.mv(column_major, x) if bias is None else torch.addmv(bias, column_major, x)

    return linear_function


def max_mv_numel(network: nn.Module) -> int:
    """Returns the largest weight, in numbers, for which torch.mv is faster in this network."""
    numel = sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, Linear))
    return MAX_MV_NUMEL_CACHED if numel <= PROCESSOR_CACHE_NUMEL else MAX_MV_NUMEL_UNCACHED


@torch.no_grad()
def inference_copy(network: nn.Module) -> nn.Module:
    """Returns a copy of the network in evaluation mode, with the same weights, for use without gradients.

    Its layers are plain functions, because calling a module takes longer than computing a small layer.
    The original is unchanged. Its weights must not change while the copy is in use.
    """
    mv_numel = max_mv_numel(network)
    network = _copy_modules(network).eval()
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            function = layer_function(layer, mv_numel)
            if function is not None:
                delattr(parent, name)  # nn.Module does not allow replacing a submodule by a function
                setattr(parent, name, function)
    return network


def _copy_modules(module: nn.Module) -> nn.Module:
    """Copies a module and its submodules, but shares everything else. copy.deepcopy takes several times as long."""
    module = copy.copy(module)
    module._modules = {
        name: child if child is None else _copy_modules(child) for name, child in module._modules.items()
    }
    return module


def layer_function(layer: nn.Module, mv_numel: int) -> Callable[[Tensor], Tensor] | None:
    """Returns a layer in evaluation mode as a function, or None for a module without such a function."""
    if type(layer) is Linear:
        if enabled(layer.weight) and onednn.onednn_is_faster():
            return packed_linear_function(layer, mv_numel)
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
        look_up.weight = layer.weight  # used by GPT.embed for position embeddings
        return look_up
    return None
