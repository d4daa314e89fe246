"""Text in, text out: a prompt continued in whole characters up to a stop sequence, and a text's surprise."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import tiktoken
import torch

from checkpoint.checkpoint import Checkpoint
from data.tokenizer import StreamingDetokenizer, encode
from sampling.config import SamplingConfig
from sampling.decoder import Decoder
from sampling.sampler import generate_batch, log_probabilities, token_logprobs
from system.errors import UserError

SAMPLES_AT_ONCE = 64  # more hold more memory and are hardly faster, each


@dataclass
class Completion:
    """One continuation, as far as it is written."""

    index: int
    """Which completion this is, from 0."""
    text: str = ""
    """What is written: whole characters, none that might still become a stop sequence."""
    tokens: list[int] = field(default_factory=list)
    """Every token drawn, those of a stop sequence too."""
    logprobs: list[float] = field(default_factory=list)
    """The model's natural logarithm of each token's probability, before temperature and filters; if asked for."""
    finish_reason: str | None = None
    """Why it ended: "stop" or "length" (max_new_tokens). None: it has not."""


def generate_text(
    checkpoint: Checkpoint, prompt: str, config: SamplingConfig, first: int = 0, logprobs: bool = False
) -> Iterator[tuple[Completion, str]]:
    """Continues a prompt config.num_samples times, SAMPLES_AT_ONCE together.

    Args:
        first: index of the first completion.
        logprobs: whether to find each token's probability.

    Yields:
        A completion and the piece of text just added to it: the first completion of those written together piece by
        piece, the others whole once they are done. A completion's last piece comes with `finish_reason` set.
    """
    ids, decoder = prompt_ids(checkpoint.tokenizer, prompt), Decoder(checkpoint.network)
    end = first + config.num_samples
    for begin in range(first, end, SAMPLES_AT_ONCE):
        together = range(begin, min(begin + SAMPLES_AT_ONCE, end))
        completions = [Completion(index) for index in together]
        streams = [CompletionStream(checkpoint.tokenizer, config.stop_sequences) for _ in together]
        for step, (new_ids, logits) in enumerate(generate_batch(decoder, ids, config, together), 1):
            # For each completion a list of one, or of none.
            found = log_probabilities(logits, new_ids).unsqueeze(1).tolist() if logprobs else [[]] * len(completions)
            for completion, stream, token, logprob in zip(completions, streams, new_ids.tolist(), found, strict=True):
                if completion.finish_reason is not None:
                    continue
                completion.tokens.append(token)
                completion.logprobs += logprob
                piece = stream.push(token)
                if step == config.max_new_tokens and not stream.stopped:
                    piece += stream.flush()
                completion.text += piece
                if stream.stopped or step == config.max_new_tokens:
                    completion.finish_reason = "stop" if stream.stopped else "length"
                if completion is completions[0]:
                    yield completion, piece
            if all(completion.finish_reason for completion in completions):
                break
        for completion in completions[1:]:
            yield completion, completion.text


def prompt_ids(tokenizer: tiktoken.Encoding, prompt: str) -> list[int]:
    """What the model reads for a prompt; for none, the end of a line: then a new one begins."""
    return encode(tokenizer, prompt or "\n").tolist()


class CompletionStream:
    """Ids in, text out: whole characters, up to the first stop sequence, and held back while one may be coming."""

    def __init__(self, tokenizer: tiktoken.Encoding, stop_sequences: list[str]):
        self.detokenizer, self.stop_sequences = StreamingDetokenizer(tokenizer), stop_sequences
        self.held, self.stopped = "", False

    def push(self, token: int) -> str:
        """Text that is sure after this token."""
        return self._release(self.detokenizer.push(token))

    def flush(self) -> str:
        """All that was held back; a character left incomplete is a �."""
        text = self._release(self.detokenizer.flush())
        return text if self.stopped else text + self.held

    def _release(self, new: str) -> str:
        if not self.stop_sequences:
            return new
        text = self.held + new
        found = [place for stop in self.stop_sequences if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        sure = len(text) - max(_overlap(text, stop) for stop in self.stop_sequences)
        self.held = text[sure:]
        return text[:sure]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop sequence begins."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


@dataclass(frozen=True)
class Scores:
    """How well a model foresees a text."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logarithm of each token's probability."""
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """What the text would take, compressed by this model."""
        return -sum(self.logprobs) / math.log(2) / self.bytes


def score_text(checkpoint: Checkpoint, text: str) -> Scores:
    """Every token of a text, the first as after the end of a line. Raises UserError for an empty text."""
    if not text:
        raise UserError('There is no text to score. Give one: prompt="To be, or not", or prompt_file=poem.txt')
    tokens = encode(checkpoint.tokenizer, text).tolist()
    ids = prompt_ids(checkpoint.tokenizer, "")[-1:] + tokens
    return Scores(tokens, token_logprobs(checkpoint.network, torch.tensor(ids)).tolist(), len(text.encode()))
