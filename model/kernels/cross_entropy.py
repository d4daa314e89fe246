"""Output layer and cross-entropy in one operator, in chunks of rows (as in Liger Kernel, arXiv:2410.10989).

The logits are the largest tensor of a small GPT: vocab_size numbers per token. Computed at once, they and their
gradient make several round trips to memory. In chunks they stay in the processor's cache, and the gradient of a chunk,
softmax minus one-hot target, is computed together with its loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels import onednn
from model.kernels.bfloat16 import bf16_matmul_enabled

CHUNK_ROWS = 512  # slightly faster than others from 256 to 1,536, on two cores with a vocabulary of 1,024


def fused_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy(F.linear(x, weight), targets), for float32: half precision would be rounded at every chunk.

    Args:
        x: (N, C), the input of the output layer.
        weight: (V, C).
        targets: (N,) token ids. There is no ignore_index.
    """
    return _LinearCrossEntropy.apply(x, weight, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nats, grad_x, grad_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        dtype = torch.bfloat16 if bf16_matmul_enabled() else x.dtype  # of the matrix products
        x, weight = x.to(dtype), weight.to(dtype)
        use_onednn = dtype == torch.float32 and len(x) and onednn.onednn_is_faster()
        linear = onednn.onednn_linear_no_grad if use_onednn else F.linear
        for start in range(0, len(x), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            logits = linear(x[chunk], weight).to(grad_x.dtype)  # (n, V)
            target = targets[chunk, None]  # (n, 1)
            target_logit, max_logit = logits.gather(1, target), logits.amax(dim=1, keepdim=True)  # (n, 1) each
            probs = logits.softmax(dim=1)  # (n, V)
            # The loss is max_logit + log(sum(exp(logits - max_logit))) - target_logit, and the largest probability
            # is 1 / sum(exp(logits - max_logit)). It is never 0, unlike the probability of the target.
            nats += (max_logit - probs.amax(dim=1, keepdim=True).log() - target_logit).sum()
            # d loss / d logits = softmax - one_hot(target); `backward` applies the mean's factor 1 / N.
            grad = probs.scatter_add_(1, target, target_logit.new_full(target_logit.shape, -1.0)).to(dtype)  # (n, V)
            grad_x[chunk] = linear(grad, weight.t())  # (n, C)
            with onednn.use_onednn_for_matmul():
                grad_weight += grad.t() @ x[chunk]  # (V, C)
        ctx.save_for_backward(grad_x, grad_weight)
        return nats / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        grad = grad / len(grad_x)
        return grad_x * grad, grad_weight * grad, None
