"""Models of the Hugging Face Hub by name: from the cache of huggingface_hub, or downloaded into it."""

from pathlib import Path

from checkpoint.hugging_face.directory import CONFIG, FILES, INDEX, TOKENIZER
from system.errors import UserError

HUB_PREFIX = "hf:"
_PATTERNS = [CONFIG, TOKENIZER, INDEX, "*.safetensors"]  # nothing else is read


def hub_directory(name: str) -> Path:
    """The local directory of a model such as openai-community/gpt2.

    Raises UserError if huggingface_hub is not installed, or if the model is neither in its cache nor reachable.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{HUB_PREFIX}{name} needs huggingface_hub: pip install huggingface_hub, or give a directory."
        ) from None
    for local in (True, False):  # what is there needs no network
        try:
            path = Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=local))
        except (OSError, ValueError, RuntimeError) as error:  # also its own errors, of the network and of names
            reason = " ".join(str(error).split())[:100]
            continue
        if local and not all((path / file).exists() for file in (CONFIG, TOKENIZER)):
            continue  # downloaded by another program, in part
        return path
    raise UserError(
        f"{HUB_PREFIX}{name} is not in the cache of huggingface_hub and cannot be downloaded ({reason}). Put "
        f"{', '.join(FILES)} of that model into a directory and give the directory."
    )
