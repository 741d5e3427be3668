"""Everything `apps.bench.main` can be told."""

import re
from dataclasses import dataclass
from typing import Literal

CaseName = Literal[
    "zero1_no_offload",
    "zero2_no_offload",
    "zero3_no_offload",
    "zero1_cpu_offload",
    "zero2_cpu_offload",
    "zero3_cpu_offload",
]
SIX_CASES: tuple[CaseName, ...] = (
    "zero1_no_offload",
    "zero2_no_offload",
    "zero3_no_offload",
    "zero1_cpu_offload",
    "zero2_cpu_offload",
    "zero3_cpu_offload",
)
_OWN_KEYS = ("trainer.seed", "trainer.total_training_steps", "trainer.experiment", "trainer.output_dir")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What every benchmark has. A case is a run of an app, in a process of its own."""

    run_tag: str = "bench"
    """Name of the benchmark; its folder is `<output_dir>/<run_tag>_<timestamp>`."""
    output_dir: str = "outputs"
    """Where benchmark folders are made."""
    steps: int = 60
    """Training steps of each case."""
    fp32_grad_accum: bool = True
    """ZeRO-2 cases: add micro batches' gradients up in fp32."""
    overlays: tuple[str, ...] = ()
    """Overlays of the cases' app, left to right; `overlay=tiny` of this app sets it."""
    overrides: tuple[str, ...] = ()
    """Further `section.key=value` for every case, such as `model.path=/models/Qwen3-0.6B`."""
    retries: int = 1
    """Further attempts at a case that failed; a wrong configuration is not tried again."""
    case_timeout_s: float = 86_400.0
    """Seconds after which an attempt is given up."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on in `resume_from`: cases that finished there, with the same arguments, are not run again."""
    resume_from: str | None = None
    """The benchmark folder to go on in; null for the newest one of this `run_tag` in `output_dir`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", self.run_tag):
            raise ValueError(
                f"run_tag is {self.run_tag!r}; allowed: letters, digits and . _ + = -, a letter or digit first"
            )
        if not self.output_dir:
            raise ValueError("output_dir is empty; allowed: a folder, made if missing")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; allowed: 1 or more")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}; allowed: 0 or more")
        if not self.case_timeout_s > 0:
            raise ValueError(f"case_timeout_s is {self.case_timeout_s}; allowed: above 0 seconds")
        if self.resume_from is not None and self.resume == "never":
            raise ValueError(f"resume_from is {self.resume_from} and resume is never; allowed: resume=auto with it")
        for override in self.overrides:
            if not re.match(r"[a-z_]+(\.[a-z_0-9]+)+=", override):
                raise ValueError(f"overrides holds {override!r}; allowed: section.key=value")
            if override.partition("=")[0] in _OWN_KEYS:
                raise ValueError(f"overrides holds {override!r}, which the benchmark decides; see --help")


@dataclass(frozen=True, kw_only=True)
class SixCaseConfig(BenchConfig):
    """PPO under ZeRO-1, 2 and 3, each without offload and with CPU offload."""

    run_tag: str = "zero_six_case"
    seed: int = 7777
    """Seed of every case."""
    step_each_micro: bool = False
    """ZeRO-2 cases: let DeepSpeed count micro batches itself."""
    cases: tuple[CaseName, ...] = SIX_CASES
    """Which of the six."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cases or len(set(self.cases)) < len(self.cases):
            raise ValueError(f"cases is {list(self.cases)}; allowed: one or more of {', '.join(SIX_CASES)}, each once")


@dataclass(frozen=True, kw_only=True)
class StageGateConfig(BenchConfig):
    """ZeRO-1 against ZeRO-2, the same seeds for both: are they the same in score, throughput and memory?"""

    run_tag: str = "stage_gate"
    app: Literal["ppo", "grpo"] = "ppo"
    """The app whose `gsm8k` preset is run."""
    seeds: tuple[int, ...] = (7777,)
    """Each is run at both stages."""
    step_each_micro: tuple[bool, ...] = (False, True)
    """ZeRO-2 with each of these; ZeRO-1 is run once a seed."""
    confidence: float = 0.95
    """Of the interval for the mean difference over seeds; there is none for one seed."""
    score_threshold: float = 0.05
    """Largest difference in score, either way, that counts as equal."""
    throughput_threshold: float = 0.1
    """Largest loss of throughput, as a share of ZeRO-1's."""
    memory_threshold: float = 0.1
    """Largest growth of memory, as a share of ZeRO-1's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seeds", "step_each_micro"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; allowed: one or more, each once")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence is {self.confidence}; allowed: between 0 and 1")
        for name in ("score_threshold", "throughput_threshold", "memory_threshold"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more")
