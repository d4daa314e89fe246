"""Attention maps, scores of attention heads and a sample of text, at every validation."""

import logging
import math

import tiktoken
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from analysis.head_detector import head_scores, repeated_sequences
from data.tokenizer import token_labels
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from training.budget_timer import budget_timer
from training.loggers import RunLogger

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

        network, step, media = (
            module.network,
            trainer.global_step,
            [log for log in trainer.loggers if log.accepts_media],
        )
        context_length = network.config.context_length
        passage = self.passage[:context_length]
        maps = attention_of(network, torch.tensor([passage]))  # (L, 1, H, T, T)
        if media:
            self._log_maps(media, step, maps, module.tokenizer)
        if len(passage) > 1 and context_length > 3:  # otherwise a head has nothing to attend to but one token
            repeated = repeated_sequences(torch.tensor(self.passage), context_length)
            scores = head_scores(maps, attention_of(network, repeated))
            if media:
                log_score_picture(media, step, scores, num_tokens=len(passage))
            values = most_extreme(scores)
            for log in trainer.loggers:
                log.log_metrics(values, step)

        if media:
            start = self.passage[:1]
            text = module.tokenizer.decode(start + list(generate(network, start, self.SAMPLING)))
            for log in media:
                log.log_text("sample", text, step)

    def _log_maps(self, loggers: list[RunLogger], step: int, maps: Tensor, tokenizer: tiktoken.Encoding) -> None:
        from analysis.attention_plot import draw_attention  # imports Pillow, which not every run needs

        drawn = self.passage[: min(self.TOKENS_DRAWN, maps.size(-1))]
        first_maps = maps[:, 0, :, : len(drawn), : len(drawn)].numpy()  # causal: later tokens do not change these
        picture = draw_attention(first_maps, token_labels(tokenizer, drawn), f"step {step:,}")
        for log in loggers:
            log.log_image("attention/maps", picture, step)


def attention_of(network: GPT, ids: Tensor) -> Tensor:
    """Attention weights of every layer for ids (B, T): (L, B, H, T, T) on the CPU."""
    device = network.token_embedding.weight.device
    return torch.stack(network.attention_maps(ids.to(device))).float().cpu()


def log_score_picture(loggers: list[RunLogger], step: int, scores: dict[str, Tensor], num_tokens: int) -> None:
    """Logs one picture with the scores of all heads."""
    from analysis.attention_plot import draw_head_scores

    names = {  # the title of each score in the picture, and the value shown in full color
        "entropy": ("entropy, bits", math.log2(num_tokens)),
        "distance": ("tokens back", num_tokens / 2),
        "previous": ("previous token", 1.0),
        "first": ("first token", 1.0),
        "induction": ("induction", 1.0),
    }
    tables = {title: scores[name].numpy() for name, (title, _) in names.items()}
    picture = draw_head_scores(tables, dict(names.values()), f"step {step:,}")
    for log in loggers:
        log.log_image("attention/heads", picture, step)


def most_extreme(scores: dict[str, Tensor]) -> dict[str, float]:
    """For each score, the value of the head in which it is strongest: the lowest entropy, the highest of the others."""
    values = {f"attention/{name}_max": float(table.max()) for name, table in scores.items() if name != "entropy"}
    return {"attention/entropy_min": float(scores["entropy"].min()), **values}
