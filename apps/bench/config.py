"""Configuration of `apps.bench.main`."""

import re
from dataclasses import dataclass
from typing import Literal

from rl_runtime.config import check_resume, check_run_name
from rl_runtime.rules import check_at_least, check_value

SIX_CASES = tuple(f"zero{stage}_{offload}_offload" for offload in ("no", "cpu") for stage in (1, 2, 3))
_OWN_KEYS = ("trainer.seed", "trainer.total_training_steps", "trainer.experiment", "trainer.output_dir")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options shared by all benchmarks. A case is a run of an app in its own process."""

    run_tag: str = "bench"
    """Name of the benchmark; its folder is `<output_dir>/<run_tag>_<timestamp>`."""
    output_dir: str = "outputs"
    """Parent of the benchmark folders."""
    steps: int = 60
    """Training steps of each case."""
    fp32_grad_accum: bool = True
    """ZeRO-2 cases: accumulate gradients in fp32."""
    overlays: tuple[str, ...] = ()
    """Overlays of the cases' app, merged left to right; `overlay=tiny` of this app sets it."""
    overrides: tuple[str, ...] = ()
    """Further `section.key=value` for every case, such as `model.path=/models/Qwen3-0.6B`."""
    retries: int = 1
    """Retries of a failed case; an invalid configuration is not retried."""
    case_timeout_s: float = 86_400.0
    """Timeout of one attempt, in seconds."""
    resume: Literal["never", "auto"] = "never"
    """`auto` resumes in `resume_from` and skips cases that completed there with the same arguments."""
    resume_from: str | None = None
    """Benchmark folder to resume; null takes the newest one of this `run_tag` in `output_dir`."""

    def __post_init__(self) -> None:
        check_run_name(self, "run_tag")
        check_resume(self)
        check_at_least(1, self, "steps")
        check_at_least(0, self, "retries")
        check_value(self, "case_timeout_s", self.case_timeout_s > 0, "above 0 seconds")
        keys = [re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)=.*", override, re.DOTALL) for override in self.overrides]
        is_allowed = all(key is not None and key[1] not in _OWN_KEYS for key in keys)
        check_value(self, "overrides", is_allowed, f"section.key=value, without {', '.join(_OWN_KEYS)}")

    def _check_each_once(self, key: str) -> None:
        values = getattr(self, key)
        check_value(self, key, bool(values) and len(set(values)) == len(values), "one or more, each once")


@dataclass(frozen=True, kw_only=True)
class SixCaseConfig(BenchConfig):
    """PPO under ZeRO-1, 2 and 3, each without offload and with CPU offload."""

    run_tag: str = "zero_six_case"
    seed: int = 7777
    """Seed of every case."""
    step_each_micro: bool = False
    """ZeRO-2 cases: let DeepSpeed count the micro batches."""
    cases: tuple[str, ...] = SIX_CASES
    """The cases to run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, self, "seed")
        self._check_each_once("cases")
        check_value(self, "cases", set(self.cases) <= set(SIX_CASES), f"one or more of {', '.join(SIX_CASES)}")


@dataclass(frozen=True, kw_only=True)
class StageGateConfig(BenchConfig):
    """ZeRO-1 against ZeRO-2 with the same seeds: compares score, throughput and memory."""

    run_tag: str = "stage_gate"
    app: Literal["ppo", "grpo"] = "ppo"
    """App whose `gsm8k` preset is run."""
    seeds: tuple[int, ...] = (7777,)
    """Seeds; each runs at both stages."""
    step_each_micro: tuple[bool, ...] = (False, True)
    """Values for the ZeRO-2 runs; ZeRO-1 runs once per seed."""
    confidence: float = 0.95
    """Confidence level of the interval of the mean difference over seeds; one seed has no interval."""
    score_threshold: float = 0.05
    """Largest absolute difference in score that counts as equal."""
    throughput_threshold: float = 0.1
    """Largest throughput loss, as a fraction of ZeRO-1's."""
    memory_threshold: float = 0.1
    """Largest memory growth, as a fraction of ZeRO-1's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_each_once("seeds")
        check_value(self, "seeds", min(self.seeds) >= 0, "0 or more")
        self._check_each_once("step_each_micro")
        check_value(self, "confidence", 0 < self.confidence < 1, "between 0 and 1")
        check_at_least(0, self, "score_threshold", "throughput_threshold", "memory_threshold")
