"""Text <-> token ids. Every tokenizer is a `tiktoken.Encoding`; three ways lead to one.

    byte      256 ids, one a byte
    bpe       byte-level byte-pair encoding, learned from the training split alone
    tiktoken  one of tiktoken's own, such as gpt2

Any text encodes, in time linear in its length, and decodes to itself; special tokens' names are text.
"""

import base64
import codecs
import difflib
import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken
import tiktoken.load

from data.cache import Damaged, checked_size, written_to_cache
from data.config import TokenizerConfig, vocab_size_for
from data.corpus import Split
from system.checks import Number, check
from system.errors import UserError

log = logging.getLogger(__name__)

# What a token can hold at most: one word with its apostrophe, led by a space or a new line ("↵And", "·o'er"),
# up to three digits, punctuation with the line's end, or white space. Every repeat is bounded and nothing
# looks ahead, so no text can make matching crawl. Of a dozen such patterns this one compressed verse best.
BPE_PATTERN = (
    r"[ \n]?[\p{L}\p{M}]{1,32}(?:['’]\p{L}{1,4})?"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]{1,16}[\r\n]{0,8}"
    r"|\s{1,32}"
)
BYTE_PATTERN = r"(?s:.{1,64})"
# Merges are learned from the start of the training split, at most this much of it. More changes few of them,
# and of random letters, the worst case, even this much takes 7 s and 0.7 GB.
BPE_TRAINING_BYTES = 16 << 20
SEGMENT_CHARS = 4096  # one call of tiktoken gets no more: long runs of one character make it panic or crawl
NETWORK_PATIENCE_S = 3.0
# Bounds of a saved tokenizer, which may be another person's; tiktoken's own have names of 11 characters, patterns of
# 500 and tokens of 128 bytes.
MAX_NAME_CHARS, MAX_PATTERN_CHARS, MAX_TOKEN_BYTES, MAX_ID = 64, 10_000, 4096, (1 << 31) - 2


def build_tokenizer(config: TokenizerConfig, train_split: Split, cache_dir: Path) -> tiktoken.Encoding:
    """The encoding `config` asks for. Only bpe looks at the text, and remembers its merges in `cache_dir`.

    Raises UserError for a name tiktoken does not have, or has neither in its cache nor from the network.
    """
    if config.kind == "byte":
        return _encoding("byte", BYTE_PATTERN, {bytes([byte]): byte for byte in range(256)})
    if config.kind == "tiktoken":
        return _named_encoding(config.name)
    vocab_size = config.vocab_size or vocab_size_for(train_split.num_bytes)
    return _encoding("bpe", BPE_PATTERN, _cached_merges(vocab_size, train_split, Path(cache_dir)))


def _encoding(name: str, pattern: str, ranks: dict[bytes, int], special=None) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {})


# Encoding and decoding


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """Ids of `text`, (n,) int64; n is 0 for the empty text."""
    return np.concatenate([np.empty(0, np.int64), *encode_chunks(encoding, [text])])


def encode_chunks(encoding: tiktoken.Encoding, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Ids of the joined `texts` as a row of int64 arrays, however the text was cut into pieces.

    Raises UserError where the pattern, which then is none of ours, gives up.
    """
    for segment in _segments(texts):
        try:
            ids = encoding.encode_ordinary(segment)
        except BaseException as error:  # a panic in tiktoken's Rust is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise UserError(f"The pattern of tokenizer {encoding.name} gives up on this text. Use another.") from None
        yield np.array(ids, dtype=np.int64)


def _segments(texts: Iterable[str]) -> Iterator[str]:
    """The joined `texts` cut anew, at most SEGMENT_CHARS at a time, where no tokenizer can tell.

    Where white space follows a letter every known pattern cuts too, so the ids are those of the uncut text.
    A run without such a place is cut at SEGMENT_CHARS.
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


class StreamingDetokenizer:
    """Ids in, whole characters out: what it returns, joined, is `encoding.decode(ids, errors="replace")`."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Characters that this id completes; often one token's text, sometimes none."""
        return self.decoder.decode(_bytes_of(self.encoding, token_id))

    def flush(self) -> str:
        """A character left incomplete at the end, as �."""
        return self.decoder.decode(b"", final=True)


def _bytes_of(encoding: tiktoken.Encoding, token_id: int) -> bytes:
    try:
        return encoding.decode_single_token_bytes(int(token_id))
    except KeyError:  # some of tiktoken's own encodings leave gaps between their ids
        return b""


# What a token is


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Length of each token in bytes, (n_vocab,) int32: what turns nats a token into bits a byte.

    0 for special tokens and unused ids, which no text encodes to.
    """
    lengths = np.zeros(encoding.n_vocab, dtype=np.int32)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def token_labels(encoding: tiktoken.Encoding, ids: Iterable[int], max_chars: int = 12) -> list[str]:
    """One short printable name a token, for the axes of pictures: "↵And", "·the", "\\xe2\\x80"."""
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


# Plain values, for checkpoints and caches


def to_plain(encoding: tiktoken.Encoding) -> dict:
    """The whole encoding as str, int and list: a checkpoint with it still loads with `weights_only=True`."""
    return {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "merges": _format_merges(encoding._mergeable_ranks),
        "special_tokens": [[token, token_id] for token, token_id in sorted(encoding._special_tokens.items())],
    }


def from_plain(plain: dict) -> tiktoken.Encoding:
    """The encoding `to_plain` described. Raises UserError if the description is damaged."""
    try:
        check(plain, {"name": str, "pattern": str, "merges": str, "special_tokens": [[object]]}, "tokenizer")
        name, pattern, ranks = plain["name"], plain["pattern"], _parse_merges(plain["merges"])
        special_tokens = {token: token_id for token, token_id in plain["special_tokens"]}
        check(special_tokens, {str: Number(int, 0, MAX_ID)}, "special_tokens")
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # it is shown
            raise ValueError(f"its name has control characters, or more than {MAX_NAME_CHARS}")
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(f"its pattern has more than {MAX_PATTERN_CHARS:,} characters")
        if not len(plain["special_tokens"]) == len(special_tokens) == len(set(special_tokens.values())):
            raise ValueError("a special token occurs twice")
        if ranks.keys() & {token.encode() for token in special_tokens}:
            raise ValueError("a special token is also an ordinary one")
        if set(ranks.values()) & set(special_tokens.values()):
            raise ValueError("a special token shares its id")
        return _encoding(name, pattern, ranks, special_tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise UserError(f"The saved tokenizer is damaged ({str(error)[:200]}). Use another checkpoint.") from None


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Equal for two encodings exactly if they turn every text into the same ids."""
    rules = f"{encoding._pat_str}\n{_format_merges(encoding._mergeable_ranks)}"
    return hashlib.sha256(rules.encode()).hexdigest()


def _format_merges(ranks: dict[bytes, int]) -> str:
    """tiktoken's own file format: a line with the token in base64 and its id, by id."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in by_rank)


def _parse_merges(text: str) -> dict[bytes, int]:
    """Raises ValueError for anything tiktoken would later panic at."""
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


# Byte-pair encoding


def _cached_merges(vocab_size: int, split: Split, cache_dir: Path) -> dict[bytes, int]:
    key = hashlib.sha256(f"1\n{split.sha256}\n{vocab_size}\n{BPE_PATTERN}".encode()).hexdigest()[:16]
    path = cache_dir / f"bpe-{key}.txt"
    try:
        return _parse_merges(path.read_bytes()[: checked_size(path)].decode())
    except FileNotFoundError:
        pass
    except (Damaged, OSError, ValueError) as error:
        log.info("%s is damaged (%s): learning the merges again", path, error)
    ranks = _train_merges(vocab_size, split)
    with written_to_cache(path) as f:
        f.write(_format_merges(ranks).encode())
    return ranks


def _train_merges(vocab_size: int, split: Split) -> dict[bytes, int]:
    import rustbpe  # here, because nothing but training needs it

    num_bytes = min(split.num_bytes, BPE_TRAINING_BYTES)
    log.info("learning up to %d merges from %.1f MB of text", vocab_size - 256, num_bytes / 1e6)
    logging.getLogger("rustbpe").setLevel(logging.WARNING)  # it reports every hundredth of its progress
    trainer = rustbpe.Tokenizer()
    segments = _segments(_first_bytes(split.read(), BPE_TRAINING_BYTES))
    trainer.train_from_iterator(segments, vocab_size, buffer_size=1024, pattern=BPE_PATTERN)
    ranks: dict[bytes, int] = {}
    for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1]):
        ranks.setdefault(bytes(token), len(ranks))  # were two merges to spell one token, it is one token
    return ranks


def _first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        if num_bytes <= 0:
            return
        yield text
        num_bytes -= len(text.encode())


# tiktoken's own encodings


def _named_encoding(name: str) -> tiktoken.Encoding:
    names = tiktoken.list_encoding_names()
    if name not in names:
        near = ", ".join(difflib.get_close_matches(str(name), names) or names)
        raise UserError(f"tokenizer.name {name!r} is none of tiktoken's encodings. Use one like {near}.")
    # tiktoken reads its cache, and calls this for what is not there; its own version waits without limit.
    original, tiktoken.load.read_file = tiktoken.load.read_file, _download
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError):
        raise UserError(
            f"The vocabulary of {name!r} is not in tiktoken's cache and cannot be downloaded. "
            "Set TIKTOKEN_CACHE_DIR to a directory that has it, or use tokenizer=bpe, which needs no network."
        ) from None
    finally:
        tiktoken.load.read_file = original


def _download(url: str) -> bytes:
    """Content of `url`, or OSError within NETWORK_PATIENCE_S if nothing answers there."""
    import requests

    # Looking up a host's name has no timeout of its own, so it happens in a thread that may be left behind.
    failed, over = [], threading.Event()

    def knock():
        try:
            requests.head(url, timeout=NETWORK_PATIENCE_S)
        except OSError as error:
            failed.append(error)
        finally:
            over.set()

    threading.Thread(target=knock, daemon=True).start()
    if not over.wait(NETWORK_PATIENCE_S) or failed:
        raise OSError("no network")
    response = requests.get(url, timeout=10 * NETWORK_PATIENCE_S)
    response.raise_for_status()
    return response.content
