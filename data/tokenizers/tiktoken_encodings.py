"""The encodings of tiktoken, such as gpt2."""

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
    """Loads the tiktoken encoding `tokenizer.name`.

    Raises UserError for an unknown name, or if the encoding is neither cached nor can be downloaded.
    """
    from tiktoken import get_encoding, list_encoding_names, load

    name, names = config.name, list_encoding_names()
    if name not in names:
        near = ", ".join(difflib.get_close_matches(str(name), names) or names)
        raise UserError(f"tokenizer.name {name!r} is not one of tiktoken's encodings. Use one of {near}.")
    # tiktoken calls read_file for what is not in its cache. Its own function has no timeout.
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
    """Returns the content of `url`. Raises OSError within NETWORK_TIMEOUT_SECONDS if there is no response."""
    import requests

    # A DNS lookup has no timeout, so the first request runs in a thread that may be abandoned.
    errors, finished = [], threading.Event()

    def send_request():
        try:
            requests.head(url, timeout=NETWORK_TIMEOUT_SECONDS)
        except OSError as error:
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=send_request, daemon=True).start()
    if not finished.wait(NETWORK_TIMEOUT_SECONDS) or errors:
        raise OSError("no network")
    response = requests.get(url, timeout=10 * NETWORK_TIMEOUT_SECONDS)
    response.raise_for_status()
    return response.content
