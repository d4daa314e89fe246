"""Where metrics, pictures and text of a run go: TensorBoard."""

from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger


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
