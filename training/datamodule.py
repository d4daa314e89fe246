"""Everything about data in the order it happens: files -> splits -> tokenizer -> ids -> batches."""

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
    """The corpus ready to train on. Constructing checks what costs nothing; `prepare` does the work.

    After `prepare`: tokenizer, vocab_size, train_tokens (N,), val_tokens (M,) and the bytes_per_token of the latter.
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
        """`given_tokenizer` takes the place of the one that the config describes: that of old weights."""
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
        """Whether a validation has to be cut; None: never."""

    def prepare(self) -> None:
        """Raises UserError for whatever is wrong with the text, before anything trains. Does its work once.

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
        self.val_dataloader()  # both now, for their errors
        self.tokenizer = tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Lightning's own place for the work; after `prepare` there is none left."""
        self.prepare()

    @property
    def text_sha256(self) -> str:
        """What the text says, both splits of it, as one number."""
        return hashlib.sha256(f"{self.corpus.train.sha256} {self.corpus.val.sha256}".encode()).hexdigest()

    def describe(self) -> str:
        """One line: files, bytes, tokenizer, tokens, and whether they were there already."""
        origin = "cached" if self.cached else "encoded now"
        return (
            f"{self.corpus.describe_files()}, {self.corpus.num_bytes:,} bytes; {self.tokenizer.name} tokenizer, "
            f"vocabulary {self.vocab_size:,}, {self.bytes_per_token:.2f} bytes a token; "
            f"{len(self.train_tokens):,} tokens to train on, {len(self.val_tokens):,} to validate ({origin})"
            + self._describe_limits()
        )

    def _describe_limits(self) -> str:
        lines, repeated = "", self.train_dataloader().repeated
        if repeated:
            batches = "batch" if repeated == 1 else f"{repeated} batches"
            lines += f"\neach epoch trains on the same {batches} (trainer.overfit_batches)"
        seen, of_split = self.val_dataloader().num_predicted, self.full_val_dataloader().num_predicted
        if seen < of_split:
            by_tokens = self._val_batches(self.config.val_tokens, NO_LIMITS).num_predicted
            key = "data.val_tokens" if seen == by_tokens else "trainer.limit_val_batches"
            lines += f"\nvalidations during training see {seen:,} tokens of these ({key}); the last one sees all"
        return lines

    def train_dataloader(self) -> TrainBatches:
        """Training batches from where the trainer is."""
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
        """What validations during training see of the split: `val_tokens`, or less by `limit_val_batches`."""
        return self._val_batches(self.config.val_tokens, self.limits)

    def full_val_dataloader(self) -> ValBatches:
        """The whole validation split, each token once."""
        return self._val_batches(None, NO_LIMITS)

    def val_passage(self, num_tokens: int) -> torch.Tensor:
        """First ids of the validation split, (n,) int64, n <= num_tokens: the same ones in every picture."""
        return torch.from_numpy(self.val_tokens[:num_tokens].astype(np.int64))

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
        """This process's number and how many there are."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _steps_done(self) -> int:
        """Batches trained on in the run's whole life, kept in every checkpoint: where a resumed run goes on.

        `processed` counts a batch once its optimizer step is over, whenever the checkpoint is written.
        """
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed if self.trainer else 0
