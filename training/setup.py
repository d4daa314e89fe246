"""A run, put together: size, time, text, network, Trainer. train.py runs it."""

import inspect
import math
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

from lightning.pytorch import Callback, Trainer, seed_everything

from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.bfloat16 import BF16_MATMUL
from system.errors import UserError
from system.running_clock import running_seconds
from training.budget import measured_speed, time_allowed, time_to_train, whole_validation_seconds, with_recipe
from training.budget_timer import BudgetTimer
from training.callbacks import Metrics, ProfilerReport, Progress, RunLogger, Snapshots
from training.checkpointing import CheckpointFiles, KeepBest, KeepLast, StopOnSignal
from training.compile import compile_if_wanted
from training.config import OptimizerConfig, RunConfig
from training.datamodule import TextData
from training.initial_state import OldWeights, with_network_of
from training.lightning_module import GPTLightning
from training.optim import build_optimizer
from training.processes import Processes
from training.progress import RunTimer
from training.ranks import launcher
from training.resume import fixed_settings
from training.run_state import restorable_state
from training.trainer import batch_limits, build_trainer, expected_device, refuse_time_on_several_devices, resolve


@dataclass(frozen=True)
class Run:
    """All of a run but its directory and its Trainer."""

    config: RunConfig
    options: dict[str, Any]  # the Trainer's
    data: TextData
    module: GPTLightning
    metrics: Metrics
    timer: BudgetTimer | None  # None: something else than a budget ends it
    old: OldWeights | None
    began: float  # a reading of running_seconds(), earlier by what a resumed run has used before
    facts: dict[str, Any]  # what its checkpoints say of it
    picked: str  # what the budget picked

    @property
    def network(self) -> GPT:
        return self.module.network


def prepare(config: RunConfig, old: OldWeights | None, began: float) -> Run:
    """Decides size and time, reads the text, makes the network.

    Args:
        old: the weights it begins with; None: new ones.
        began: when the command did, a reading of running_seconds().

    Raises:
        UserError: settings that cannot work, alone, together, or with the old weights.
    """
    options = resolve(config.trainer)
    if str(config.compile).lower() == "true" and options["precision"] == BF16_MATMUL:
        if config.trainer["precision"] != "auto":
            raise UserError(
                f"trainer.precision={BF16_MATMUL} is for networks that are not compiled. Use compile=false, or "
                "trainer.precision=auto: 32-true if compiled."
            )
        options["precision"] = "32-true"
    budget, speed, picked = time_allowed(config), math.nan, ""
    before = old.run if old else {}
    began -= before.get("seconds", 0.0)
    if budget and not before.get("budget"):
        speed = measured_speed(expected_device(options), options["precision"])
    if old:
        config = config if old.goes_on else with_network_of(old, config)
    elif budget:
        config, picked = with_recipe(config, budget, running_seconds() - began, speed)
    seed_everything(config.seed, verbose=False)

    tokenizer = old.tokenizer(config) if old else None
    limits = batch_limits(options)
    data = TextData(config.data, config.tokenizer, config.model.context_length, config.seed, tokenizer, limits)
    data.prepare()
    network_config = replace(config.model, vocab_size=data.vocab_size)
    if old:
        old.refuse_other(network_config, data)
    network = GPT(network_config)
    if old:
        old.fit_into(network)
    timer = None
    if budget:
        about_timer = (
            budget.total_seconds(),
            len(data.val_tokens) - 1,
            options.get("min_steps"),
            options.get("min_epochs"),
        )
        if before.get("budget"):
            timer = BudgetTimer(*about_timer, max_time=time_with_other_budget(before, budget))
        else:
            spent, processor_s = running_seconds() - began, before.get("seconds", 0.0) + time.process_time()
            whole_s = whole_validation_seconds(network, len(data.val_tokens), speed)
            left = time_to_train(budget, spent, processor_s, whole_s).total_seconds()
            if left < 1:
                picked += (
                    f"\nstarting took {spent:.0f} s, in which this process had a processor for {processor_s:.0f} s: "
                    "the machine is busy, and the budget leaves time for a few steps"
                )
            timer = BudgetTimer(
                *about_timer,
                max_time=before.get("train_seconds", 0.0) + left,
                deadline=began + budget.total_seconds(),
                whole_seconds=whole_s,
                load=max(1.0, spent / processor_s),
            )
        data.out_of_time = timer.out_of_time
    facts = {
        "text": data.text_sha256,
        "budget": budget.total_seconds() if budget else None,
        "settings": fixed_settings(config),
    }
    module = GPTLightning(network, data.tokenizer, config.optimizer, config.seed)
    metrics = Metrics(hyperparameters(config, network))
    return Run(config, options, data, module, metrics, timer, old, began, facts, picked)


def build_parts(run: Run, run_dir: Path, stop_on_signal: StopOnSignal) -> Trainer:
    """The Trainer with everything that goes on beside training; the network is compiled where that pays."""
    checkpoints = run_dir / "checkpoints"
    callbacks = [
        run.metrics,
        Progress(run.metrics, enabled=run.options.get("enable_progress_bar", True)),
        ProfilerReport(),
        Snapshots(run.data.val_passage(Snapshots.PASSAGE_TOKENS).tolist()),
        stop_on_signal,
        KeepBest(checkpoints / "best.ckpt"),
        KeepLast(checkpoints / "last.ckpt", run.metrics, run.facts, run.began),
    ]
    trainer = trainer_in(run_dir, run.options, run.config.validations, run.data, callbacks, run.timer)
    refuse_time_on_several_devices(trainer, run.options)
    if run.old and run.old.goes_on:
        optimizer = build_optimizer(run.network, run.module.optimizer_config)
        state = restorable_state(run.old.content, trainer, optimizer, run.old.path)
        trainer.strategy.checkpoint_io.restorable = (run.old.path, state)
    if run.old:
        finished = (run_dir / "summary.json").exists()
        run.old.refuse_reached(trainer, run.config, len(run.data.train_dataloader()), finished)
    if trainer.world_size > 1 and not launcher():
        environment = trainer.strategy.cluster_environment
        trainer.strategy._launcher = Processes(environment, trainer.world_size, run_dir, run.config.overrides)
    precision = trainer.precision_plugin.forward_context()
    compile_if_wanted(run.network, run.config.compile, trainer.strategy.root_device, precision)
    return trainer


def trainer_in(
    run_dir: Path,
    options: dict[str, Any],
    validations: int,
    data: TextData,
    callbacks: list[Callback],
    timer: RunTimer | None = None,
) -> Trainer:
    """The Trainer of a run, or of a benchmark that looks at a part of one; its events go into `run_dir`."""
    data.trainer = build_trainer(
        options,
        validations,
        callbacks,
        timer,
        default_root_dir=run_dir,
        logger=RunLogger(run_dir),
        plugins=[CheckpointFiles()],
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    data.train_dataloader(), data.val_dataloader()  # again, for the errors of limits on as many devices
    return data.trainer


def time_with_other_budget(before: dict[str, Any], budget: timedelta) -> float:
    """Seconds of training in all: what the run was given, and what another budget adds or takes away.

    Args:
        before: what the run's checkpoint says of it.

    Raises:
        UserError: the new budget is used up already.
    """
    added = budget.total_seconds() - before["budget"]
    seconds = before["max_time"] + added
    if added < 0 and seconds <= before["train_seconds"]:
        least = before["budget"] - before["max_time"] + before["train_seconds"]
        raise UserError(
            f"budget={budget.total_seconds():g}s is used up: the run has trained for {before['train_seconds']:.0f} s. "
            f"Give more than {math.ceil(least)}s."
        )
    return seconds


def hyperparameters(config: RunConfig, network: GPT) -> dict[str, float | str | None]:
    """Every choice of the run as one flat row, for TensorBoard's table.

    A column has one type in all runs, that of its key, or TensorBoard could not sort it: text, or numbers and None
    where a run has none. True and False count as numbers.
    """
    groups = config.values()
    groups["model"] = asdict(network.config)
    types = {group: get_type_hints(kind) for group, kind in _DATACLASSES.items()}
    types["trainer"] = {name: key.annotation for name, key in inspect.signature(Trainer.__init__).parameters.items()}
    row = {name: groups[name] for name in ("seed", "validations")}
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
    """Whether a key takes numbers and None alone."""
    return all(kind in (int, float, bool, type(None)) for kind in get_args(annotation) or (annotation,))
