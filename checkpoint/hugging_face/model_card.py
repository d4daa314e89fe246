"""README.md of an exported directory: what the network is, how good, and the lines that use it."""

import math
from pathlib import Path
from typing import Any

import tiktoken

from checkpoint.hugging_face.architectures import Architecture
from model.config import GPTConfig


def model_card(
    architecture: Architecture,
    config: GPTConfig,
    tokenizer: tiktoken.Encoding,
    validation: dict[str, float],
    num_parameters: int,
    step: int,
    run: dict[str, Any],
) -> str:
    """The text of the card, in Markdown.

    Args:
        validation: nats_per_token and bits_per_byte; nan where they are not known.
        run: "text" and "command" of the training run, where they are known.
    """
    custom = (
        "\nThe architecture is not part of transformers: `modeling_tiny_gpt.py`, 60 lines, has what it adds to "
        "NanoChat, a table of token pairs. `trust_remote_code=True` runs that file. A network trained with "
        "`model=nanochat` needs no code.\n"
        if architecture.custom_code
        else ""
    )
    rows = {
        "architecture": architecture.model_type,
        "parameters": f"{num_parameters:,}",
        "layers, heads, width": f"{config.num_layers}, {config.num_heads}, {config.d_model}",
        "context": f"{config.context_length} tokens",
        "tokenizer": f"{tokenizer.name}, {config.vocab_size:,} tokens, bytes merged (BPE)",
        "training step": f"{step:,}" if step else None,
        "text": run.get("text"),
        "validation": None
        if math.isnan(validation["bits_per_byte"])
        else f"{validation['bits_per_byte']:.3f} bits per byte, {validation['nats_per_token']:.3f} nats per token",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    command = run.get("command")
    reproduce = f"\n## Reproduce\n\n```\n{command}\n```\n" if command else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [tiny-gpt-lab]
---

# A GPT trained with tiny-gpt-lab

| | |
|---|---|
{table}

## Use

```python
from transformers import pipeline

{usage(architecture, Path("."))}
print(generate("To be, or not")[0]["generated_text"])
```
{custom}
The text continues without an end-of-text token; `max_length` is the context. Special tokens' names are ordinary text.
{reproduce}"""


def usage(architecture: Architecture, path: Path) -> str:
    """The line of Python that loads an exported directory."""
    line = f'generate = pipeline("text-generation", "{path}"'
    if not architecture.custom_code:
        return f"{line})"
    return f"{line}, trust_remote_code=True)  # runs modeling_tiny_gpt.py; model=nanochat needs no code"
