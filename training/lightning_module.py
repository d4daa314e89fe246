"""The LightningModule: loss, validation, optimizer and learning-rate schedule of a GPT."""

import math
from functools import partial
from hashlib import blake2b
from typing import Any

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from checkpoint.checkpoint import checkpoint_metadata
from data.batches import IGNORE_INDEX
from data.tokenizer import token_bytes
from model.gpt import GPT
from system.errors import UserError
from training.config import OptimizerConfig
from training.lightning_overhead import LowOverheadModule, cached_signature
from training.lr_scheduler import WarmupStableDecay
from training.optim import OPTIMIZERS, build_optimizer
from training.progress import run_progress


class GPTLightning(LowOverheadModule):
    """Next-token prediction with a GPT.

    Losses are in nats per token, and in bits per byte of text, which can be compared across tokenizers.
    """

    def __init__(self, network: GPT, tokenizer: tiktoken.Encoding, optimizer: OptimizerConfig, seed: int):
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.optimizer_config = optimizer
        self.seed = seed
        self.validation = {"nats_per_token": math.nan, "bits_per_byte": math.nan, "tokens": 0}  # of the last validation
        self.register_buffer("token_bytes", torch.from_numpy(token_bytes(tokenizer)), persistent=False)  # (vocab_size,)
        self.last_loss = torch.tensor(math.nan)
        self._unchecked: tuple[int, Tensor] | None = None

    # Training

    @cached_signature
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """batch (B, T + 1) of token ids -> mean loss in nats per token."""
        if self.network.config.has_dropout:  # dropout depends on (seed, batch, rank) alone, so a resumed run repeats it
            position = f"{self.seed} {self.batches_done} {self.global_rank}"
            self.seed_device(int.from_bytes(blake2b(position.encode(), digest_size=7).digest(), "big"))
        inputs, targets = batch[:, :-1], batch[:, 1:]  # (B, T) each: every token predicts the next one
        loss = self.network.loss(inputs, targets)
        self.last_loss = loss.detach()
        self.check_finite_loss(self.last_loss)
        return loss

    def seed_device(self, seed: int) -> None:
        """Seeds the random generators of the CPU and of the device that trains.

        torch.manual_seed would also queue a call, with its traceback, for each type of device that is not there: in
        every step, which takes a tenth of a short step's time and memory that grows.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).manual_seed(seed)

    def check_finite_loss(self, loss: Tensor) -> None:
        """Raises UserError for a loss that is not finite.

        On a CPU this happens before the weights are updated; elsewhere one step later, so that reading the loss does
        not make the device wait.
        """
        step = self.global_step
        if loss.device.type != "cpu":
            (step, loss), self._unchecked = self._unchecked or (step, torch.zeros(())), (step, loss)
        if not math.isfinite(loss):
            if loss.device.type == "cpu":  # elsewhere the weights were updated with this loss already
                check_finite_weights(self)
            raise divergence_error("loss", loss.item(), step, self.optimizer_config)

    def on_train_batch_end(self, *args) -> None:
        """Sets the learning rates of the next step; stops training at the end of the run."""
        if not self.trainer.fit_loop._should_accumulate():
            self.lr_schedulers().step()
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        """Lightning validates once more before it stops, so that the last weights count too."""
        if run_progress(self.trainer) >= 1:
            self.trainer.should_stop = True

    @property
    def batches_done(self) -> int:
        """Number of batches that this rank has trained on, including those before the run was resumed."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    # Validation

    def on_validation_epoch_start(self) -> None:
        """Resets the sums. They are not a buffer, which precision=bf16-true would round and DDP would synchronize."""
        exact = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no float64
        self.val_sums = torch.zeros(3, dtype=exact, device=self.device)  # nats, tokens, bytes

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Adds the loss of a batch of (B, T) inputs and targets to the sums; IGNORE_INDEX targets are ignored."""
        inputs, targets = batch
        logits = self.network(inputs).float()  # (B, T, vocab_size)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
        counts = targets != IGNORE_INDEX  # (B, T)
        num_bytes = (self.token_bytes[targets.clamp(min=0)] * counts).sum()
        self.val_sums += torch.stack([nats, counts.sum(), num_bytes]).to(self.val_sums.dtype)

    def on_validation_epoch_end(self) -> None:
        """Computes nats per token and bits per byte over the tokens of all ranks, and logs them during training."""
        nats, tokens, num_bytes = self.trainer.strategy.reduce(self.val_sums, reduce_op="sum").tolist()
        bits_per_byte = nats / num_bytes / math.log(2)
        self.validation = {"nats_per_token": nats / tokens, "bits_per_byte": bits_per_byte, "tokens": int(tokens)}
        if self.trainer.state.fn == "fit":
            if not math.isfinite(nats):
                check_finite_weights(self)  # names the step, and keeps the weights out of a checkpoint
                raise divergence_error("validation loss", nats / tokens, self.global_step, self.optimizer_config)
            values = {
                "Loss/validation": self.validation["nats_per_token"],
                "Loss/validation_bits_per_byte": self.validation["bits_per_byte"],
            }
            for logger in self.trainer.loggers:  # self.log would log the step before
                logger.log_metrics(values, self.global_step)

    # Optimizer

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer, and the schedule that its learning rates follow at every step."""
        optimizer = build_optimizer(self.network, self.optimizer_config)
        scheduler = WarmupStableDecay(optimizer, self.optimizer_config, partial(run_progress, self.trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """A resumed run has its state only now: its learning rates follow from it, and it may be at its end."""
        self.lr_schedulers().step()
        self._stop_if_done()

    def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any) -> None:
        """Does nothing: Lightning calls it before the timer has seen the step, `on_train_batch_end` after that."""

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Adds what sampling needs. Raises UserError if a weight is not finite."""
        check_finite_weights(self)
        checkpoint["gpt"] = checkpoint_metadata(self.network.config, self.tokenizer, self.global_step, self.validation)


def divergence_error(what: str, value: float | str, step: int | str, config: OptimizerConfig) -> UserError:
    """The error for a loss or gradient that is not finite, with what to change."""
    rates = [f"optimizer.{key}" for key in OPTIMIZERS[config.name].learning_rates if getattr(config, key) is not None]
    return UserError(
        f"The {what} is {value} at step {step}, so training stopped; earlier checkpoints are good. "
        f"Lower the learning rate ({', '.join(rates)}), set trainer.gradient_clip_val=1.0, or use "
        "trainer.precision=32-true."
    )


def check_finite_weights(module: GPTLightning) -> None:
    """Raises UserError if a weight is not finite, because a gradient was not.

    Checked before weights are saved and after a loss that is not finite, not in every step. The loss shows it one step
    after the gradient; for a row of an embedding, only when its token occurs again.
    """
    not_finite = [name for name, weight in module.network.named_parameters() if not weight.isfinite().all()]
    if not_finite:
        exact = [name for name in not_finite if not name.endswith("embedding.weight")]
        step = f"{module.global_step - 1}" + ("" if exact else " or before")
        raise divergence_error(f"gradient of {(exact or not_finite)[0]}", "not finite", step, module.optimizer_config)
