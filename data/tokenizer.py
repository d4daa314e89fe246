"""Text <-> token ids. Every tokenizer is a `tiktoken.Encoding`, built by one of data/tokenizers/.

Any text can be encoded, in time linear in its length, and decodes to itself. Names of special tokens in it are encoded
as ordinary text.
"""

import base64
import codecs
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken
import tiktoken.load

from data.config import TokenizerConfig
from data.corpus import Split
from data.tokenizers import TOKENIZERS
from system.checks import Bounded, check
from system.errors import UserError

SEGMENT_CHARS = 4096  # characters per call of tiktoken: long runs of one character make it panic or very slow
# Limits for a saved tokenizer, which may come from somebody else. tiktoken's own encodings have names of up to 11
# characters, patterns of up to 500, and tokens of up to 128 bytes.
MAX_NAME_CHARS, MAX_PATTERN_CHARS, MAX_TOKEN_BYTES, MAX_ID = 64, 10_000, 4096, (1 << 31) - 2


def build_tokenizer(config: TokenizerConfig, train_split: Split, cache_dir: Path) -> tiktoken.Encoding:
    """Builds the tokenizer of a config. What it learns from the text is cached in `cache_dir`.

    Raises UserError for an unknown tiktoken encoding, or one that is neither cached nor can be downloaded.
    """
    return TOKENIZERS[config.kind].build(config, train_split, Path(cache_dir) if cache_dir else None)


def make_encoding(
    name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int] | None = None
) -> tiktoken.Encoding:
    """Creates an encoding that splits text by a pattern and applies byte-pair merges within the pieces.

    Args:
        pattern: regular expression for the pieces. Limit its repeats, so that no text is slow to match.
        ranks: bytes of each token -> id. Merges with lower ids come first. Each of the 256 bytes must be a token.
    """
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens or {})


# Encoding and decoding


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Returns the token ids of `text`, (n,) int64."""
    return np.concatenate([np.empty(0, np.int64), *encode_chunks(encoding, [text])])


def encode_chunks(encoding: tiktoken.Encoding, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the token ids of the concatenated `texts` as int64 arrays, independently of how the text was chunked.

    Raises UserError if matching the pattern fails, which can only happen for a pattern from elsewhere.
    """
    for segment in segments(texts):
        try:
            ids = encoding.encode_ordinary(segment)
        except BaseException as error:  # a Rust panic in tiktoken is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"The pattern of tokenizer {encoding.name} fails on this text. Use another tokenizer."
            ) from None
        yield np.array(ids, dtype=np.int64)


def segments(texts: Iterable[str]) -> Iterator[str]:
    """Yields the concatenated `texts` in segments of at most SEGMENT_CHARS characters.

    Cuts between a letter and whitespace, where every known pattern cuts too, so the ids are those of the whole text.
    A run without such a position is cut after SEGMENT_CHARS characters.
    """
    rest = ""
    for text in texts:
        text, start = rest + text, 0
        while len(text) - start > SEGMENT_CHARS:
            end = start + SEGMENT_CHARS
            while end > start and not (text[end - 1].isalpha() and text[end].isspace()):
                end -= 1
            if end == start:
                end = start + SEGMENT_CHARS
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def decode(encoding: tiktoken.Encoding, ids: Iterable[int]) -> str:
    """Returns the text of token ids. Ids without a token are left out: an embedding may have more rows than tokens."""
    return b"".join(_bytes_of(encoding, token_id) for token_id in ids).decode(errors="replace")


class StreamingDetokenizer:
    """Decodes ids one at a time into complete characters: all results joined are `decode(encoding, ids)`."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that this id completes, if any."""
        return self.decoder.decode(_bytes_of(self.encoding, token_id))

    def flush(self) -> str:
        """Returns � if the last character is incomplete."""
        return self.decoder.decode(b"", final=True)


def _bytes_of(encoding: tiktoken.Encoding, token_id: int) -> bytes:
    try:
        return encoding.decode_single_token_bytes(int(token_id))
    except KeyError:  # some of tiktoken's encodings have unused ids
        return b""


# Properties of tokens


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Returns the length of each token in bytes, (n_vocab,) int32, to convert nats per token to bits per byte.

    It is 0 for special tokens and unused ids, which never occur in encoded text.
    """
    lengths = np.zeros(encoding.n_vocab, dtype=np.int32)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def token_labels(encoding: tiktoken.Encoding, ids: Iterable[int], max_chars: int = 12) -> list[str]:
    """Returns a short printable label per token, for the axes of pictures: "↵And", "·the", "\\xe2\\x80"."""
    labels = []
    for token_id in ids:
        text = _bytes_of(encoding, token_id).decode("utf-8", errors="backslashreplace")
        label = "".join(_visible(char) for char in text)
        labels.append(label if len(label) <= max_chars else label[: max_chars - 1] + "…")
    return labels


def _visible(char: str) -> str:
    if char in "\n \t":
        return {"\n": "↵", " ": "·", "\t": "→"}[char]
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in char.encode())


# Serialization, for checkpoints and caches


def serialize(encoding: tiktoken.Encoding) -> dict:
    """Converts an encoding to str, int and list values, which torch.load(weights_only=True) accepts."""
    return {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "merges": format_merges(encoding._mergeable_ranks),
        "special_tokens": [[token, token_id] for token, token_id in sorted(encoding._special_tokens.items())],
    }


def deserialize(plain: dict) -> tiktoken.Encoding:
    """Creates an encoding from the result of `serialize`. Raises UserError if it is damaged."""
    try:
        check(plain, {"name": str, "pattern": str, "merges": str, "special_tokens": [[object]]}, "tokenizer")
        name, pattern, ranks = plain["name"], plain["pattern"], parse_merges(plain["merges"])
        special_tokens = {token: token_id for token, token_id in plain["special_tokens"]}
        check(special_tokens, {str: Bounded(int, 0, MAX_ID)}, "special_tokens")
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # it is printed to the terminal
            raise ValueError(f"its name has control characters, or more than {MAX_NAME_CHARS} characters")
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(f"its pattern has more than {MAX_PATTERN_CHARS:,} characters")
        if not len(plain["special_tokens"]) == len(special_tokens) == len(set(special_tokens.values())):
            raise ValueError("a special token occurs twice")
        if ranks.keys() & {token.encode() for token in special_tokens}:
            raise ValueError("a special token is also an ordinary one")
        if set(ranks.values()) & set(special_tokens.values()):
            raise ValueError("a special token shares its id")
        return make_encoding(name, pattern, ranks, special_tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f"The saved tokenizer is damaged ({str(error)[:200]}). Use another checkpoint.") from None


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Returns a hash of everything that determines the ids of a text."""
    rules = f"{encoding._pat_str}\n{format_merges(encoding._mergeable_ranks)}"
    return hashlib.sha256(rules.encode()).hexdigest()


def format_merges(ranks: dict[bytes, int]) -> str:
    """Formats merges as tiktoken's files do: one line per token with its base64 and its id, sorted by id."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in by_rank)


def parse_merges(text: str) -> dict[bytes, int]:
    """Inverse of `format_merges`. Raises ValueError for anything that would make tiktoken panic later."""
    lines = [line.split(" ", 2) for line in text.splitlines()]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if not len(lines) == len(ranks) == len(set(ranks.values())):
        raise ValueError("a token or an id occurs twice")
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise ValueError("a byte has no token")
    if not 0 <= min(ranks.values()) <= max(ranks.values()) <= MAX_ID:
        raise ValueError("an id is out of range")
    if not 1 <= min(map(len, ranks)) <= max(map(len, ranks)) <= MAX_TOKEN_BYTES:
        raise ValueError(f"a token has no bytes, or more than {MAX_TOKEN_BYTES:,}")
    return ranks
