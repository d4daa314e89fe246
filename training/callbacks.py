"""What happens beside training: metrics, progress, pictures and text."""

import logging
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from analysis.head_detector import head_scores, repeated_sequences
from data.tokenizer import token_labels
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.checks import COUNT, SECONDS, Is, Number
from system.memory import memory_mb, peak_memory_mb, reset_peak_memory
from system.running_clock import running_seconds, watch_stops
from training.budget_timer import budget_timer
from training.final_metrics import FINAL_METRICS
from training.progress import run_progress

logger = logging.getLogger(__name__)


class RunLogger(TensorBoardLogger):
    """TensorBoard events of one run, in one file, straight in its directory."""

    def __init__(self, run_dir: Path):
        super().__init__(str(run_dir), name="", version="", default_hp_metric=False)

    def log_final(self, metrics: dict[str, float], step: int, context_length: int) -> None:
        """Writes the run's final metrics.

        The step time also goes to a tag whose x axis is the context length, so that runs of several lengths
        draw one curve.
        """
        self.log_metrics({f"final/{name}": value for name, value in metrics.items()}, step)
        self.log_metrics({"by_context_length/step_ms": metrics["step_ms"]}, context_length)
        self.save()

    def save(self) -> None:
        """Flushes. The parent would also write a hparams.yaml; our config.yaml is that."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Flushes. The parent would close the file at the end of fit, and the final metrics open another."""
        self.save()


class MetricsLogger(Callback):
    """Writes the curves of training, every `trainer.log_every_n_steps` steps and at the end.

    `step_ms` is the time of one optimiser step between two synchronisations with the device, after
    WARMUP_STEPS, without validation, logging, pictures or checkpoints.
    """

    WARMUP_STEPS = 5

    def __init__(self, hyperparameters: dict[str, float | str | None]):
        self.hyperparameters = hyperparameters
        self.step_ms_readings: list[float] = []  # one a logging interval
        self._warmup_ms = math.nan
        self.train_seconds = 0.0  # as step_ms: steps alone
        self.tokens = 0  # trained on, all ranks
        self.peak_memory_mb = math.nan  # of steps before the first validation, above what there was before training
        self._clock: float | None = None
        self._interval_seconds, self._interval_steps, self._interval_batches = 0.0, 0, 0
        self._loss_sum: Tensor | float = 0.0

    @property
    def step_ms(self) -> float:
        """Median over logging intervals after warm-up; in a run that is all warm-up, what there is."""
        return statistics.median(self.step_ms_readings or [self._warmup_ms])

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second of steps alone."""
        return self.tokens / self.train_seconds if self.train_seconds else math.nan

    # What a resumed run takes over: curves and summary go on as if it had never stopped.
    STATE = {
        "step_ms_readings": [Number(float, 0, 1e10)],
        "train_seconds": SECONDS,
        "tokens": COUNT,
        "peak_memory_mb": Number(float, -1e10, 1e10, or_nan=True),
        "_warmup_ms": Number(float, 0, 1e10, or_nan=True),
        "_interval_seconds": SECONDS,
        "_interval_steps": COUNT,
        "_interval_batches": COUNT,
        "_loss_sum": (float, Is("one number", lambda value: isinstance(value, Tensor) and value.ndim == 0)),
    }

    def state_dict(self) -> dict[str, Any]:
        """All that was counted so far."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Counts on from there."""
        for name in self.STATE:
            setattr(self, name, state[name])

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begins to watch the memory, and whether the process is stopped."""
        watch_stops()
        reset_peak_memory(trainer.strategy.root_device.type)
        self._memory_before_mb = memory_mb(trainer.strategy.root_device.type)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Writes the run's row of TensorBoard's table of hyperparameters; its metrics are the final/ scalars."""
        for logger in trainer.loggers if trainer.is_global_zero else ():  # other ranks have no file
            # Names only: the values are the scalars of these tags.
            metrics = {f"final/{name}": 0.0 for name in FINAL_METRICS}
            # TensorBoard takes the columns of all runs from any one of them: those without a value are named too.
            columns = {name: 0.0 if value is None else value for name, value in self.hyperparameters.items()}
            experiment, _, end = hparams(columns, metrics)
            _, start, _ = hparams(self.hyperparameters, metrics)
            for summary in (experiment, start, end):
                logger.experiment.file_writer.add_summary(summary)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Starts the clock, or goes on."""
        if self._clock is None:
            self._clock = _now(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch: Tensor, batch_idx: int
    ) -> None:
        """Counts the batch; writes where it is time."""
        self._loss_sum = self._loss_sum + module.last_loss
        self._interval_batches += 1
        self.tokens += batch.size(0) * (batch.size(1) - 1) * trainer.world_size
        if trainer.fit_loop._should_accumulate():  # only added to the gradient: no step yet
            return
        self._interval_steps += 1
        if trainer.global_step == self.WARMUP_STEPS:  # first steps allocate and compile: not a step's time
            self._stop_clock(trainer)
            self.train_seconds += self._interval_seconds
            self._warmup_ms = 1000 * self._interval_seconds / self._interval_steps
            self._interval_seconds, self._interval_steps = 0.0, 0
        if trainer.global_step % trainer.log_every_n_steps == 0 or run_progress(trainer) >= 1:
            self._stop_clock(trainer)
            self._write(trainer)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Stops the clock, and reads a step's memory: validation is not part of a step."""
        self._stop_clock(trainer)
        if math.isnan(self.peak_memory_mb) and trainer.state.fn == "fit":
            self.peak_memory_mb = peak_memory_mb(trainer.strategy.root_device.type) - self._memory_before_mb

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer) -> None:
        """Keeps the gradient norm of a step that will be written, before it is clipped."""
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])

    @contextmanager
    def clock_stopped(self, trainer: Trainer) -> Iterator[None]:
        """For what is not part of a step."""
        running = self._clock is not None
        self._stop_clock(trainer)
        yield
        if running:
            self._clock = _now(trainer)

    def _stop_clock(self, trainer: Trainer) -> None:
        if self._clock is not None:
            self._interval_seconds += _now(trainer) - self._clock
            self._clock = None

    def _write(self, trainer: Trainer) -> None:
        values = {
            "train/loss": float(self._loss_sum) / self._interval_batches,
            "train/tokens": self.tokens,
            "memory/mb": peak_memory_mb(trainer.strategy.root_device.type),
        }
        for group in trainer.optimizers[0].param_groups:
            values[f"lr/{group['name']}"] = group["lr"]
        if trainer.global_step % trainer.log_every_n_steps == 0:
            values["train/grad_norm"] = float(self.grad_norm)
        self.train_seconds += self._interval_seconds
        if self._interval_steps and self._interval_seconds:
            step_ms = 1000 * self._interval_seconds / self._interval_steps
            if trainer.global_step <= self.WARMUP_STEPS:
                self._warmup_ms = step_ms
            else:
                self.step_ms_readings.append(step_ms)
                values["speed/step_ms"] = step_ms
                values["speed/tokens_per_second"] = self.tokens_per_second
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
        self._interval_seconds, self._interval_steps, self._interval_batches = 0.0, 0, 0
        self._loss_sum = 0.0


def _now(trainer: Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return running_seconds()


class Progress(ProgressBar):
    """A bar where the output is a terminal, a line from time to time where it is not; and a line a validation.

    Args:
        enabled: False for no bar and no lines but the validations'.
    """

    SECONDS_BETWEEN_LINES = 10.0
    SECONDS_BETWEEN_REFRESHES = 0.2

    def __init__(self, metrics: MetricsLogger, enabled: bool = True):
        super().__init__()
        self._metrics = metrics
        self._enabled = enabled
        self._bar: tqdm | None = None
        self._shown = self._started = self._done_before = 0.0
        self._tokens_before = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Shows an empty bar."""
        self._started = self._shown = running_seconds()
        self._done_before, self._tokens_before = run_progress(trainer), self._metrics.tokens  # of a resumed run
        if self._enabled and trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar}| {desc}", leave=False, dynamic_ncols=True)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args) -> None:
        """Shows where the run is, if it is time."""
        now = running_seconds()
        pace = self.SECONDS_BETWEEN_REFRESHES if self._bar is not None else self.SECONDS_BETWEEN_LINES
        if now - self._shown < pace or not (self._enabled and trainer.is_global_zero):
            return
        self._shown, done = now, run_progress(trainer)
        newly_done = done - self._done_before
        left = (now - self._started) * (1 - done) / newly_done if newly_done > 0 else math.nan
        state = (
            f"step {trainer.global_step:,}  loss {float(module.last_loss):.3f}  "
            f"{(self._metrics.tokens - self._tokens_before) / (now - self._started):,.0f} tokens/s  "
            f"{_minutes(left)} left"
        )
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_description_str(state)
        else:
            logger.info(f"{done:4.0%}  {state}")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """One line a validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.is_global_zero:
            loss = module.validation
            cut = f" (only {loss['tokens']:,} tokens: out of time)" if trainer.val_dataloaders.cut else ""
            logger.info(
                f"step {trainer.global_step:,}: validation {loss['nats_per_token']:.3f} nats per token, "
                f"{loss['bits_per_byte']:.3f} bits per byte{cut}"
            )

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def disable(self) -> None:
        """Lightning asks for it on all devices but the first; there nothing is shown anyway."""

    def print(self, *args, **kwargs) -> None:
        """Lightning's own lines, above the bar."""
        logger.info(" ".join(map(str, args)))


class ProfilerReport(Callback):
    """Says what `trainer.profiler` has measured. Lightning would, to a logger of its own, which is silent here."""

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        """All of it; nothing without a profiler."""
        if trainer.is_global_zero and (report := trainer.profiler.summary()):
            logger.info(report)


def _minutes(seconds: float) -> str:
    return "?" if math.isnan(seconds) else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ValidationImages(Callback):
    """At every validation: attention maps of a fixed passage, scores of every head, and a few lines of writing.

    Args:
        passage: token ids of a validation passage. Heads are scored on it, up to the context, and its first
            TOKENS_DRAWN tokens are drawn.
    """

    PASSAGE_TOKENS = 256
    TOKENS_DRAWN = 32
    SAMPLING = SamplingConfig(max_new_tokens=100)

    def __init__(self, passage: list[int]):
        self.passage = passage

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Draws and writes, at the training step."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero or not trainer.loggers:
            return
        timer = budget_timer(trainer)
        if timer and timer.late():
            logger.info(f"no pictures at step {trainer.global_step:,}: the budget is nearly used up")
            return
        from analysis.attention_plot import draw_attention  # here: not every run draws

        network, writer, step = module.network, trainer.logger.experiment, trainer.global_step
        context_length = network.config.context_length
        passage = self.passage[:context_length]
        maps = attention_of(network, torch.tensor([passage]))  # (L, 1, H, T, T)
        drawn = passage[: self.TOKENS_DRAWN]  # what comes later changes nothing in the maps of the tokens before
        first_maps = maps[:, 0, :, : len(drawn), : len(drawn)].numpy()
        labels = token_labels(module.tokenizer, drawn)
        writer.add_image("attention", draw_attention(first_maps, labels, f"step {step:,}"), step, dataformats="HWC")
        if len(passage) > 1 and context_length > 3:  # else there is nothing to choose between
            repeated = repeated_sequences(torch.tensor(self.passage), context_length)
            log_head_scores(writer, step, maps, attention_of(network, repeated))

        start = self.passage[:1]
        text = module.tokenizer.decode(start + list(generate(network, start, self.SAMPLING)))
        # A code block, in which Markdown and HTML are text. Markdown counts \r as a new line too.
        writer.add_text("writing", "\n".join("    " + line for line in text.splitlines()), step)


def attention_of(network: GPT, ids: Tensor) -> Tensor:
    """The weights in every layer for ids (B, T): (L, B, H, T, T) on the CPU."""
    device = network.token_embedding.weight.device
    return torch.stack(network.attention_maps(ids.to(device))).float().cpu()


def log_head_scores(writer: SummaryWriter, step: int, maps: Tensor, repeated_maps: Tensor) -> None:
    """Writes one picture of the scores of all heads, and of each score the strongest head's as a curve."""
    from analysis.attention_plot import draw_head_scores

    scores = head_scores(maps, repeated_maps)
    T = maps.size(-1)
    names = {  # the picture's title of each score, and the value that gets the full colour
        "entropy": ("entropy, bits", math.log2(T)),
        "distance": ("tokens back", T / 2),
        "previous": ("previous token", 1.0),
        "first": ("first token", 1.0),
        "induction": ("induction", 1.0),
    }
    tables = {title: scores[name].numpy() for name, (title, _) in names.items()}
    writer.add_image("heads", draw_head_scores(tables, dict(names.values()), f"step {step:,}"), step, dataformats="HWC")
    for name, table in scores.items():
        if name == "entropy":  # the head that looks most narrowly
            writer.add_scalar("heads/entropy_min", table.min(), step)
        else:
            writer.add_scalar(f"heads/{name}_max", table.max(), step)
