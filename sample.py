"""Writes text with a trained GPT:  python sample.py prompt="To be, or not"      the keys: configs/sample.yaml"""

import sys
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from configs.command_line import compose, one_line_errors, read_prompt
from configs.errors import UserError
from configs.schema import build
from model.config import SamplingConfig


def main(config: DictConfig) -> None:
    """Loads a checkpoint, says which, and streams its writing. Raises UserError for what the user can mend."""
    sampling = build(SamplingConfig, OmegaConf.masked_copy(config, [f.name for f in fields(SamplingConfig)]))
    if config.num_samples < 1:
        raise UserError(f"num_samples is {config.num_samples}, but must be at least 1.")
    prompt = read_prompt(config)

    import torch  # after what can be refused without it

    from data.tokenizer import StreamDecoder, encode
    from model.checkpoint import find_checkpoint, load_checkpoint
    from model.generation import generate

    device = pick_device(config.device)
    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint, config.runs_dir), torch.device(device))
    print(checkpoint.describe(), file=sys.stderr)
    ids = encode(checkpoint.tokenizer, prompt or "\n").tolist()  # no prompt: as after a line's end
    context = checkpoint.network.config.context_length
    if len(ids) > context:
        print(f"the prompt has {len(ids)} tokens; the model sees the last {context}", file=sys.stderr)
    for index in range(config.num_samples):
        if config.num_samples > 1:
            print(f"\n--- sample {index + 1} ---")
        print(prompt, end="", flush=True)
        decoder = StreamDecoder(checkpoint.tokenizer)
        for token in generate(checkpoint.network, ids, sampling, index):
            print(decoder.push(token), end="", flush=True)
        print(decoder.flush())


def pick_device(choice: str) -> str:
    """The fastest device there is for auto, else the choice. Raises UserError where this machine has none of it."""
    import torch

    present = [name for name, module in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if module.is_available()]
    if choice == "auto":
        return (present + ["cpu"])[0]
    if choice.partition(":")[0] not in [*present, "cpu"]:
        raise UserError(f"device is {choice!r}, but this machine has {', '.join([*present, 'cpu'])}.")
    return choice


if __name__ == "__main__":
    # Text is UTF-8 whatever the locale says.
    sys.stdout.reconfigure(encoding="utf-8")
    sys.stderr.reconfigure(encoding="utf-8")
    with one_line_errors("sample"):
        main(compose("sample", sys.argv[1:]))
