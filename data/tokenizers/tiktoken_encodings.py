"""tiktoken's own encodings, such as gpt2."""

from __future__ import annotations

import difflib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from data.tokenizers import tokenizer
from system.errors import UserError

if TYPE_CHECKING:
    from tiktoken import Encoding

    from data.config import TokenizerConfig
    from data.corpus import Split

NETWORK_TIMEOUT_SECONDS = 3.0


@tokenizer()
def tiktoken(config: TokenizerConfig, train_split: Split, cache_dir: Path) -> Encoding:
    """The encoding `tokenizer.name`.

    Raises UserError for a name tiktoken does not have, or has neither in its cache nor from the network.
    """
    from tiktoken import get_encoding, list_encoding_names, load

    name, names = config.name, list_encoding_names()
    if name not in names:
        near = ", ".join(difflib.get_close_matches(str(name), names) or names)
        raise UserError(f"tokenizer.name {name!r} is none of tiktoken's encodings. Use one like {near}.")
    # tiktoken reads its cache, and calls this for what is not there; its own version waits without limit.
    original, load.read_file = load.read_file, _download
    try:
        return get_encoding(name)
    except (OSError, ValueError):
        raise UserError(
            f"The vocabulary of {name!r} is not in tiktoken's cache and cannot be downloaded. "
            "Set TIKTOKEN_CACHE_DIR to a directory that has it, or use tokenizer=bpe, which needs no network."
        ) from None
    finally:
        load.read_file = original


def _download(url: str) -> bytes:
    """Content of `url`, or OSError within NETWORK_TIMEOUT_SECONDS if nothing answers there."""
    import requests

    # Looking up a host's name has no timeout of its own, so it happens in a thread that may be left behind.
    failed, over = [], threading.Event()

    def knock():
        try:
            requests.head(url, timeout=NETWORK_TIMEOUT_SECONDS)
        except OSError as error:
            failed.append(error)
        finally:
            over.set()

    threading.Thread(target=knock, daemon=True).start()
    if not over.wait(NETWORK_TIMEOUT_SECONDS) or failed:
        raise OSError("no network")
    response = requests.get(url, timeout=10 * NETWORK_TIMEOUT_SECONDS)
    response.raise_for_status()
    return response.content
