"""Token ids -> batches, as a function of (seed, step, rank) and of nothing else.

B batch_size, T context_length, N tokens in the split, W windows an epoch.

    ids     t0 t1 t2 t3 t4 t5 t6 t7 t8 …
    window     [t1 t2 t3 t4 t5]              T + 1 ids: inputs are the first T, targets the last T
                           [t5 t6 t7 t8 t9]  neighbours share one id, so no target occurs twice

Training goes through an epoch's W windows in random order; each epoch draws a new order and starts its
windows at a new place (1 above), so the model meets its text in ever new cuts. Nothing is stored to resume:
the trainer knows how many batches it has processed, and that says which comes next.

What the Trainer calls an epoch is W windows in whole optimizer steps: W / (B x ranks x accumulated batches) steps,
rounded up. The last one goes on into the next order, so every step has equally many windows, however they are
accumulated.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from system.errors import UserError

IGNORE = -100  # target that torch's cross_entropy leaves out


@dataclass(frozen=True)
class BatchLimits:
    """The Trainer's options about batches. A limit is a number of batches a rank (int), or a share (float) of them."""

    accumulate_grad_batches: int = 1
    limit_train_batches: int | float | None = None
    overfit_batches: int | float | None = None
    limit_val_batches: int | float | None = None

    def apply(self, name: str, batches: int) -> int:
        """How many of so many batches the limit leaves. Raises UserError if that is none."""
        limit = getattr(self, name)
        if limit is None:
            return batches
        left = int(limit * batches) if isinstance(limit, float) else min(limit, batches)
        if left < 1:
            raise UserError(
                f"trainer.{name} is {limit}, which leaves none of {batches:,} batches. "
                f"Use at least {math.ceil(100 / batches) / 100:g}, or a number of batches: trainer.{name}=1."
            )
        return left


NO_LIMITS = BatchLimits()


class TrainBatches:
    """Endless training batches by step number; iterating goes on to the end of the current epoch."""

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
        """`steps_done` tells how many batches this rank has trained on.

        Raises UserError if N < T + 1, or if the limits leave no batch.
        """
        if len(tokens) < context_length + 1:
            mend = f"Use model.context_length ≤ {len(tokens) - 1} or a longer text."
            raise UserError(
                f"context_length {context_length} needs at least {context_length + 1} tokens; "
                f"the training split has {len(tokens)}. {mend if len(tokens) > 1 else 'Use a longer text.'}"
            )
        # Row i is ids i … i + T; a view, so it costs nothing. Plain ndarray: memmap's indexing is slow.
        self.rows = np.lib.stride_tricks.sliding_window_view(tokens.view(np.ndarray), context_length + 1)
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.steps_done = steps_done
        self.windows_per_epoch = max(1, (len(tokens) - context_length) // context_length)
        batches = limits.apply("limit_train_batches", -(-self.windows_per_epoch // (batch_size * world_size)))
        self.repeated = limits.apply("overfit_batches", batches) if limits.overfit_batches else None
        accumulated = limits.accumulate_grad_batches
        self._batches_per_epoch = -(-(self.repeated or batches) // accumulated) * accumulated
        self._epoch, self._starts = -1, np.empty(0)

    def batch(self, step: int) -> torch.Tensor:
        """Batch of `step`, (B, T + 1) int64: with all ranks' it continues where those of `step - 1` ended.

        With overfit_batches the first `repeated` ones come again and again.
        """
        step = step % self.repeated if self.repeated else step
        window = (step * self.world_size + self.rank) * self.batch_size
        starts = np.empty(self.batch_size, dtype=np.int64)
        filled = 0
        while filled < self.batch_size:  # once, or more often where a batch straddles epochs
            epoch, position = divmod(window + filled, self.windows_per_epoch)
            some = self._epoch_starts(epoch)[position : position + self.batch_size - filled]
            starts[filled : filled + len(some)] = some
            filled += len(some)
        return torch.from_numpy(self.rows[starts].astype(np.int64))  # (B, T + 1)

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        """First id of each window, in this epoch's order, (W,)."""
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            spare = len(self.rows) - 1 - (self.windows_per_epoch - 1) * self.context_length
            phase = int(random.integers(min(self.context_length - 1, spare) + 1))
            dtype = np.min_scalar_type(len(self.rows))  # 4 bytes a window, not 8, up to 4 billion tokens
            starts = np.arange(self.windows_per_epoch, dtype=dtype) * self.context_length + phase
            random.shuffle(starts)
            self._epoch, self._starts = epoch, starts
        return self._starts

    def __len__(self) -> int:
        """Batches an epoch, for one rank."""
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = self.steps_done()
        yield from map(self.batch, range(step, (step // len(self) + 1) * len(self)))

    # Lightning warns that a loader without these two cannot resume. With `steps_done` this one can.
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class ValBatches:
    """Windows of the split side by side: each target at most once, and all N - 1 of them without a limit.

    Only the first id is no target; the last window is padded. With several ranks, rank r takes every
    world_size-th window from the r-th on, so some may get a batch more than others; one without any gets padding, since
    Lightning wants a batch of each.
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
        """`limit_tokens` and `limits` keep fewer targets, in windows evenly spread over the split.

        `out_of_time` is asked before each batch but the first: True leaves out the rest, and `cut` says so. What comes
        before that is spread over the split too. `val_fraction` is only there to be named in the message. Raises
        UserError if N < 2, or if the limits leave none.
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
        spread = np.arange(kept) * num_windows // kept
        self.windows = spread[rank::world_size] if rank < kept else np.array([num_windows])  # padding alone
        if out_of_time:
            np.random.Generator(np.random.PCG64(0)).shuffle(self.windows)
        self.out_of_time = out_of_time
        self.cut = False

    def __len__(self) -> int:
        return -(-len(self.windows) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, (B, T) int64 each; the last batch has fewer rows."""
        self.cut = False
        for first in range(0, len(self.windows), self.batch_size):
            if first and self.out_of_time and self.out_of_time():
                self.cut = True
                return
            windows = self.windows[first : first + self.batch_size]  # (B,)
            at = windows[:, None] * self.context_length + np.arange(self.context_length)  # (B, T)
            padding = at >= self.num_targets
            at[padding] = 0
            inputs = self.tokens[at].astype(np.int64)
            targets = self.tokens[at + 1].astype(np.int64)
            inputs[padding], targets[padding] = 0, IGNORE
            yield torch.from_numpy(inputs), torch.from_numpy(targets)
