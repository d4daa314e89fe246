"""The output layer and its cross-entropy in one, a few rows of logits at a time.

Logits are the largest thing a small GPT makes: vocab_size numbers a token. Made whole, they and their gradient go
out to memory and back several times. In chunks they stay in the processor's cache, and each chunk's gradient is
known as soon as its loss is: softmax minus the target (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels import onednn
from model.kernels.bfloat16 import is_bf16_matmul

CHUNK_ROWS = 512  # of 256 to 1,536 the fastest, by little, on two cores at a vocabulary of 1,024


def fused_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the logits x W^T: F.cross_entropy(F.linear(x, weight), targets).

    Not for half precision, whose sums over chunks would be rounded at every chunk.

    Args:
        x: (N, C), what goes into the output layer.
        weight: (V, C).
        targets: (N,) token ids, none of them to be ignored.
    """
    return _LinearCrossEntropy.apply(x, weight, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nats, grad_x, grad_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        dtype = torch.bfloat16 if is_bf16_matmul() else x.dtype  # of what is multiplied; the rest is as x is
        x, weight = x.to(dtype), weight.to(dtype)
        through_onednn = dtype == torch.float32 and len(x) and onednn.onednn_is_faster()
        product = onednn.raw_onednn_product if through_onednn else F.linear
        for rows in range(0, len(x), CHUNK_ROWS):
            here = slice(rows, rows + CHUNK_ROWS)
            logits = product(x[here], weight).to(grad_x.dtype)  # (n, V)
            at = targets[here, None]  # (n, 1)
            picked, top = logits.gather(1, at), logits.amax(dim=1, keepdim=True)  # (n, 1) each
            probabilities = logits.softmax(dim=1)  # (n, V)
            # -log softmax at the target is top + log(sum(exp(logits - top))) - picked, and 1 over that sum is the
            # largest probability. Unlike the target's own it is never 0.
            nats += (top - probabilities.amax(dim=1, keepdim=True).log() - picked).sum()
            # d loss / d logits is softmax - 1 at the target; the mean's 1 / N comes in `backward`.
            grad = probabilities.scatter_add_(1, at, picked.new_full(picked.shape, -1.0)).to(dtype)  # (n, V)
            grad_x[here] = product(grad, weight.t())  # (n, C)
            with onednn.prefer_onednn():
                grad_weight += grad.t() @ x[here]  # (V, C)
        ctx.save_for_backward(grad_x, grad_weight)
        return nats / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        grad = grad / len(grad_x)
        return grad_x * grad, grad_weight * grad, None
