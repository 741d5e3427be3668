"""Configuration of the run itself: which model, how many ranks and steps, what to validate and save."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from ds_engine import OptimConfig
from rl_data import RewardConfig
from run_kit import EXPERIMENT_PATTERN

JUDGE_FIELDS = ("prompt", "response", "ground_truth", "data_source")
"""What a judge's prompt may name."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = "builtin:tiny"
    """A Hugging Face causal LM folder, OWNER/NAME of one that `hf download` fetched, or `builtin:tiny` for the
    0.4M-parameter Qwen3 that the project builds."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The run's name and its trainer processes; what every app needs."""

    experiment: str = "run"
    """Name of the run; its folder is `<output_dir>/<experiment>_<timestamp>`."""
    output_dir: str = "outputs"
    """Where run folders are made."""
    num_ranks: int = 2
    """Trainer processes, one DeepSpeed rank each; on CUDA one GPU each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks train; `auto` takes CUDA when there is a GPU."""
    cpu_threads_per_rank: int = 1
    """torch threads of each rank."""
    seed: int = 1
    """Seed of data order, sampling and initial weights."""
    step_timeout_s: float = 1800.0
    """Seconds that one phase of one step may take on the ranks before the run is given up."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks is {self.num_ranks}; allowed: 1 or more")
        if self.cpu_threads_per_rank < 1:
            raise ValueError(f"cpu_threads_per_rank is {self.cpu_threads_per_rank}; allowed: 1 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; allowed: 0 or more")
        if self.step_timeout_s <= 0:
            raise ValueError(f"step_timeout_s is {self.step_timeout_s}; allowed: above 0 seconds")
        if not self.output_dir:
            raise ValueError("output_dir is empty; allowed: a folder, made if missing")
        if not re.fullmatch(EXPERIMENT_PATTERN, self.experiment):
            raise ValueError(
                f"experiment is {self.experiment!r}; allowed: letters, digits and . _ + = -, a letter or digit first"
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(RanksConfig):
    """The reinforcement-learning loop: how many steps, what to validate, save and keep."""

    total_training_steps: int = 30
    """Number of steps: rollout, score, advantage, update, sync."""
    colocate: bool = True
    """Rollout servers share the trainer's GPUs (true) or take the GPUs after them (false). No meaning on the CPU, nor
    for servers on other hosts."""
    ray_address: str | None = None
    """Ray cluster whose other nodes the rollout servers are put on: `auto` or `host:port`. This host must be one of its
    nodes, on which the trainer ranks run; `model.path` must be the same folder on all of them (for the built-in model
    that is in `output_dir`). null: everything on this host, with a Ray of the run's own."""
    val_before_train: bool = True
    """Validate once before the first step."""
    val_after_train: bool = True
    """Validate once after the last step."""
    max_server_restarts: int = 3
    """How often each rollout server is started again when it died or hangs; it gets the current weights before it
    serves. 0 ends the run then. Servers given by `rollout.urls` are never started again."""
    test_freq: int = -1
    """Validate every so many steps; -1 for never in between."""
    save_freq: int = 0
    """Write a checkpoint every so many steps; 0 for none."""
    background_save: bool = True
    """Write checkpoints beside training: a step pays for a copy to host memory. False waits for the disk."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of steps that this divides stay for good; 0 for none."""
    keep_best: int = 0
    """How many checkpoints with the highest `best_metric` stay besides."""
    best_metric: str = "critic/score/mean"
    """Metric of the step that `keep_best` goes by."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest good checkpoint of `resume_from`, or starts at step 1 when there is none. The
    number of ranks, ZeRO stage and offload may differ from the checkpoint's."""
    resume_from: str | None = None
    """The run folder to go on from; null for the newest one of this experiment in `output_dir` with a checkpoint."""
    export_model: bool = True
    """Write the final policy as a Hugging Face folder `<run folder>/model`."""
    profile_steps: tuple[int, ...] = ()
    """Steps whose trace (rank 0 and the loop's phases) is written to `<run folder>/profile/`, for Perfetto."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_training_steps < 1:
            raise ValueError(f"total_training_steps is {self.total_training_steps}; allowed: 1 or more")
        if self.save_freq < 0:
            raise ValueError(f"save_freq is {self.save_freq}; allowed: 0 (never) or more")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints is {self.keep_checkpoints}; allowed: 1 or more")
        if self.test_freq == 0 or self.test_freq < -1:
            raise ValueError(f"test_freq is {self.test_freq}; allowed: -1 (never) or 1 and more")
        for name in ("keep_every", "keep_best", "max_server_restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 (none) or more")
        if self.resume_from is not None and self.resume == "never":
            raise ValueError(f"resume_from is {self.resume_from} and resume is never; allowed: resume=auto with it")
        if any(not 1 <= step <= self.total_training_steps for step in self.profile_steps):
            raise ValueError(
                f"profile_steps is {list(self.profile_steps)}; allowed: steps from 1 to total_training_steps "
                f"({self.total_training_steps})"
            )


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Responses of several turns, driven by a function of the user's (tools, environments)."""

    function: str | None = None
    """`package.module:function`, a coroutine function called as `function(episode, prompt, tokenizer)` for each sample;
    null: the model answers once. `sampling.max_tokens` bounds the whole response, context included."""
    timeout_s: float | None = None
    """Seconds after which an episode is given up and left out of the batch; null for no limit."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; allowed: above 0 seconds, or null")


@dataclass(frozen=True, kw_only=True)
class OversamplingConfig:
    """Steps that do not wait for the longest responses. Such a run does not repeat bit for bit."""

    RENAMED_KEYS: ClassVar[dict[str, str]] = {"keep_unfinished": "partial_rollouts"}

    extra_prompts: int = 0
    """Prompts asked beyond `batch.train_batch_size`; a step goes on when so many groups as that are complete. 0: all
    are waited for. Short responses come first, so keep the others."""
    partial_rollouts: bool = True
    """The next step goes on with the others where they stopped; their tokens keep the policy version that drew them.
    False gives them up."""

    def __post_init__(self) -> None:
        if self.extra_prompts < 0:
            raise ValueError(f"extra_prompts is {self.extra_prompts}; allowed: 0 or more")


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(RewardConfig):
    """How responses are scored, in processes beside the rollout."""

    function: str | None = None
    """`package.module:function`, called as `function(response_text, prompt) -> float` instead of the rule that the
    prompt's data source has. A sample whose call raises, or gives no finite number, is left out of the batch."""
    url: str | None = None
    """A service that scores instead of a function: `http://host:port/path`, or a server's `http://host:port` for the
    other kinds of `service`. A sample that it gives no number for is left out of the batch."""
    service: Literal["http", "classification", "pooling", "judge"] = "http"
    """What `url` is: a service of yours that is sent prompt, response, ground_truth and data_source as JSON and answers
    `{"score": number}`; a classifier or reward model behind vLLM's /classify or /pooling, which reads prompt and
    response; a chat model that judges."""
    judge_prompt: str | None = None
    """What a judge is asked, with `{prompt}`, `{response}`, `{ground_truth}` and `{data_source}`; `{{` is a brace. The
    last number of its answer is the score."""
    label: int = 0
    """The class whose probability is the score, counted from 0, where `service` is classification."""
    api_key: str | None = None
    """Bearer token of the service."""
    num_workers: int = 1
    """Processes that score, where no service does."""
    timeout_s: float = 30.0
    """Seconds for one sample; one that takes longer is left out of the batch."""
    start_timeout_s: float = 60.0
    """Seconds for the start of a process that scores and the import of the function's module; not part of
    `timeout_s`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")) or not _names_a_host(self.url):
                raise ValueError(f"url is {self.url!r}; allowed: http://host:port/path or https://…")
            if self.function is not None:
                raise ValueError(
                    f"url is {self.url!r}; allowed: null with a function ({self.function}), or no function"
                )
        if self.service == "judge" and self.judge_prompt is None:
            raise ValueError("judge_prompt is null; allowed with service=judge: what the judge is asked")
        if self.judge_prompt is not None:
            self._check_judge_prompt(self.judge_prompt)
        if self.label < 0 or (self.label and self.service != "classification"):
            raise ValueError(f"label is {self.label}; allowed: 0 or more with service=classification, else 0")
        if self.service != "http" and self.url is None:
            raise ValueError(f"service is {self.service!r}; allowed: http where url is null")
        if self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers}; allowed: 1 or more")
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: above 0 seconds")

    def _check_judge_prompt(self, judge_prompt: str) -> None:
        if self.service != "judge":
            raise ValueError(f"judge_prompt is given; allowed: null with service={self.service}")
        try:
            judge_prompt.format(**dict.fromkeys(JUDGE_FIELDS, ""))
        except (LookupError, ValueError, AttributeError) as error:
            names = ", ".join(f"{{{name}}}" for name in JUDGE_FIELDS)
            raise ValueError(
                f"judge_prompt is {judge_prompt!r}; allowed: text with {names}, and {{{{ and }}}} for braces "
                f"({type(error).__name__}: {error})"
            ) from None


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Supervised steps on demonstrations: the SFT app, and the warm start before reinforcement learning."""

    steps: int = 0
    """Optimizer steps; 0 for no warm start."""
    batch_size: int = 64
    """Demonstrations a step, over all ranks."""
    files: tuple[str, ...] = ()
    """Parquet files of demonstrations (`question`, `answer`); empty for those of the built-in task."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=2e-3, schedule="cosine"))
    """The optimizer of these steps; the schedule's length is `steps`."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; allowed: 0 or more")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; allowed: 1 or more")


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """Which built-in task, and how many problems of it are written."""

    kind: Literal["arithmetic", "calculator"] = "arithmetic"
    """Additions whose working is shown, or larger ones with a calculator to call."""
    num_train: int = 2000
    """Training problems."""
    num_val: int = 256
    """Held-out problems, of operand pairs that no training problem has."""
    num_demonstrations: int = 4000
    """Demonstrations for the warm start, four in ten of them with working shown or the calculator called."""

    def __post_init__(self) -> None:
        for name in ("num_train", "num_val", "num_demonstrations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
