"""Configuration of `apps.evaluate.main`."""

from dataclasses import dataclass, field

from rl_runtime import InputsConfig
from rl_runtime.config import check_run_name
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.scoring_config import ScoringConfig
from rl_runtime.rules import check_at_least, check_value
from rollout_vllm import RolloutConfig, SamplingConfig
from weight_sync import SyncConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointsConfig:
    """Checkpoints that one command evaluates, all on the same servers."""

    folder: str | None = None
    """A run folder of an app (`outputs/grpo_...`) with checkpoints; null: the model at `model.path`."""
    steps: tuple[int, ...] = ()
    """Steps to evaluate, as in `checkpoints.steps=[100,200]`; empty: all."""
    newest: bool = False
    """Evaluate the newest checkpoint only."""

    def __post_init__(self) -> None:
        needs_folder = bool(self.steps) or self.newest
        check_value(self, "folder", self.folder is not None or not needs_folder, "a run folder, with steps or newest")
        check_value(self, "newest", not (self.steps and self.newest), "false with steps")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(InputsConfig):
    """Evaluation on held-out prompts: pass@k, mean@n and maj@n with bootstrap intervals over the prompts."""

    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    reward: ScoringConfig = field(default_factory=ScoringConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1, max_tokens=1024))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(log_probs=False))
    sync: SyncConfig = field(default_factory=SyncConfig)
    pass_at: tuple[int, ...] = ()
    """The k of pass@k, each at most `sampling.n`; empty: powers of two up to n, and n."""
    confidence: float = 0.95
    """Confidence of the bootstrap intervals."""
    num_resamples: int = 10_000
    """Bootstrap resamples of the prompts."""
    seed: int = 1
    """Seed of sampling and of the bootstrap; each model of a sweep samples with the same seeds."""
    experiment: str = "evaluate"
    """Name of the evaluation; its folder is `<output_dir>/<experiment>_<timestamp>`."""
    output_dir: str = "outputs"
    """Parent of the folders of evaluations."""
    private_output: bool = True
    """Only this user can enter the folder (mode 0700); false: as the umask allows."""

    def __post_init__(self) -> None:
        are_counts = all(1 <= k <= self.sampling.num_samples for k in self.pass_at)
        check_value(self, "pass_at", are_counts, f"1 to sampling.n ({self.sampling.num_samples})")
        check_value(self, "confidence", 0 < self.confidence < 1, "above 0 and below 1")
        check_at_least(1, self, "num_resamples")
        check_at_least(0, self, "seed")
        check_run_name(self)
        check_value(self, "data.train", not self.data.train, "empty: data.val has the prompts")
        is_alone = not self.rollout.urls or self.checkpoints.folder is None
        check_value(self, "checkpoints.folder", is_alone, "null with rollout.urls, whose servers keep their model")
