"""The LightningDataModule: files -> splits -> tokenizer -> token ids -> batches."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import lightning
import numpy as np
import tiktoken
import torch

from data.batches import NO_LIMITS, BatchLimits, TrainBatches, ValBatches
from data.config import DataConfig, TokenizerConfig, check_at_least
from data.corpus import Corpus, find_files
from data.tokenizer import build_tokenizer
from data.tokens import load_tokens

CACHE_DIR = Path(__file__).resolve().parents[1] / ".cache"


class TextDataModule(lightning.LightningDataModule):
    """The tokenized corpus. The constructor does cheap checks; `prepare` does the work.

    `prepare` sets tokenizer, vocab_size, train_tokens (N,), val_tokens (M,) and bytes_per_token of the latter.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer_config: TokenizerConfig,
        context_length: int,
        seed: int,
        given_tokenizer: tiktoken.Encoding | None = None,
        limits: BatchLimits = NO_LIMITS,
    ):
        """`given_tokenizer`, for example of a checkpoint, replaces the tokenizer that the config describes."""
        super().__init__()
        check_at_least(1, "model.context_length", context_length)
        check_at_least(0, "seed", seed)
        self.config = config
        self.tokenizer_config = tokenizer_config
        self.context_length = context_length
        self.seed = seed
        self.given_tokenizer = given_tokenizer
        self.limits = limits
        self.tokenizer = None
        self.out_of_time: Callable[[], bool] | None = None
        """Whether a validation has to stop because time is up; None: never."""

    def prepare(self) -> None:
        """Reads, tokenizes and checks the text, once. Raises UserError.

        Every rank may call it: cached files appear complete or not at all.
        """
        if self.tokenizer is not None:
            return
        config = self.config
        cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else CACHE_DIR
        self.corpus = Corpus(find_files(config.corpus), config.val_fraction)
        train, val = self.corpus.train, self.corpus.val
        tokenizer = self.given_tokenizer or build_tokenizer(self.tokenizer_config, train, cache_dir)
        self.vocab_size = tokenizer.n_vocab
        self.train_tokens, train_cached = load_tokens(train, tokenizer, cache_dir)
        self.val_tokens, val_cached = load_tokens(val, tokenizer, cache_dir)
        self.cached = train_cached and val_cached
        self.bytes_per_token = val.num_bytes / len(self.val_tokens)
        self.train_dataloader()
        self.val_dataloader()  # both are built now so that their errors are raised before training
        self.tokenizer = tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Lightning's hook for this work; does nothing after `prepare`."""
        self.prepare()

    @property
    def text_sha256(self) -> str:
        """Hash of the text of both splits."""
        return hashlib.sha256(f"{self.corpus.train.sha256} {self.corpus.val.sha256}".encode()).hexdigest()

    def describe(self) -> str:
        """One line about files, bytes, tokenizer and tokens, and whether the tokens were cached."""
        origin = "cached" if self.cached else "encoded now"
        return (
            f"{self.corpus.describe_files()}, {self.corpus.num_bytes:,} bytes; {self.tokenizer.name} tokenizer, "
            f"vocabulary {self.vocab_size:,}, {self.bytes_per_token:.2f} bytes per token; "
            f"{len(self.train_tokens):,} tokens to train on, {len(self.val_tokens):,} to validate on ({origin})"
            + self._describe_limits()
        )

    def _describe_limits(self) -> str:
        lines, repeated = "", self.train_dataloader().overfit_batches
        if repeated:
            batches = "batch" if repeated == 1 else f"{repeated} batches"
            lines += f"\neach epoch trains on the same {batches} (trainer.overfit_batches)"
        seen, of_split = self.val_dataloader().num_predicted, self.full_val_dataloader().num_predicted
        if seen < of_split:
            by_tokens = self._val_batches(self.config.val_tokens, NO_LIMITS).num_predicted
            key = "data.val_tokens" if seen == by_tokens else "trainer.limit_val_batches"
            lines += f"\nvalidations during training use {seen:,} of these tokens ({key}); the last one uses all"
        return lines

    def train_dataloader(self) -> TrainBatches:
        """Training batches, starting after those that the run has trained on."""
        return TrainBatches(
            self.train_tokens,
            self.context_length,
            self.config.batch_size,
            self.seed,
            *self._rank(),
            self._steps_done,
            self.limits,
        )

    def val_dataloader(self) -> ValBatches:
        """The part of the split for validations during training: `val_tokens`, or less by `limit_val_batches`."""
        return self._val_batches(self.config.val_tokens, self.limits)

    def full_val_dataloader(self) -> ValBatches:
        """The whole validation split, each token once."""
        return self._val_batches(None, NO_LIMITS)

    def val_passage(self, num_tokens: int) -> torch.Tensor:
        """The first ids of the validation split, (n,) int64 with n <= num_tokens: the same in every picture."""
        return torch.from_numpy(self.val_tokens[:num_tokens].astype(np.int64))

    def val_sample(self, num_tokens: int) -> torch.Tensor:
        """Random windows of the validation split, (N, T + 1) int64: the same in every call.

        N * T is about num_tokens, and T is at most context_length.
        """
        T = min(self.context_length, num_tokens, len(self.val_tokens) - 1)
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(len(self.val_tokens) - T, (max(1, num_tokens // T),), generator=generator)
        windows = [torch.from_numpy(self.val_tokens[start : start + T + 1].astype(np.int64)) for start in starts]
        return torch.stack(windows)

    def _val_batches(self, limit_tokens: int | None, limits: BatchLimits) -> ValBatches:
        config = self.config
        return ValBatches(
            self.val_tokens,
            self.context_length,
            config.batch_size,
            limit_tokens,
            *self._rank(),
            val_fraction=config.val_fraction,
            limits=limits,
            out_of_time=self.out_of_time,
        )

    def _rank(self) -> tuple[int, int]:
        """Rank of this process and number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _steps_done(self) -> int:
        """Number of batches that the run has trained on, including those before it was resumed.

        It is saved in checkpoints. `processed` counts a batch after its optimizer step.
        """
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed if self.trainer else 0
