"""What Lightning needs to know to train a GPT: the loss, the validation, the optimizer and its schedule."""

import inspect
import math
from hashlib import blake2b
from typing import Any

import lightning.pytorch as pl
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.checkpoint import checkpoint_metadata
from data.batches import IGNORE
from data.tokenizer import token_bytes
from model.gpt import GPT
from system.errors import UserError
from training.config import OptimizerConfig
from training.optim import OPTIMIZERS, build_optimizer, warmup_stable_decay
from training.progress import run_progress


class GPTLightning(pl.LightningModule):
    """Next-token prediction with a GPT.

    Losses are in nats per token, and as bits per byte of text, which compares across tokenizers.
    """

    def __init__(self, network: GPT, tokenizer: tiktoken.Encoding, optimizer: OptimizerConfig, seed: int):
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.optimizer_config = optimizer
        self.seed = seed
        self.validation = {"nats_per_token": math.nan, "bits_per_byte": math.nan, "tokens": 0}  # the last one's
        self.register_buffer("token_bytes", torch.from_numpy(token_bytes(tokenizer)), persistent=False)  # (vocab_size,)
        self.last_loss = torch.tensor(math.nan)
        self._unchecked: tuple[int, Tensor] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute. Lightning notes some forty times a step which hook it is in; nn.Module is slow at that."""
        plain = name in ("_current_fx_name", "_progress", "last_loss")
        object.__setattr__(self, name, value) if plain else super().__setattr__(name, value)

    # Training

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch on the device: as it is, where it is there already. Lightning would still look into it."""
        there = isinstance(batch, Tensor) and batch.device == device
        return batch if there else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Learning rates follow the share of the run that is over, step by step."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._set_learning_rates()

    def _set_learning_rates(self) -> None:
        """Not by a scheduler: that asks for each group anew, in further hooks of Lightning's, at every step."""
        factor = warmup_stable_decay(self._progress, self.optimizer_config, run_progress(self.trainer, steps_ahead=1))
        for group, peak in zip(self.trainer.optimizers[0].param_groups, self.peak_lrs, strict=True):
            group["lr"] = peak * factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """batch (B, T + 1) of token ids -> mean loss in nats per token."""
        if self.network.config.drops:  # what is dropped depends on (seed, step, rank) alone
            place = f"{self.seed} {self.batches_done} {self.global_rank}"
            self.seed_device(int.from_bytes(blake2b(place.encode(), digest_size=7).digest(), "big"))
        inputs, targets = batch[:, :-1], batch[:, 1:]  # (B, T) each: every token predicts the next one
        loss = self.network.loss(inputs, targets)
        self.last_loss = loss.detach()
        self.check_finite_loss(self.last_loss)
        return loss

    def seed_device(self, seed: int) -> None:
        """Seeds the generators that this step draws from.

        torch.manual_seed would queue a call with a traceback for every kind of device that is missing here, at each
        step anew: a tenth of a short step's time, and memory that grows.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).manual_seed(seed)

    def check_finite_loss(self, loss: Tensor) -> None:
        """Stops the run at a loss that is no number. Raises UserError.

        On a CPU before the step is taken; elsewhere one step late, so that the device has work while we look.
        """
        step = self.global_step
        if loss.device.type != "cpu":
            (step, loss), self._unchecked = self._unchecked or (step, torch.zeros(())), (step, loss)
        if not math.isfinite(loss):
            if loss.device.type == "cpu":  # elsewhere the step with this loss has spoilt the weights meanwhile
                check_finite_weights(self)
            raise divergence_error("loss", loss.item(), step, self.optimizer_config)

    def on_train_batch_end(self, *args) -> None:
        """Sees how far the run is, for the next batch's learning rates, and whether it is over."""
        self._follow_progress()

    def _follow_progress(self) -> None:
        """Ends the run where its bound is reached, after one more validation: the last weights count too."""
        self._progress = run_progress(self.trainer)
        if self._progress >= 1:
            self.trainer.should_stop = True

    @property
    def batches_done(self) -> int:
        """Training batches of this run so far, on this rank, over all epochs and resumptions."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    # Validation

    def on_validation_epoch_start(self) -> None:
        """Starts the sums anew. No buffer: precision=bf16-true would round it, and other ranks overwrite it."""
        exact = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no float64
        self.val_sums = torch.zeros(3, dtype=exact, device=self.device)  # nats, tokens, bytes

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds up a batch of (B, T) inputs and targets; a target of IGNORE does not count."""
        inputs, targets = batch
        logits = self.network(inputs).float()  # (B, T, vocab_size)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE)
        counts = targets != IGNORE  # (B, T)
        num_bytes = (self.token_bytes[targets.clamp(min=0)] * counts).sum()
        self.val_sums += torch.stack([nats, counts.sum(), num_bytes]).to(self.val_sums.dtype)

    def on_validation_epoch_end(self) -> None:
        """Nats per token and bits per byte over the validation tokens of all ranks; logged if in training."""
        nats, tokens, num_bytes = self.trainer.strategy.reduce(self.val_sums, reduce_op="sum").tolist()
        bits_per_byte = nats / num_bytes / math.log(2)
        self.validation = {"nats_per_token": nats / tokens, "bits_per_byte": bits_per_byte, "tokens": int(tokens)}
        if self.trainer.state.fn == "fit":
            if not math.isfinite(nats):
                check_finite_weights(self)  # the last step spoilt them: before they go into a checkpoint
                raise divergence_error("validation loss", nats / tokens, self.global_step, self.optimizer_config)
            values = {
                "val/loss": self.validation["nats_per_token"],
                "val/bits_per_byte": self.validation["bits_per_byte"],
            }
            for logger in self.trainer.loggers:  # self.log would write one step too early
                logger.log_metrics(values, self.global_step)

    # Optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer, at its peak learning rates."""
        optimizer = build_optimizer(self.network, self.optimizer_config)
        self.peak_lrs = [group["lr"] for group in optimizer.param_groups]
        self._settings = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        return optimizer

    def on_train_start(self) -> None:
        """For a resumed run, which got its state back: the optimizer's settings are the config's; it may be over."""
        for group, settings in zip(self.optimizers().param_groups, self._settings, strict=True):
            group.update(settings)
        self._follow_progress()
        self._set_learning_rates()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer, optimizer_closure=None) -> None:
        """The step, and then the gradients go: Lightning would hold their memory until the next backward pass."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, *args) -> None:
        """Lightning's place for what `optimizer_step` has done."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clips if `trainer.gradient_clip_val` says so: Lightning goes a longer way to find that it does not."""
        if gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Adds all it takes to sample. Raises UserError where the weights are no numbers."""
        check_finite_weights(self)
        checkpoint["gpt"] = checkpoint_metadata(self.network.config, self.tokenizer, self.global_step, self.validation)


# In every step Lightning has Python inspect this method's parameters, which finds them here at once.
GPTLightning.training_step.__signature__ = inspect.signature(GPTLightning.training_step)


def divergence_error(what: str, value: float | str, step: int | str, config: OptimizerConfig) -> UserError:
    """The error that stops a run where something is no number."""
    rates = [f"optimizer.{key}" for key in OPTIMIZERS[config.name].learning_rates if getattr(config, key) is not None]
    return UserError(
        f"The {what} is {value} at step {step}, so training stopped; checkpoints written before are good. "
        f"Lower the learning rate ({', '.join(rates)}), set trainer.gradient_clip_val=1.0, or use "
        "trainer.precision=32-true."
    )


def check_finite_weights(module: GPTLightning) -> None:
    """Raises UserError for weights that are no numbers: a gradient was none.

    Looked for where it costs nothing a step: before weights are saved, and where a loss is no number. The loss shows
    it one step later; that of a row of an embedding only once the row's token comes again.
    """
    spoilt = [name for name, weight in module.network.named_parameters() if not weight.isfinite().all()]
    if spoilt:
        exact = [name for name in spoilt if not name.endswith("embedding.weight")]
        step = f"{module.global_step - 1}" + ("" if exact else " or before")
        raise divergence_error(f"gradient of {(exact or spoilt)[0]}", "no finite number", step, module.optimizer_config)
