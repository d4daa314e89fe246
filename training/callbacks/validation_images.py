"""What every validation measures, draws and records beyond the loss."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import tiktoken
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from analysis.ablation import AblationCosts, ablation_costs
from analysis.head_detector import head_scores, repeated_sequences
from analysis.logit_lens import lens_losses
from analysis.recording import HEAD_SCORES, ValidationRecord, pack_maps, save_validation
from data.tokenizer import decode, token_labels
from model.config import GPTConfig
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.running_clock import running_seconds
from training.budget_timer import budget_timer
from training.callbacks.metrics_logger import MetricsLogger
from training.loggers import RunLogger

MIN_SAMPLE_TOKENS, MAX_SAMPLE_TOKENS = 64, 1024

logger = logging.getLogger(__name__)


class ValidationImages(Callback):
    """Attention maps of a fixed passage, scores of every head, ablations, the logit lens, and a sample of text.

    At every validation they are logged, and recorded for the report of the run (analysis/recording.py).

    Args:
        passage: token ids from the validation split. Heads are scored on as many as fit into the context; the pictures
            show the first TOKENS_DRAWN, the report the first TOKENS_RECORDED.
        sample: token ids from the validation split, (N, T + 1), for ablations and the logit lens.
        metrics: knows how many tokens were trained on.
        started_at: start of the run, as a reading of running_seconds(); for a resumed run, earlier by the time that
            it has used before.
    """

    PASSAGE_TOKENS = 256
    TOKENS_DRAWN = 32
    TOKENS_RECORDED = 64
    SAMPLING = SamplingConfig(max_new_tokens=100)

    def __init__(self, passage: list[int], sample: Tensor, metrics: MetricsLogger, started_at: float = 0.0):
        self.passage = passage
        self.sample = sample
        self._metrics = metrics
        self._started_at = started_at

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Measures, draws, logs and records, at the training step."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        record = ValidationRecord(
            step=trainer.global_step,
            tokens=self._metrics.tokens,
            seconds=round(running_seconds() - self._started_at, 2),
            nats_per_token=module.validation["nats_per_token"],
            bits_per_byte=module.validation["bits_per_byte"],
        )
        timer = budget_timer(trainer)
        if timer and timer.is_late():
            logger.info(f"no pictures at step {trainer.global_step:,}: the budget is almost used up")
        else:
            record = self._measure(trainer, module, record)
        save_validation(Path(trainer.default_root_dir), record)

    def _measure(self, trainer: Trainer, module: LightningModule, record: ValidationRecord) -> ValidationRecord:
        """Logs everything, and returns the record with all arrays."""
        network, step = module.network, trainer.global_step
        media = [log for log in trainer.loggers if log.accepts_media]
        context_length = network.config.context_length
        passage = self.passage[:context_length]
        maps = attention_of(network, torch.tensor([passage]))  # (L, 1, H, T, T)
        if media:
            self._log_maps(media, step, maps, module.tokenizer)
        values, scores = {}, None
        if len(passage) > 1 and context_length > 3:  # otherwise a head has nothing to attend to but one token
            repeated = repeated_sequences(torch.tensor(self.passage), context_length)
            scores = head_scores(maps, attention_of(network, repeated))
            if media:
                log_score_picture(media, step, scores, num_tokens=len(passage))
            values |= most_extreme(scores)

        sample = self.sample.to(network.token_embedding.weight.device)
        costs, lens = ablation_costs(network, sample), lens_losses(network, sample).cpu()
        if media:
            log_ablation_picture(media, step, costs)
        values |= {"ablation/head_max": float(costs.heads.max()), "ablation/mlp_max": float(costs.mlps.max())}
        values |= {f"by_layer/lens_loss_{layer}": float(loss) for layer, loss in enumerate(lens)}
        for log in trainer.loggers:
            log.log_metrics(values, step)

        start = self.passage[:1]
        text = decode(module.tokenizer, start + list(generate(network, start, self.SAMPLING)))
        for log in media:
            log.log_text("sample", text, step)

        recorded = self.passage[: min(self.TOKENS_RECORDED, maps.size(-1))]
        T = len(recorded)
        return replace(
            record,
            text=text,
            labels=tuple(token_labels(module.tokenizer, recorded)),
            attention=pack_maps(maps[:, 0, :, :T, :T].numpy()),  # causal: later tokens do not change these
            scores=None if scores is None else torch.stack([scores[name] for name in HEAD_SCORES]).float().numpy(),
            ablation_heads=costs.heads.float().cpu().numpy(),
            ablation_mlps=costs.mlps.float().cpu().numpy(),
            lens=lens.float().numpy(),
            sample_tokens=self.sample[:, 1:].numel(),
        )

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


def log_ablation_picture(loggers: list[RunLogger], step: int, costs: AblationCosts) -> None:
    """Logs one picture with the ablation costs of all heads, in percent of the loss of the whole network."""
    from analysis.attention_plot import draw_head_scores

    title, percent = "loss without the head, + %", 100 * costs.heads.cpu().numpy() / costs.loss
    picture = draw_head_scores({title: percent}, {title: max(1.01, float(percent.max()))}, f"step {step:,}")
    for log in loggers:
        log.log_image("attention/heads_ablated", picture, step)


def num_sample_tokens(config: GPTConfig, val_tokens: int) -> int:
    """Number of tokens for ablations: together they read at most as many as a validation, `val_tokens`.

    There is one ablation per head and per MLP.
    """
    ablations = config.num_layers * (config.num_heads + 1)
    return max(MIN_SAMPLE_TOKENS, min(MAX_SAMPLE_TOKENS, val_tokens // ablations))


def most_extreme(scores: dict[str, Tensor]) -> dict[str, float]:
    """For each score, the value of the head in which it is strongest: the lowest entropy, the highest of the others."""
    values = {f"attention/{name}_max": float(table.max()) for name, table in scores.items() if name != "entropy"}
    return {"attention/entropy_min": float(scores["entropy"].min()), **values}
