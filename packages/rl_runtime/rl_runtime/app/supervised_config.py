"""The configuration of a supervised fine-tuning app."""

from dataclasses import dataclass, field
from typing import TypeVar

from ds_engine import EngineConfig, OptimConfig
from rl_core import BatchConfig
from rl_data import DataConfig
from run_kit import TrackingConfig

from ..config import FineTuningConfig, ModelConfig, TaskSize, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SupervisedJobConfig:
    """Model, demonstrations, engine and ranks of supervised fine-tuning."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    """How prompts are rendered; the files are those of `supervised`."""
    task: TaskSize = field(default_factory=TaskSize)
    supervised: FineTuningConfig = field(default_factory=FineTuningConfig)
    token_budget: int | None = None
    """Maximum packed tokens (prompt + response) per micro batch of a GPU; a longer sequence gets a micro batch of its
    own. Gradients of the micro batches of a step are accumulated. null: chosen by memory, 16,384 on the CPU."""
    micro_batch_size: int | None = None
    """Demonstrations per micro batch of a GPU, instead of `token_budget`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine; its optimizer is `supervised.optim`."""
    trainer: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(experiment="sft", best_metric="val/loss", best_mode="min")
    )
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        for name in ("token_budget", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 or more, or null")
        if self.token_budget is not None and self.micro_batch_size is not None:
            raise ValueError(
                f"token_budget is {self.token_budget}; allowed: null with micro_batch_size ({self.micro_batch_size})"
            )
        for name, instead in (("train", "files"), ("val", "val_files")):
            if files := getattr(self.data, name):
                raise ValueError(f"data.{name} is {list(files)}; allowed: empty; name them in supervised.{instead}")
        for name in ("columns", "extra_columns", "max_val_prompts"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                raise ValueError(
                    f"data.{name} is given; allowed: its default, because demonstrations have columns of fixed names: "
                    "question and answer, messages, prompt and completion, or text"
                )
        if self.engine.optim != OptimConfig():
            raise ValueError("engine.optim is given; allowed: its defaults; the optimizer is supervised.optim")
        self._check_best()

    def _check_best(self) -> None:
        """A checkpoint is compared by what its own step measured."""
        trainer = self.trainer
        if not trainer.keep_best or not trainer.best_metric.startswith("val/"):
            return
        if not (self.supervised.val_files or self.supervised.val_size):
            raise ValueError(
                f"trainer.keep_best is {trainer.keep_best}; allowed: 0 without held-out demonstrations "
                "(supervised.val_files or val_size), which best_metric needs"
            )
        if trainer.test_freq < 1 or trainer.save_freq % trainer.test_freq:
            raise ValueError(
                f"trainer.keep_best is {trainer.keep_best}; allowed: 0, unless test_freq ({trainer.test_freq}) divides "
                f"save_freq ({trainer.save_freq}), so that every checkpoint has its {trainer.best_metric}"
            )

    @property
    def batch(self) -> BatchConfig:
        """The limits of a micro batch."""
        return BatchConfig(token_budget=self.token_budget, micro_batch_size=self.micro_batch_size)


SupervisedJobConfigT = TypeVar("SupervisedJobConfigT", bound=SupervisedJobConfig)
