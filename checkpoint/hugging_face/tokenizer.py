"""tokenizer.json, the format of Hugging Face tokenizers, from our encodings and to them.

Both split text with a regular expression and then merge bytes; bytes are written as printable characters (GPT-2's
table). Merges are ordered there by their place in a list, here by the id of the token that they make.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import tiktoken

from data.tokenizer import MAX_ID, SEGMENT_CHARS, deserialize, format_merges
from data.tokenizers.bpe import PATTERNS
from system.checks import Bounded, check, short_repr

# Our encodings first cut a text that is longer (data/tokenizer.py: `segments`): the same cuts as a pattern.
# Python's isspace() has four control characters that \s does not have.
SEGMENT_PATTERN = rf"[\s\S]{{0,{SEGMENT_CHARS - 1}}}\p{{L}}(?=[\s\x1c-\x1f])|[\s\S]{{1,{SEGMENT_CHARS}}}"
# tiktoken's pattern for GPT-2 means the same as GPT2_PATTERN, which the pre-tokenizer "ByteLevel" stands for.
TIKTOKEN_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_PATTERN = PATTERNS["gpt2"]
GPT2_PATTERNS = (GPT2_PATTERN, TIKTOKEN_GPT2_PATTERN)
_UNUSED = "<|unused|>"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer_json(encoding: tiktoken.Encoding) -> str:
    """The content of tokenizer.json.

    Special tokens are left out: transformers would find their names in text, where for us they are text.
    """
    ranks = encoding._mergeable_ranks
    splits = [_split(SEGMENT_PATTERN), _split(_to_oniguruma(encoding._pat_str))]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is that token, as in tiktoken
            "vocab": {to_characters(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": [[to_characters(left), to_characters(right)] for left, right in all_merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def all_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that joins to a token, in the order of its id: tiktoken may merge any of them."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for end in range(1, len(token)):
            if token[:end] in ranks and token[end:] in ranks:
                yield token[:end], token[end:]


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _to_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken's regular expressions in the syntax of Hugging Face's, which means the same there."""
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)  # there {1,3}+ would be a repetition of repetitions
    pattern = re.sub(r"(?<!\\)\$", r"\\z", pattern)  # there $ is also the end of a line
    return pattern.replace("(?s:", "(?m:")  # the option with which a dot is any character


def _from_oniguruma(pattern: str) -> str:
    return pattern.replace(r"\z", "$").replace("(?m:", "(?s:")


def encoding_from_json(content: dict[str, Any], vocab_size: int) -> tiktoken.Encoding:
    """The encoding that a tokenizer.json describes.

    Args:
        content: parsed, with any values.
        vocab_size: of the network. Embeddings may have more rows than there are tokens.

    Raises:
        ValueError: it is not a byte-level BPE that tiktoken can do, or the content is damaged.
    """
    check(content, {"model": {str: object}, "added_tokens?": ([{str: object}], type(None))}, "tokenizer.json")
    model, added = content["model"], content.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"its tokenizer is {short_repr(model.get('type'))}, not a byte-level BPE")
    if content.get("normalizer") is not None:
        raise ValueError("its tokenizer changes the text before it encodes it (normalizer)")
    check(model, {"vocab": {str: Bounded(int, 0, MAX_ID)}, "merges": [object]}, "model")
    special = {}
    for token in added:
        check(token, {"content": str, "id": Bounded(int, 0, MAX_ID), "special?": bool}, "added_tokens")
        if not token.get("special", True):
            raise ValueError(f"its tokenizer has the added token {short_repr(token['content'])}, which is not special")
        special[token["content"]] = token["id"]
    ranks = {_to_bytes(text): rank for text, rank in model["vocab"].items() if text not in special}
    _check_merges(model["merges"], ranks)
    tokens = max([*ranks.values(), *special.values()], default=-1) + 1
    if tokens > vocab_size:
        raise ValueError(f"its tokenizer has {tokens:,} tokens, its network {vocab_size:,}")
    if tokens < vocab_size:
        special[_UNUSED] = vocab_size - 1
    return deserialize(
        {
            "name": "huggingface",
            "pattern": _pattern(content.get("pre_tokenizer")),
            "merges": format_merges(ranks),
            "special_tokens": [[name, token_id] for name, token_id in special.items()],
        }
    )


def _check_merges(merges: list[Any], ranks: dict[bytes, int]) -> None:
    """Raises ValueError where the order of merges is not that of the ids: tiktoken knows no other."""
    last = -1
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        check(pair, [str], "a merge")
        if len(pair) != 2:
            raise ValueError(f"a merge has {len(pair)} tokens, not 2")
        left, right = pair
        rank = ranks.get(_to_bytes(left) + _to_bytes(right))
        if rank is None:
            raise ValueError(f"merges has {short_repr(f'{left} {right}')}, which is no token")
        if rank < last:
            raise ValueError("its merges are in another order than their ids")
        last = rank


def _pattern(pre_tokenizer: Any) -> str:
    """The pattern that splits text. Raises ValueError for another way to split."""
    check(pre_tokenizer, {"type": str}, "pre_tokenizer")
    parts = pre_tokenizer.get("pretokenizers") if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    check(parts, [{"type": str}], "pretokenizers")
    pattern = None
    for part in parts:
        if part["type"] == "ByteLevel":
            if part.get("add_prefix_space"):
                raise ValueError("its tokenizer puts a space before every text (add_prefix_space)")
            if part.get("use_regex", True):
                pattern = GPT2_PATTERN
        elif part["type"] == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            check(part, {"pattern": {"Regex": str}}, "Split")
            if part["pattern"]["Regex"] == SEGMENT_PATTERN:
                continue  # ours does that anyway
            if pattern is not None:
                raise ValueError("its tokenizer splits text in several ways, one after the other")
            pattern = _from_oniguruma(part["pattern"]["Regex"])
        else:
            raise ValueError(f"its tokenizer splits text by {short_repr(part['type'])}")
    if pattern is None:
        raise ValueError("its tokenizer does not split text")
    return pattern


# GPT-2's printable characters for bytes


@cache
def _characters() -> tuple[str, ...]:
    """The character of each byte: itself where it is printable in Latin-1, else one from U+0100 on."""
    others = iter(range(0x100, 0x200))
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def _bytes() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_characters())}


def to_characters(token: bytes) -> str:
    """A token's bytes as the printable characters that stand for them in GPT-2's vocabulary."""
    return "".join(_characters()[byte] for byte in token)


def _to_bytes(text: str) -> bytes:
    try:
        return bytes(_bytes()[character] for character in text)
    except KeyError as error:
        raise ValueError(f"its tokenizer has {error} in a token, which stands for no byte") from None
