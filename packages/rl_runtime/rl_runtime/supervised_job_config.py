"""The configuration of the supervised apps: fine-tuning, reward models and preference training."""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ds_engine import EngineConfig, OptimConfig
from rl_core import BatchConfig
from rl_data import DataConfig
from run_kit import TrackingConfig

from .config import (
    BUILTIN_MODEL,
    PreferenceTaskSize,
    TrainedModel,
    TrainingConfig,
    check_unserved,
)
from .job_config import InputsConfig
from .rules import check_at_least, check_value
from .training.supervised_config import FineTuningConfig, LearningRates, PreferenceTrainingConfig, SupervisedConfig

ExampleKind = Literal["demonstrations", "pairs", "labeled"]
"""Kind of the examples of a supervised run."""


@dataclass(frozen=True, kw_only=True)
class SupervisedJobConfig(InputsConfig):
    """Model, demonstrations, engine and ranks of supervised fine-tuning."""

    data: DataConfig = field(default_factory=DataConfig)
    """The rendering of prompts; the files are those of `supervised`."""
    supervised: FineTuningConfig = field(default_factory=FineTuningConfig)
    token_budget: int | None = None
    """Maximum packed tokens (prompt + response) per micro batch of a GPU; a longer sequence gets a micro batch of its
    own. Gradients of the micro batches of a step are accumulated. null: chosen by memory, 16,384 on the CPU."""
    micro_batch_size: int | None = None
    """Demonstrations (or pairs) per micro batch of a GPU, instead of `token_budget`."""
    share_prefixes: bool = True
    """Compute tokens with which several sequences of a micro batch begin (the prompt of a pair) once."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine; its optimizer is `supervised.optim`."""
    trainer: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(experiment="sft", best_metric="val/loss", best_mode="min")
    )
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        check_at_least(1, self, "token_budget", "micro_batch_size")
        is_one = self.token_budget is None or self.micro_batch_size is None
        check_value(self, "token_budget", is_one, f"null with micro_batch_size ({self.micro_batch_size})")
        for name, instead in (("train", "files"), ("val", "val_files")):
            check_value(self, f"data.{name}", not getattr(self.data, name), "none", remedy=f"give supervised.{instead}")
        for name in ("columns", "extra_columns", "max_val_prompts"):
            is_default = getattr(self.data, name) == getattr(DataConfig(), name)
            check_value(self, f"data.{name}", is_default, "its default", problem=_COLUMNS[self.examples])
        is_default = self.engine.optim == OptimConfig()
        check_value(self, "engine.optim", is_default, "its defaults", remedy="the optimizer is supervised.optim")
        check_unserved(self, "engine")
        self._check_best()

    def _check_best(self) -> None:
        """A checkpoint is compared by what its own step measured."""
        trainer = self.trainer
        if not trainer.keep_best or not trainer.best_metric.startswith("val/"):
            return
        allowed = f"0 without held-out {self.noun} (supervised.val_files or val_size), which best_metric needs"
        check_value(self, "trainer.keep_best", self.holds_out, allowed)
        is_measured = trainer.test_freq >= 1 and trainer.save_freq % trainer.test_freq == 0
        problem = f"not every checkpoint has its {trainer.best_metric}"
        allowed = f"0, unless test_freq ({trainer.test_freq}) divides save_freq ({trainer.save_freq})"
        check_value(self, "trainer.keep_best", is_measured, allowed, problem=problem)

    @property
    def models(self) -> tuple[TrainedModel, ...]:
        """The trained model."""
        return (TrainedModel(section="engine", engine=self.engine),)

    @property
    def examples(self) -> ExampleKind:
        """Kind of the examples."""
        return "demonstrations"

    @property
    def noun(self) -> str:
        """The examples in words."""
        return "labeled responses" if self.examples == "labeled" else self.examples

    @property
    def holds_out(self) -> bool:
        """True if there are held-out examples."""
        return bool(self.supervised.val_files or self.supervised.val_size)

    @property
    def first_stage(self) -> SupervisedConfig:
        """The warm start before the run's own steps."""
        return SupervisedConfig()

    @property
    def learning_rates(self) -> LearningRates:
        """The choices for `supervised.optim.lr=null`."""
        return self.supervised.learning_rates

    @property
    def batch(self) -> BatchConfig:
        """The limits of a micro batch."""
        return BatchConfig(
            token_budget=self.token_budget,
            micro_batch_size=self.micro_batch_size,
            share_prefixes=self.share_prefixes,
        )


_OF_PREFERENCES = "preferences have columns of fixed names: question or prompt, chosen and rejected"
_COLUMNS: dict[ExampleKind, str] = {
    "demonstrations": "demonstrations have columns of fixed names: question and answer, messages, prompt and "
    "completion, or text",
    "pairs": _OF_PREFERENCES,
    "labeled": f"{_OF_PREFERENCES}, or prompt, completion and label",
}


@dataclass(frozen=True, kw_only=True)
class PreferenceJobConfig(SupervisedJobConfig):
    """Model, preferences, engine and ranks of a reward model or of preference training."""

    task: PreferenceTaskSize = field(default_factory=PreferenceTaskSize)
    warm_start: SupervisedConfig = field(default_factory=SupervisedConfig)
    """Supervised fine-tuning before the run's own steps, for a model that does not know the task yet."""
    supervised: PreferenceTrainingConfig = field(default_factory=PreferenceTrainingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_read = not self.is_builtin or not self.supervised.val_size
        allowed = "0 with the built-in model, whose task has held-out pairs of its own (task.num_val_pairs)"
        check_value(self, "supervised.val_size", is_read, allowed)

    @property
    def is_builtin(self) -> bool:
        """True if the run trains the built-in model on the built-in task."""
        return self.model.path == BUILTIN_MODEL

    @property
    def holds_out(self) -> bool:
        """True if there are held-out examples."""
        return self.is_builtin or super().holds_out

    @property
    def examples(self) -> ExampleKind:
        """Kind of the examples."""
        return "pairs"

    @property
    def first_stage(self) -> SupervisedConfig:
        """The warm start before the run's own steps."""
        return self.warm_start


SupervisedJobConfigT = TypeVar("SupervisedJobConfigT", bound=SupervisedJobConfig)
