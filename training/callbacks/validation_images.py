"""Attention maps, scores of attention heads and a sample of text, at every validation."""

import logging
import math

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from analysis.head_detector import head_scores, repeated_sequences
from data.tokenizer import token_labels
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from training.budget_timer import budget_timer

logger = logging.getLogger(__name__)


class ValidationImages(Callback):
    """Logs attention maps of a fixed passage, scores of every head, and a sample of text at every validation.

    Args:
        passage: token ids from the validation split. Heads are scored on as many as fit into the context; the maps
            show the first TOKENS_DRAWN.
    """

    PASSAGE_TOKENS = 256
    TOKENS_DRAWN = 32
    SAMPLING = SamplingConfig(max_new_tokens=100)

    def __init__(self, passage: list[int]):
        self.passage = passage

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Draws and logs, at the training step."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero or not trainer.loggers:
            return
        timer = budget_timer(trainer)
        if timer and timer.is_late():
            logger.info(f"no pictures at step {trainer.global_step:,}: the budget is almost used up")
            return
        from analysis.attention_plot import draw_attention  # imports Pillow, which not every run needs

        network, writer, step = module.network, trainer.logger.experiment, trainer.global_step
        context_length = network.config.context_length
        passage = self.passage[:context_length]
        maps = attention_of(network, torch.tensor([passage]))  # (L, 1, H, T, T)
        drawn = passage[: self.TOKENS_DRAWN]  # attention is causal: later tokens do not change these maps
        first_maps = maps[:, 0, :, : len(drawn), : len(drawn)].numpy()
        labels = token_labels(module.tokenizer, drawn)
        writer.add_image("attention", draw_attention(first_maps, labels, f"step {step:,}"), step, dataformats="HWC")
        if len(passage) > 1 and context_length > 3:  # otherwise a head has nothing to attend to but one token
            repeated = repeated_sequences(torch.tensor(self.passage), context_length)
            log_head_scores(writer, step, maps, attention_of(network, repeated))

        start = self.passage[:1]
        text = module.tokenizer.decode(start + list(generate(network, start, self.SAMPLING)))
        # An indented code block shows Markdown and HTML as they are. Markdown treats \r as a line break, too.
        writer.add_text("writing", "\n".join("    " + line for line in text.splitlines()), step)


def attention_of(network: GPT, ids: Tensor) -> Tensor:
    """Attention weights of every layer for ids (B, T): (L, B, H, T, T) on the CPU."""
    device = network.token_embedding.weight.device
    return torch.stack(network.attention_maps(ids.to(device))).float().cpu()


def log_head_scores(writer: SummaryWriter, step: int, maps: Tensor, repeated_maps: Tensor) -> None:
    """Logs a picture with the scores of all heads, and for each score the value of the most extreme head."""
    from analysis.attention_plot import draw_head_scores

    scores = head_scores(maps, repeated_maps)
    T = maps.size(-1)
    names = {  # the title of each score in the picture, and the value shown in full color
        "entropy": ("entropy, bits", math.log2(T)),
        "distance": ("tokens back", T / 2),
        "previous": ("previous token", 1.0),
        "first": ("first token", 1.0),
        "induction": ("induction", 1.0),
    }
    tables = {title: scores[name].numpy() for name, (title, _) in names.items()}
    writer.add_image("heads", draw_head_scores(tables, dict(names.values()), f"step {step:,}"), step, dataformats="HWC")
    for name, table in scores.items():
        if name == "entropy":  # the most focused head
            writer.add_scalar("heads/entropy_min", table.min(), step)
        else:
            writer.add_scalar(f"heads/{name}_max", table.max(), step)
