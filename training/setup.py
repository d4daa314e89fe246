"""Builds a run from its config: network size, time, text, network, Trainer. train.py runs it."""

import inspect
import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lightning.pytorch import Callback, Trainer, seed_everything

from analysis import recording
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.bfloat16 import BF16_MATMUL
from system.errors import UserError
from system.files import relative
from system.running_clock import running_seconds
from training.budget import apply_recipe, full_validation_seconds, measured_speed, total_budget, training_time
from training.budget_timer import BudgetTimer
from training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from training.callbacks.graceful_stop import GracefulStop
from training.callbacks.metrics_logger import MetricsLogger
from training.callbacks.profiler_report import ProfilerReport
from training.callbacks.progress_bar import RunProgressBar
from training.callbacks.validation_images import ValidationImages, num_sample_tokens
from training.checkpointing import AtomicCheckpointIO, remove_stale_checkpoints
from training.compile import maybe_compile
from training.config import OptimizerConfig, RunConfig, keys_of
from training.datamodule import TextDataModule
from training.initial_state import InitialState, with_network_of
from training.lightning_module import GPTLightning
from training.loggers import RunLogger, build_loggers
from training.optim import build_optimizer
from training.processes import ProcessLauncher
from training.progress import RunTimer
from training.ranks import launcher
from training.resume import fixed_settings
from training.run_state import restorable_state
from training.trainer import batch_limits, build_trainer, check_time_bounds, expected_device, resolve_trainer_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Everything about a run except its directory and its Trainer."""

    config: RunConfig
    options: dict[str, Any]  # of the Trainer
    data: TextDataModule
    module: GPTLightning
    metrics: MetricsLogger
    timer: BudgetTimer | None  # None: the run has no budget
    initial_state: InitialState | None
    started_at: float  # reading of running_seconds(); for a resumed run, earlier by the time used before
    metadata: dict[str, Any]  # goes into its checkpoints
    budget_summary: str  # what the budget has picked

    @property
    def network(self) -> GPT:
        return self.module.network


def prepare_run(config: RunConfig, initial_state: InitialState | None, started_at: float) -> Run:
    """Decides the size of the network and the training time, reads the text, and builds the network.

    Args:
        initial_state: checkpoint to start from; None: new weights.
        started_at: start of the command, as a reading of running_seconds().

    Raises:
        UserError: invalid settings, or settings that do not fit each other or the checkpoint.
    """
    options = resolve_trainer_options(config.trainer)
    if str(config.compile).lower() == "true" and options["precision"] == BF16_MATMUL:
        if config.trainer["precision"] != "auto":
            raise UserError(
                f"trainer.precision={BF16_MATMUL} is for networks that are not compiled. Use compile=false or "
                "trainer.precision=auto, which is 32-true with compile=true."
            )
        options["precision"] = "32-true"
    budget, speed, budget_summary = total_budget(config), math.nan, ""
    before = initial_state.run if initial_state else {}
    started_at -= before.get("seconds", 0.0)
    if budget and not before.get("budget"):
        speed = measured_speed(expected_device(options), options["precision"])
    if initial_state:
        config = config if initial_state.is_resume else with_network_of(initial_state, config)
    elif budget:
        config, budget_summary = apply_recipe(config, budget, running_seconds() - started_at, speed)
    seed_everything(config.seed, verbose=False)

    tokenizer = initial_state.tokenizer(config) if initial_state else None
    limits = batch_limits(options)
    data = TextDataModule(config.data, config.tokenizer, config.model.context_length, config.seed, tokenizer, limits)
    data.prepare()
    network_config = replace(config.model, vocab_size=data.vocab_size)
    if initial_state:
        initial_state.check_matches(network_config, data)
    network = GPT(network_config)
    if initial_state:
        initial_state.load_into(network)
    timer = None
    if budget:
        timer_args = (
            budget.total_seconds(),
            len(data.val_tokens) - 1,
            options.get("min_steps"),
            options.get("min_epochs"),
        )
        if before.get("budget"):
            timer = BudgetTimer(*timer_args, max_time=time_with_other_budget(before, budget))
        else:
            spent, processor_s = running_seconds() - started_at, before.get("seconds", 0.0) + time.process_time()
            whole_s = full_validation_seconds(network, len(data.val_tokens), speed)
            left = training_time(budget, spent, processor_s, whole_s).total_seconds()
            if left < 1:
                budget_summary += (
                    f"\nthe start took {spent:.0f} s, of which this process used a processor for {processor_s:.0f} s: "
                    "the machine is busy, and the budget leaves time for only a few steps"
                )
            timer = BudgetTimer(
                *timer_args,
                max_time=before.get("train_seconds", 0.0) + left,
                deadline=started_at + budget.total_seconds(),
                whole_seconds=whole_s,
                load=max(1.0, spent / processor_s),
            )
        data.out_of_time = timer.out_of_time
    metadata = {
        "text": data.text_sha256,
        "budget": budget.total_seconds() if budget else None,
        "settings": fixed_settings(config),
    }
    module = GPTLightning(network, data.tokenizer, config.optimizer, config.seed)
    metrics = MetricsLogger(hyperparameters(config, network), varied_keys(config))
    return Run(config, options, data, module, metrics, timer, initial_state, started_at, metadata, budget_summary)


def build_run_trainer(run: Run, run_dir: Path, graceful_stop: GracefulStop) -> Trainer:
    """Builds the Trainer with its callbacks, restores the state of a resumed run, and compiles the network."""
    checkpoints = run_dir / "checkpoints"
    run.metrics.recorded_in = run_dir
    callbacks = [
        run.metrics,
        RunProgressBar(run.metrics, enabled=run.options.get("enable_progress_bar", True)),
        ProfilerReport(),
        validation_images(run.data, run.network.config, run.metrics, run.started_at),
        graceful_stop,
        BestCheckpoint(checkpoints / "best.ckpt"),
        LastCheckpoint(checkpoints / "last.ckpt", run.metrics, run.metadata, run.started_at),
    ]
    loggers = build_loggers(run.config.logger, run_dir)
    trainer = make_trainer(run_dir, run.options, run.config.num_validations, run.data, callbacks, run.timer, loggers)
    check_time_bounds(trainer, run.options)
    if run.initial_state and run.initial_state.is_resume:
        optimizer = build_optimizer(run.network, run.module.optimizer_config)
        state = restorable_state(run.initial_state.content, trainer, optimizer, run.initial_state.path)
        trainer.strategy.checkpoint_io.restorable = (run.initial_state.path, state)
    if run.initial_state:
        finished = (run_dir / "summary.json").exists()
        run.initial_state.check_bounds(trainer, run.config, len(run.data.train_dataloader()), finished)
    if trainer.world_size > 1 and not launcher():
        environment = trainer.strategy.cluster_environment
        trainer.strategy._launcher = ProcessLauncher(environment, trainer.world_size, run_dir, run.config.overrides)
    precision = trainer.precision_plugin.forward_context()
    maybe_compile(run.network, run.config.compile, trainer.strategy.root_device, precision)
    return trainer


def validation_images(
    data: TextDataModule, config: GPTConfig, metrics: MetricsLogger, started_at: float = 0.0
) -> ValidationImages:
    """The callback that draws, with its passage and its sample of the validation split."""
    passage = data.val_passage(ValidationImages.PASSAGE_TOKENS).tolist()
    sample = data.val_sample(num_sample_tokens(config, data.val_dataloader().num_predicted))
    return ValidationImages(passage, sample, metrics, started_at)


def rewind_run_dir(run: Run, run_dir: Path, trainer: Trainer) -> None:
    """Removes from the directory of a resumed run what was written after its checkpoint, and logs what is changed."""
    step = run.initial_state.step if run.initial_state else 0
    (run_dir / "summary.json").unlink(missing_ok=True)
    for log in trainer.loggers:
        log.rewind(run.initial_state.step if run.initial_state else -1)
    recording.rewind(run_dir, run.initial_state.step if run.initial_state else -1)
    resumed = run.config.resumed
    remove_stale_checkpoints(run_dir / "checkpoints", resumed.checkpoint, run.network, run.data.tokenizer)
    changes = f"; changed: {', '.join(resumed.changes)}" if resumed.changes else ""
    logger.info(f"resuming {relative(run_dir)} at step {step:,}{changes}")


def make_trainer(
    run_dir: Path,
    options: dict[str, Any],
    num_validations: int,
    data: TextDataModule,
    callbacks: list[Callback],
    timer: RunTimer | None = None,
    loggers: list[RunLogger] | None = None,
) -> Trainer:
    """Builds the Trainer of a run or of a benchmark. `loggers`: None for TensorBoard."""
    data.trainer = build_trainer(
        options,
        num_validations,
        callbacks,
        timer,
        default_root_dir=run_dir,
        logger=build_loggers({"tensorboard": {}}, run_dir) if loggers is None else loggers,
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    data.train_dataloader(), data.val_dataloader()  # again, because their checks depend on the number of devices
    return data.trainer


def time_with_other_budget(before: dict[str, Any], budget: timedelta) -> float:
    """Total seconds of training of a run that is resumed with another budget.

    Args:
        before: entry "run" of the checkpoint.

    Raises:
        UserError: the new budget is already used up.
    """
    added = budget.total_seconds() - before["budget"]
    seconds = before["max_time"] + added
    if added < 0 and seconds <= before["train_seconds"]:
        least = before["budget"] - before["max_time"] + before["train_seconds"]
        raise UserError(
            f"budget={budget.total_seconds():g}s is used up: the run has trained for {before['train_seconds']:.0f} s. "
            f"Use more than {math.ceil(least)}s."
        )
    return seconds


def varied_keys(config: RunConfig) -> frozenset[str]:
    """The hyperparameters that are swept over or, in a single run, set on the command line."""
    settings = config.sweep_job.settings.split(",") if config.sweep_job else config.overrides
    keys = keys_of(settings) & config.overridden_keys
    groups = {f"{group}." for group in keys & set(_DATACLASSES)}  # such as model, in a sweep over model=gpt2,llama
    return keys | {key for key in config.explicit_keys if key.startswith(tuple(groups))}


def hyperparameters(config: RunConfig, network: GPT) -> dict[str, float | str | None]:
    """All settings of the run as one flat dictionary, for the table of hyperparameters.

    A key has one type in all runs, or TensorBoard could not sort the column: text, or numbers and None. True and False
    count as numbers.
    """
    groups = config.values()
    groups["model"] = asdict(network.config)
    types = {group: get_type_hints(kind) for group, kind in _DATACLASSES.items()}
    types["trainer"] = {name: key.annotation for name, key in inspect.signature(Trainer.__init__).parameters.items()}
    row = {name: groups[name] for name in ("seed", "num_validations", "kernels")}
    row |= {name: str(groups[name]) for name in ("compile", "budget")}
    row["parameters"] = network.num_parameters()
    for group in types:
        for name, value in groups[group].items():
            if _is_number(types[group][name]):
                row[f"{group}.{name}"] = None if value is None else float(value)
            else:
                row[f"{group}.{name}"] = "null" if value is None else str(value)
    return row


_DATACLASSES = {"model": GPTConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optimizer": OptimizerConfig}


def _is_number(annotation: Any) -> bool:
    """Whether a key only takes numbers and None."""
    return all(kind in (int, float, bool, type(None)) for kind in get_args(annotation) or (annotation,))
