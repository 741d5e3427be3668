"""The configuration of the supervised apps: fine-tuning, reward models and preference training."""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ds_engine import EngineConfig, OptimConfig
from rl_core import BatchConfig
from rl_data import DataConfig
from run_kit import TrackingConfig

from .config import BUILTIN_MODEL, ModelConfig, PreferenceTaskSize, TaskSize, TrainedModel, TrainingConfig
from .training.supervised_config import FineTuningConfig, LearningRates, PreferenceTrainingConfig, SupervisedConfig

ExampleKind = Literal["demonstrations", "pairs", "labeled"]
"""What a supervised run learns from."""


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
    """Demonstrations (or pairs) per micro batch of a GPU, instead of `token_budget`."""
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
                raise ValueError(f"data.{name} is given; allowed: its default, because {_COLUMNS[self.examples]}")
        if self.engine.optim != OptimConfig():
            raise ValueError("engine.optim is given; allowed: its defaults; the optimizer is supervised.optim")
        self._check_best()

    def _check_best(self) -> None:
        """A checkpoint is compared by what its own step measured."""
        trainer = self.trainer
        if not trainer.keep_best or not trainer.best_metric.startswith("val/"):
            return
        if not self.holds_out:
            raise ValueError(
                f"trainer.keep_best is {trainer.keep_best}; allowed: 0 without held-out {self.noun} "
                "(supervised.val_files or val_size), which best_metric needs"
            )
        if trainer.test_freq < 1 or trainer.save_freq % trainer.test_freq:
            raise ValueError(
                f"trainer.keep_best is {trainer.keep_best}; allowed: 0, unless test_freq ({trainer.test_freq}) divides "
                f"save_freq ({trainer.save_freq}), so that every checkpoint has its {trainer.best_metric}"
            )

    @property
    def models(self) -> tuple[TrainedModel, ...]:
        """The trained model."""
        return (TrainedModel(section="engine", engine=self.engine),)

    @property
    def examples(self) -> ExampleKind:
        """What the run learns from."""
        return "demonstrations"

    @property
    def noun(self) -> str:
        """The examples in words."""
        return "labeled responses" if self.examples == "labeled" else self.examples

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out examples."""
        return bool(self.supervised.val_files or self.supervised.val_size)

    @property
    def first_stage(self) -> SupervisedConfig:
        """The warm start before the run's own steps."""
        return SupervisedConfig()

    @property
    def learning_rates(self) -> LearningRates:
        """What `supervised.optim.lr=null` becomes."""
        return self.supervised.learning_rates

    @property
    def batch(self) -> BatchConfig:
        """The limits of a micro batch."""
        return BatchConfig(token_budget=self.token_budget, micro_batch_size=self.micro_batch_size)


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
        if self.is_builtin and self.supervised.val_size:
            raise ValueError(
                f"supervised.val_size is {self.supervised.val_size}; allowed: 0 with the built-in model, whose task "
                "has held-out pairs of its own (task.num_val_pairs)"
            )

    @property
    def is_builtin(self) -> bool:
        """Whether the run trains the built-in model on the built-in task."""
        return self.model.path == BUILTIN_MODEL

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out examples."""
        return self.is_builtin or super().holds_out

    @property
    def examples(self) -> ExampleKind:
        """What the run learns from."""
        return "pairs"

    @property
    def first_stage(self) -> SupervisedConfig:
        """The warm start before the run's own steps."""
        return self.warm_start


SupervisedJobConfigT = TypeVar("SupervisedJobConfigT", bound=SupervisedJobConfig)
