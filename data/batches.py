"""Batches of token ids, determined by (seed, step, rank) alone.

B batch_size, T context_length, N tokens in the split, W windows per epoch.

    ids     t0 t1 t2 t3 t4 t5 t6 t7 t8 …
    window     [t1 t2 t3 t4 t5]              T + 1 ids: inputs are the first T, targets the last T
                           [t5 t6 t7 t8 t9]  adjacent windows share one id, so no target occurs twice

Training visits the W windows of an epoch in random order. Each epoch draws a new order and a new offset of the first
window (1 above), so the text is cut differently in every epoch. Resuming needs no stored state: the number of batches
that the trainer has processed determines the next one.

An epoch of the Trainer is W windows, rounded up to whole optimizer steps of B x ranks x accumulated batches windows.
Its last step continues with windows of the next order, so that every step has the same number of windows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from system.errors import UserError

IGNORE_INDEX = -100  # the default ignore_index of F.cross_entropy


@dataclass(frozen=True)
class BatchLimits:
    """The Trainer's options for batches. A limit is a number of batches per rank (int), or a share of them (float)."""

    accumulate_grad_batches: int = 1
    limit_train_batches: int | float | None = None
    overfit_batches: int | float | None = None
    limit_val_batches: int | float | None = None

    def apply(self, name: str, batches: int) -> int:
        """Returns the number of batches under a limit. Raises UserError if it is 0."""
        limit = getattr(self, name)
        if limit is None:
            return batches
        limited = int(limit * batches) if isinstance(limit, float) else min(limit, batches)
        if limited < 1:
            raise UserError(
                f"trainer.{name} is {limit}, which leaves none of {batches:,} batches. "
                f"Use at least {math.ceil(100 / batches) / 100:g}, or a number of batches: trainer.{name}=1."
            )
        return limited


NO_LIMITS = BatchLimits()


class TrainBatches:
    """Training batches by step number. Iteration starts after `steps_done` batches and ends with their epoch."""

    def __init__(
        self,
        tokens: np.ndarray,  # (N,)
        context_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        steps_done: Callable[[], int] = lambda: 0,
        limits: BatchLimits = NO_LIMITS,
    ):
        """`steps_done` returns the number of batches that this rank has trained on.

        Raises UserError if N < T + 1, or if the limits leave no batch.
        """
        if len(tokens) < context_length + 1:
            fix = f"Use model.context_length ≤ {len(tokens) - 1} or a longer text."
            raise UserError(
                f"context_length {context_length} needs at least {context_length + 1} tokens; "
                f"the training split has {len(tokens)}. {fix if len(tokens) > 1 else 'Use a longer text.'}"
            )
        # Row i is ids i … i + T. A view of a plain ndarray, because indexing a memmap is slow.
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens.view(np.ndarray), context_length + 1)
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.steps_done = steps_done
        self.windows_per_epoch = max(1, (len(tokens) - context_length) // context_length)
        batches = limits.apply("limit_train_batches", -(-self.windows_per_epoch // (batch_size * world_size)))
        self.overfit_batches = limits.apply("overfit_batches", batches) if limits.overfit_batches else None
        accumulated = limits.accumulate_grad_batches
        self._batches_per_epoch = -(-(self.overfit_batches or batches) // accumulated) * accumulated
        self._epoch, self._starts = -1, np.empty(0)

    def batch(self, step: int) -> torch.Tensor:
        """Returns the batch of a step, (B, T + 1) int64. With overfit_batches, the first batches repeat."""
        step = step % self.overfit_batches if self.overfit_batches else step
        window = (step * self.world_size + self.rank) * self.batch_size
        starts = np.empty(self.batch_size, dtype=np.int64)
        filled = 0
        while filled < self.batch_size:  # more than one iteration if the batch spans epochs
            epoch, position = divmod(window + filled, self.windows_per_epoch)
            part = self._epoch_starts(epoch)[position : position + self.batch_size - filled]
            starts[filled : filled + len(part)] = part
            filled += len(part)
        return torch.from_numpy(self.windows[starts].astype(np.int64))  # (B, T + 1)

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        """Returns the start of each window in the order of this epoch, (W,)."""
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            spare = len(self.windows) - 1 - (self.windows_per_epoch - 1) * self.context_length
            offset = int(random.integers(min(self.context_length - 1, spare) + 1))
            dtype = np.min_scalar_type(len(self.windows))  # 4 bytes per window up to 4 billion tokens
            starts = np.arange(self.windows_per_epoch, dtype=dtype) * self.context_length + offset
            random.shuffle(starts)
            self._epoch, self._starts = epoch, starts
        return self._starts

    def __len__(self) -> int:
        """Batches per epoch, for one rank."""
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = self.steps_done()
        yield from map(self.batch, range(step, (step // len(self) + 1) * len(self)))

    # Lightning warns about loaders without these methods. This one resumes from `steps_done`.
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class ValBatches:
    """Validation batches of adjacent windows, so that each target occurs once. There are N - 1 targets without a limit.

    The last window is padded. Rank r takes every world_size-th window starting with window r, so some ranks may get
    one batch more than others. A rank without windows gets one of padding, because Lightning expects a batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,  # (N,)
        context_length: int,
        batch_size: int,
        limit_tokens: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        val_fraction: float | None = None,
        limits: BatchLimits = NO_LIMITS,
        out_of_time: Callable[[], bool] | None = None,
    ):
        """`limit_tokens` and `limits` reduce the number of targets, with windows spread evenly over the split.

        `out_of_time` is called before each batch except the first. When it returns True, iteration ends and `truncated`
        is set; the windows until then are spread over the split too. `val_fraction` is only used in an error message.
        Raises UserError if N < 2, or if the limits leave no batch.
        """
        if len(tokens) < 2:
            raise UserError(
                f"Validation needs at least 2 tokens; the validation split has {len(tokens)} at "
                f"data.val_fraction={val_fraction}. Raise data.val_fraction or use a longer text."
            )
        self.tokens = tokens.view(np.ndarray)
        self.context_length = context_length
        self.batch_size = batch_size
        self.num_targets = len(tokens) - 1
        num_windows = -(-self.num_targets // context_length)
        kept = min(num_windows, -(-(limit_tokens or self.num_targets) // context_length))
        windows_per_batch = batch_size * world_size  # of all ranks
        kept = min(kept, windows_per_batch * limits.apply("limit_val_batches", -(-kept // windows_per_batch)))
        self.num_predicted = min(self.num_targets, kept * context_length)  # targets, all ranks
        windows = np.arange(kept) * num_windows // kept  # evenly spaced
        self.windows = windows[rank::world_size] if rank < kept else np.array([num_windows])  # only padding
        if out_of_time:
            np.random.Generator(np.random.PCG64(0)).shuffle(self.windows)
        self.out_of_time = out_of_time
        self.truncated = False

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields inputs and targets, (B, T) int64 each. The last batch may have fewer rows."""
        self.truncated = False
        for first in range(0, len(self.windows), self.batch_size):
            if first and self.out_of_time and self.out_of_time():
                self.truncated = True
                return
            windows = self.windows[first : first + self.batch_size]  # (B,)
            index = windows[:, None] * self.context_length + np.arange(self.context_length)  # (B, T)
            padding = index >= self.num_targets
            index[padding] = 0
            inputs = self.tokens[index].astype(np.int64)
            targets = self.tokens[index + 1].astype(np.int64)
            inputs[padding], targets[padding] = 0, IGNORE_INDEX
            yield torch.from_numpy(inputs), torch.from_numpy(targets)
