"""Text generation, streamed as complete characters up to a stop sequence, and scoring of a text."""

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

SAMPLES_AT_ONCE = 64  # a larger batch takes more memory and is hardly faster per sample


@dataclass
class Completion:
    """One continuation, as far as it has been generated."""

    index: int
    """Index of this completion, from 0."""
    text: str = ""
    """Text so far: complete characters, without any that may be the start of a stop sequence."""
    tokens: list[int] = field(default_factory=list)
    """All sampled tokens, including those of a stop sequence."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, before temperature and filters; empty unless requested."""
    finish_reason: str | None = None
    """Why it ended: "stop" or "length" (max_new_tokens). None while it is being generated."""


def generate_text(
    checkpoint: Checkpoint, prompt: str, config: SamplingConfig, first: int = 0, logprobs: bool = False
) -> Iterator[tuple[Completion, str]]:
    """Continues a prompt config.num_samples times, in batches of SAMPLES_AT_ONCE.

    Args:
        first: index of the first completion.
        logprobs: whether to compute log-probabilities.

    Yields:
        A completion and the text just added to it. The first completion of each batch is yielded token by token, the
        others once they are complete. `finish_reason` is set with the last piece of a completion.
    """
    ids, decoder = prompt_ids(checkpoint.tokenizer, prompt), Decoder(checkpoint.network)
    end = first + config.num_samples
    for begin in range(first, end, SAMPLES_AT_ONCE):
        together = range(begin, min(begin + SAMPLES_AT_ONCE, end))
        completions = [Completion(index) for index in together]
        streams = [CompletionStream(checkpoint.tokenizer, config.stop_sequences) for _ in together]
        for step, (new_ids, logits) in enumerate(generate_batch(decoder, ids, config, together), 1):
            # For each completion, a list of one log-probability, or an empty one.
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
    """Token ids of a prompt. An empty prompt becomes a newline, so that the text starts with a new line."""
    return encode(tokenizer, prompt or "\n").tolist()


class CompletionStream:
    """Decodes tokens up to the first stop sequence. Holds back incomplete characters and possible stop sequences."""

    def __init__(self, tokenizer: tiktoken.Encoding, stop_sequences: list[str]):
        self.detokenizer, self.stop_sequences = StreamingDetokenizer(tokenizer), stop_sequences
        self.held, self.stopped = "", False

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is final."""
        return self._release(self.detokenizer.push(token))

    def flush(self) -> str:
        """Returns the text held back; an incomplete character becomes �."""
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
    """Length of the longest suffix of the text that is a proper prefix of the stop sequence."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


@dataclass(frozen=True)
class Scores:
    """How well a model predicts a text."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability (natural) of each token."""
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Cross-entropy in bits, per byte of UTF-8 text."""
        return -sum(self.logprobs) / math.log(2) / self.bytes


def score_text(checkpoint: Checkpoint, text: str) -> Scores:
    """Scores every token of a text, the first as after a newline. Raises UserError for an empty text."""
    if not text:
        raise UserError('There is no text to score. Give one: prompt="To be, or not", or prompt_file=poem.txt')
    tokens = encode(checkpoint.tokenizer, text).tolist()
    ids = prompt_ids(checkpoint.tokenizer, "")[-1:] + tokens
    return Scores(tokens, token_logprobs(checkpoint.network, torch.tensor(ids)).tolist(), len(text.encode()))
