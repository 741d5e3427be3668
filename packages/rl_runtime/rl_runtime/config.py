"""Configuration of a run: the model, ranks and steps, validation, checkpoints, scoring."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from ds_engine import Head, OptimConfig
from rl_data import REWARDS, Reward, RewardConfig, TurnsTrained, make_reward
from rollout_vllm.config import read_api_key
from run_kit import EXPERIMENT_PATTERN

DEFAULT_NUM_RANKS = 2
"""Ranks on the CPU."""
MAX_RANKS = 65_536
"""A larger number is a slip, which plans of devices would turn into a full memory."""
JUDGE_FIELDS = ("prompt", "response", "ground_truth", "data_source", "extra")
"""Fields that a judge prompt can use."""
JUDGE_FIELDS_OF_DATA = ("prompt", "ground_truth", "data_source", "extra")
"""Those that the policy did not write."""


EPISODE_TERM = "episode"
"""Name of what an episode scored itself, beside configured terms."""
MODEL_TERM = "model"
"""Name of what the reward model scored."""


def is_url(text: str) -> bool:
    """Whether the text is a URL of a storage, with something after `scheme://`."""
    return re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", text) is not None


def _check_storage(name: str, url: str | None) -> None:
    """Refuses storages that cannot hold checkpoints, and passwords, which files of the run would show."""
    scheme, _, rest = (url or "").partition("://")
    if url is None or not is_url(url):
        return
    if scheme == "memory":
        raise ValueError(f"{name} is {url!r}; allowed: another storage, because memory:// ends with this process")
    if scheme in ("file", "local") and not rest.startswith("/"):
        raise ValueError(f"{name} is {url!r}; allowed: an absolute folder, {scheme}:///shared/runs")
    if "@" in rest and ":" in rest.partition("@")[0]:
        raise ValueError(
            f"{name} has a password; allowed: a URL without, and credentials in the environment or in fsspec's "
            "configuration"
        )


def _check_at_least(minimum: int, config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < minimum:
            raise ValueError(f"{name} is {getattr(config, name)}; allowed: {minimum} or more")


BUILTIN_MODEL = "builtin:tiny"
"""The name of the model that the project builds."""


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model of another folder on the actor's ranks, without an optimizer, with the settings of the actor's engine."""

    key: str
    """The configuration key that names it."""
    path: str
    head: Head = "lm"
    keeps_distributions: bool = False
    """Whether an update reads its distributions over the whole vocabulary: its hidden states and its whole LM head."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = BUILTIN_MODEL
    """A Hugging Face causal LM folder, OWNER/NAME of a model fetched by `hf download`, or `builtin:tiny` for the
    0.4M-parameter Qwen3 that the project builds."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The name of the run and its trainer processes."""

    experiment: str = "run"
    """Name of the run; the run folder is `<output_dir>/<experiment>_<timestamp>`."""
    output_dir: str = "outputs"
    """Parent of the run folders."""
    private_output: bool = True
    """Only this user can enter the run folder (mode 0700); false: as the umask allows."""
    num_ranks: int | None = None
    """Number of trainer processes, one DeepSpeed rank each; on CUDA one GPU each. null: as many as there are GPUs and
    as the batch divides by; 2 on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; `auto` uses CUDA if there is a GPU."""
    ray_address: str | None = None
    """Ray cluster (`auto` or `host:port`) over whose nodes ranks and rollout servers are spread. This host must be one
    of them. `model.path` must be the same folder on all nodes, and `output_dir` a folder that they share, unless
    `local_disks`. null: everything runs on this host, in a local Ray."""
    ranks_per_node: int | None = None
    """Ranks on a node of the cluster at most; null: nodes are filled one after the other."""
    cpu_threads_per_rank: int = 1
    """torch threads of each rank."""
    seed: int = 1
    """Seed of data order, sampling and initial weights."""
    step_timeout_s: float = 1800.0
    """Seconds after which a call on the ranks (one phase of a step) fails and ends the run."""
    stall_timeout_s: float = 600.0
    """Seconds without progress on any rank after which a call fails, long before `step_timeout_s`. The error names the
    rank, its host and what it last did; a fifth of this time brings a warning."""
    max_skipped_updates: int = 10
    """Number of updates in a row whose gradient is not finite that ends the run; 0: no limit. Updates that fp16 skips
    to find its loss scale are not counted."""

    def __post_init__(self) -> None:
        given = [name for name in ("num_ranks", "ranks_per_node") if getattr(self, name) is not None]
        _check_at_least(1, self, *given, "cpu_threads_per_rank")
        if self.rank_count > MAX_RANKS:
            raise ValueError(f"num_ranks is {self.num_ranks}; allowed: at most {MAX_RANKS}")
        _check_at_least(0, self, "seed")
        if self.max_skipped_updates < 0:
            raise ValueError(f"max_skipped_updates is {self.max_skipped_updates}; allowed: 0 (no limit) or more")
        for name in ("step_timeout_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: above 0 seconds")
        if not self.output_dir:
            raise ValueError("output_dir is empty; allowed: a folder, created if missing")
        if not re.fullmatch(EXPERIMENT_PATTERN, self.experiment):
            raise ValueError(
                f"experiment is {self.experiment!r}; allowed: letters, digits and . _ + = -, a letter or digit first"
            )

    @property
    def rank_count(self) -> int:
        """Number of trainer processes."""
        return DEFAULT_NUM_RANKS if self.num_ranks is None else self.num_ranks


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RanksConfig):
    """What every training run has: validation, checkpoints, restarts."""

    val_before_train: bool = True
    """Validate once before the first step."""
    val_after_train: bool = True
    """Validate once after the last step."""
    max_restarts: int = 3
    """Restarts of the trainer ranks after one of them died or hangs, from the newest checkpoint of the run; the servers
    stay. 0, or no checkpoint although steps are done: a lost rank ends the run."""
    min_ranks: int | None = None
    """After nodes of a cluster were lost, continue with at least this many ranks, as many as the batch divides by.
    null: only with as many as before, if other nodes have room."""
    test_freq: int = -1
    """Validate every `test_freq` steps; -1: only before and after training."""
    save_freq: int = 0
    """Write a checkpoint every `save_freq` steps; 0: only when Ctrl-C, SIGTERM or SIGUSR1 ends the run after a step."""
    background_save: bool = True
    """Write checkpoints in the background: a step waits for a copy to host memory. False: it waits for the disk."""
    keep_checkpoints: int = 2
    """Number of the newest checkpoints to keep."""
    keep_every: int = 0
    """Keep the checkpoints of all steps that are multiples of this; 0: none."""
    keep_best: int = 0
    """Number of checkpoints with the best `best_metric` to keep as well."""
    best_metric: str = "critic/score/mean"
    """Metric of the step that `keep_best` compares."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the highest (max) or the lowest (min) `best_metric` is the best."""
    checkpoint_url: str | None = None
    """Storage for copies of the checkpoints that outlives this host: any URL of fsspec (`s3://bucket/runs`,
    `gs://bucket/runs`, `file:///shared/runs`). Every checkpoint is uploaded in the background to
    `<checkpoint_url>/<name of the run folder>`, where the same ones are kept as in the run folder; only the end of the
    run waits. Credentials come from the environment or from fsspec's configuration. null: no uploads."""
    local_disks: bool = False
    """The hosts of `ray_address` share no folder: each has `output_dir` on its own disk. Every host uploads the files
    of its ranks to `checkpoint_url`, where a checkpoint counts once all have arrived; a resume downloads it to each
    host. Rank 0 must be on this host, and each host needs the storage's credentials. False: a node that does not share
    the folder is refused."""
    resume: Literal["never", "auto"] = "never"
    """`auto` resumes from the newest checkpoint that verifies, here or below `checkpoint_url`, and says which ones it
    skips; without any checkpoint it starts at step 1. The number of ranks, the ZeRO stage and offload may differ from
    those of the checkpoint."""
    resume_from: str | None = None
    """The run folder to resume from, or the URL of a run below a `checkpoint_url`; null: the newest run of this
    experiment that has a good checkpoint, in `output_dir` or below `checkpoint_url`."""
    start_over_if_damaged: bool = False
    """With `resume=auto`, start at step 1 if there are checkpoints and none of them can be read; false: refuse."""
    export_model: bool = True
    """Write the final policy to `<run folder>/model` as a Hugging Face folder."""
    profile_steps: tuple[int, ...] = ()
    """Steps to trace: the phases of the loop, every rank, and the servers on this host, on one clock in one file for
    Perfetto, `<run folder>/profile/step_000003.json.gz`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, self, "keep_checkpoints")
        if self.save_freq < 0:
            raise ValueError(f"save_freq is {self.save_freq}; allowed: 0 (never) or more")
        if self.test_freq == 0 or self.test_freq < -1:
            raise ValueError(f"test_freq is {self.test_freq}; allowed: -1 (never) or 1 and more")
        for name in ("keep_every", "keep_best", "max_restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 (none) or more")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= (self.num_ranks or MAX_RANKS):
            most = MAX_RANKS if self.num_ranks is None else f"num_ranks ({self.num_ranks})"
            raise ValueError(f"min_ranks is {self.min_ranks}; allowed: 1 to {most}, or null for all of them")
        for name in ("checkpoint_url", "resume_from"):
            _check_storage(name, getattr(self, name))
        if self.checkpoint_url is not None and not is_url(self.checkpoint_url):
            raise ValueError(
                f"checkpoint_url is {self.checkpoint_url!r}; allowed: a URL, such as s3://bucket/runs or "
                "file:///shared/runs, or null"
            )
        if self.local_disks:
            self._check_local_disks()
        if self.resume_from is not None and self.resume == "never":
            raise ValueError(f"resume_from is {self.resume_from}, but resume is never; allowed: resume=auto")
        last = self.last_step
        if any(step < 1 or (last is not None and step > last) for step in self.profile_steps):
            limit = "" if last is None else f" to the last one ({last})"
            raise ValueError(f"profile_steps is {list(self.profile_steps)}; allowed: steps from 1{limit}")

    def _check_local_disks(self) -> None:
        for name, given in (("ray_address", self.ray_address), ("checkpoint_url", self.checkpoint_url)):
            if given is None:
                raise ValueError(f"local_disks is true; allowed: false, or with {name}, which is null")
        if self.resume_from is not None and not is_url(self.resume_from):
            raise ValueError(
                f"resume_from is {self.resume_from}; allowed with local_disks: the URL of a run below a checkpoint_url"
            )
        if self.profile_steps:
            raise ValueError(
                f"profile_steps is {list(self.profile_steps)}; allowed with local_disks: none, because each host would "
                "keep its own traces"
            )

    @property
    def last_step(self) -> int | None:
        """The last step, if the configuration alone says it."""
        return None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainingConfig):
    """The reinforcement-learning loop."""

    total_training_steps: int = 30
    """Number of steps; a step is rollout, scoring, update and weight sync."""
    max_staleness: int = 0
    """Policy versions by which the oldest token of a sample may be behind the weights that train on it. 0: rollout and
    training alternate. 1 and more: servers generate for that many later steps while the trainer learns (with
    over-sampling for one less), and `algorithm.rollout_correction` corrects for it."""
    stale_groups: Literal["finish", "drop"] = "finish"
    """With over-sampling and `max_staleness`: groups that the next step could no longer train on. `finish`: the step
    waits for them, and they finish under its weights. `drop`: they are given up and replaced by other prompts, which
    favors short responses."""
    colocate: bool = True
    """Rollout servers share the trainer's GPUs (true) or use the GPUs after them (false). Ignored on the CPU."""
    take_turns: Literal["never", "servers", "both"] | None = None
    """How ranks and servers on the same GPUs divide their memory. `never`: side by side. `servers`: servers sleep while
    the trainer works. `both`: besides, optimizer states and gradients wait in host memory while the servers generate.
    null: side by side if that fits, else in turns."""
    max_server_restarts: int = 3
    """Restarts of each rollout server that died or hangs; it gets the current weights before it serves. Servers of a
    teacher are restarted as often. With 0 a dead server ends the run. Existing servers (`rollout.urls`) are never
    restarted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, self, "total_training_steps")
        if self.max_server_restarts < 0:
            raise ValueError(f"max_server_restarts is {self.max_server_restarts}; allowed: 0 (none) or more")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}; allowed: 0 (none) or more")
        if self.takes_turns and self.max_staleness:
            raise ValueError(
                f"take_turns is {self.take_turns}; allowed: never, or null, with max_staleness={self.max_staleness}, "
                "where servers generate while the trainer works"
            )
        if self.takes_turns and not self.colocate:
            raise ValueError(
                f"take_turns is {self.take_turns}; allowed: never, or null, with colocate=false, where servers and "
                "ranks have GPUs of their own"
            )

    @property
    def last_step(self) -> int:
        """`total_training_steps`."""
        return self.total_training_steps

    @property
    def takes_turns(self) -> bool:
        """Whether servers sleep while the trainer works."""
        return self.take_turns in ("servers", "both")


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Multi-turn responses, driven by an environment or a function of yours (tools, games)."""

    function: str | None = None
    """`package.module:function`, a coroutine function that is called as `function(episode, prompt, tokenizer)` for each
    sample; null: single-turn responses. `sampling.max_tokens` limits the whole response including context. A number
    that it returns, or passes to `episode.reward(number)` after a turn, is the score; else `reward` scores."""
    environment: str | None = None
    """`package.module:Class` with `reset(prompt)` and `step(action_text) -> (observation, reward, done, info)`, instead
    of `function`. Each episode has an object of it in a process of its own. Its rewards are the score; an environment
    that gives none (None) leaves scoring to `reward`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment class."""
    max_turns: int = 8
    """Turns after which an episode in an environment ends as it is."""
    step_timeout_s: float = 30.0
    """Seconds of `reset` and of each `step` of the environment; a slower one fails its own sample."""
    start_timeout_s: float = 60.0
    """Seconds to start the environment's process, import its module and make its object."""
    max_environments: int = 256
    """Environments that run at the same time; further episodes wait."""
    timeout_s: float | None = None
    """Seconds after which an episode fails and is left out of the batch; null: no limit."""

    @property
    def is_on(self) -> bool:
        """Whether samples are episodes."""
        return self.function is not None or self.environment is not None

    def __post_init__(self) -> None:
        if self.function is not None and self.environment is not None:
            raise ValueError(f"environment is {self.environment!r}; allowed: null with a function ({self.function!r})")
        if self.options and self.environment is None:
            raise ValueError(f"options is {dict(self.options)}; allowed: {{}} without an environment")
        _check_at_least(1, self, "max_turns", "max_environments")
        for name in ("step_timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: above 0 seconds")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; allowed: above 0 seconds, or null")


@dataclass(frozen=True, kw_only=True)
class OversamplingConfig:
    """Steps that do not wait for the longest responses. Such a run is not reproducible bit for bit."""

    RENAMED_KEYS: ClassVar[dict[str, str]] = {"keep_unfinished": "partial_rollouts"}

    extra_prompts: int = 0
    """Prompts requested in addition to `batch.train_batch_size`; a step proceeds once `train_batch_size` groups are
    complete. 0: it waits for all. Short responses finish first, so dropping the others biases the batch."""
    partial_rollouts: bool = True
    """Unfinished groups are resumed by the next step; their tokens keep the policy version that sampled them. False
    drops them."""

    def __post_init__(self) -> None:
        _check_at_least(0, self, "extra_prompts")


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose scores do not differ are replaced by groups of fresh prompts (DAPO, arXiv:2503.14476)."""

    max_rounds: int = 0
    """Further rounds of generation in a step, each for the groups that are missing to `batch.train_batch_size`. After
    them, the step trains on the groups it has. 0: off, a step trains on all groups."""
    min_spread: float = 0.0
    """A group is kept if its maximum score exceeds its minimum by more than this."""

    def __post_init__(self) -> None:
        _check_at_least(0, self, "max_rounds")
        if not 0 <= self.min_spread < math.inf:
            raise ValueError(f"min_spread is {self.min_spread}; allowed: 0 or more")
        if self.min_spread and not self.max_rounds:
            raise ValueError(f"min_spread is {self.min_spread}; allowed: 0 with max_rounds=0, which keeps every group")


@dataclass(frozen=True, kw_only=True)
class RewardTermConfig:
    """One of several rewards; the score of a sample is the sum of their values times their weights."""

    function: str
    """A reward of the registry (gsm8k, math, multiple_choice, format, length, code), or `package.module:function`."""
    weight: float = 1.0
    """Factor of the value; 0 writes its metrics only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the registry's reward, or keyword arguments of the function."""
    batched: bool = False
    """The function is called once for a group, with a list of responses and a list of prompts, and returns a list."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight is {self.weight}; allowed: a finite number")
        if self.is_registered and self.batched:
            raise ValueError(f"batched is true; allowed: false with a reward of the registry ({self.function})")
        if self.is_registered:
            self.registered()
        elif ":" not in self.function:
            names = ", ".join(REWARDS)
            raise ValueError(f"function is {self.function!r}; allowed: {names}, or package.module:function")

    @property
    def is_registered(self) -> bool:
        return self.function in REWARDS

    def registered(self) -> Reward:
        """The reward of the registry. Raises ValueError if an option is not allowed."""
        try:
            return make_reward(self.function, self.options)
        except ValueError as error:
            raise ValueError(f"options.{error}") from None


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(RewardConfig):
    """How responses are scored, in processes of their own during the rollout."""

    terms: Mapping[str, RewardTermConfig] = field(default_factory=dict)
    """Several rewards with weights, by a name of yours, as in `reward.terms.brief.function=length`. Validation accuracy
    is the share of samples whose first term is full. Empty: one reward, given by the keys below."""
    function: str | None = None
    """`package.module:function`, called as `function(response_text, prompt) -> float` instead of the reward of the
    prompt's data source; `async def` too. A sample whose call raises or returns no finite number is left out of the
    batch. Parameters named `num_tokens` and `finish_reason` get those of the response. What it prints is in
    `rewards/` of the run folder."""
    batched: bool = False
    """`function` is called once for a group, with a list of responses and a list of prompts, and returns a list."""
    answer: str | None = None
    """`package.module:function`, called as `function(response_text)`: the answer of a response, or None, on which
    validations with several samples vote (`maj@n`). null: the answer that the reward extracts (gsm8k, math,
    multiple_choice)."""
    model: str | None = None
    """A reward model: a Hugging Face sequence-classification folder with one label, or OWNER/NAME after `hf download`,
    with the policy's vocabulary. It reads the tokens of prompt and response; its output at the last token is the score,
    which has no bounds. It is frozen on the actor's ranks and scores after each rollout, or with
    `service=reward_model` it is behind `url`. `terms` and rewards of episodes are added to it."""
    model_weight: float = 1.0
    """Factor of the reward model's output; 0 writes its metrics only."""
    url: str | None = None
    """A service that scores instead of a function: `http://host:port/path`, or `http://host:port` of a vLLM server for
    the other kinds of `service`. A sample without a score is left out of the batch."""
    service: Literal["http", "classification", "pooling", "reward_model", "judge"] = "http"
    """Kind of `url`. `http`: a service that receives prompt, response, ground_truth, data_source and extra as JSON
    and answers `{"score": number}`. `classification`, `pooling`: a classifier or reward model behind vLLM's /classify
    or /pooling, which reads prompt and response. `reward_model`: the folder `model` behind vLLM's /classify
    (`vllm serve FOLDER --runner pooling`), which gets token ids. `judge`: a chat model."""
    judge_prompt: str | None = None
    """The judge's prompt, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}` and `{extra[column]}`;
    `{{` is a brace. The response is marked as text to grade, and the judge is told to end with a line
    `SCORE <mark>: <number>`."""
    label: int = 0
    """Index of the class whose probability is the score, for `service=classification`."""
    api_key: str | None = None
    """Bearer token of the service. On a command line every user of the host could read it: write
    `reward.api_key='${oc.env:NAME}'`, or give `api_key_file`."""
    api_key_file: str | None = None
    """File with the bearer token, instead of `api_key`."""
    num_workers: int = 1
    """Scoring processes, if no service scores. Coroutine functions share one more, with 64 calls at a time."""
    timeout_s: float = 30.0
    """Seconds to score one sample; a slower one is left out of the batch."""
    start_timeout_s: float = 60.0
    """Seconds to start a scoring process and import the function's module; not part of `timeout_s`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_terms()
        if self.batched and self.function is None:
            raise ValueError("batched is true; allowed: false without function; terms have their own key")
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")) or not _names_a_host(self.url):
                raise ValueError(f"url is {self.url!r}; allowed: http://host:port/path or https://…")
            if self.function is not None:
                raise ValueError(
                    f"url is {self.url!r}; allowed: null with a function ({self.function}), or no function"
                )
        self._check_model()
        if self.service == "judge" and self.judge_prompt is None:
            raise ValueError("judge_prompt is null; allowed with service=judge: the text of the judge's prompt")
        if self.judge_prompt is not None:
            self._check_judge_prompt(self.judge_prompt)
        if self.label < 0 or (self.label and self.service != "classification"):
            raise ValueError(f"label is {self.label}; allowed: 0 or more with service=classification, else 0")
        if self.service != "http" and self.url is None:
            raise ValueError(f"service is {self.service!r}; allowed: http where url is null")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError(f"api_key_file is {self.api_key_file}; allowed: null if api_key is given")
        _check_at_least(1, self, "num_workers")
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: above 0 seconds")

    def read_api_key(self) -> str | None:
        """The bearer token, from the file if one is given. Raises rollout_vllm.ApiKeyError if it cannot be read."""
        return read_api_key(self.api_key, self.api_key_file)

    @property
    def model_on_ranks(self) -> bool:
        """Whether the reward model is on the trainer's ranks; its scores then come after the rollout."""
        return self.model is not None and self.url is None

    @property
    def frozen_models(self) -> "tuple[FrozenModel, ...]":
        """The reward model, if it is on the trainer's ranks."""
        if not self.model_on_ranks:
            return ()
        return (FrozenModel(key="reward.model", path=str(self.model), head="value"),)

    @property
    def adds_up(self) -> bool:
        """Whether the score is a sum of named values, to which rewards of episodes belong."""
        return bool(self.terms) or self.model is not None

    def key_of(self, term: str) -> str:
        """The configuration key of a named value; empty for the only reward."""
        if term == MODEL_TERM and self.model is not None:
            return "reward.model"
        return f"reward.terms.{term}" if term else ""

    def weight_of(self, term: str) -> float:
        """Factor of a named value; "" is the only reward."""
        if term == MODEL_TERM and self.model is not None:
            return self.model_weight
        return self.terms[term].weight if term in self.terms else 1.0

    def _check_model(self) -> None:
        if self.model is None:
            if self.service == "reward_model":
                raise ValueError("model is null; allowed with service=reward_model: the folder that the server serves")
            if self.model_weight != 1:
                raise ValueError(f"model_weight is {self.model_weight}; allowed: 1 where model is null")
            return
        if not math.isfinite(self.model_weight):
            raise ValueError(f"model_weight is {self.model_weight}; allowed: a finite number")
        if self.function is not None:
            raise ValueError(
                f"model is {self.model!r}; allowed: null with a function ({self.function}); reward.terms add both"
            )
        if self.url is not None and self.service != "reward_model":
            raise ValueError(
                f"model is {self.model!r}; allowed: null with service={self.service}, or service=reward_model if "
                f"{self.url} serves it"
            )

    def _check_terms(self) -> None:
        if self.terms and (self.function or (self.url and self.service != "reward_model")):
            raise ValueError("terms is given; allowed: empty with function or url, which score alone")
        for name in ("method", "format_score"):
            value, default = getattr(self, name), getattr(RewardConfig(), name)
            if self.terms and value != default:
                raise ValueError(f"{name} is {value}; allowed: {default} with terms, which have options.{name} instead")
        for name, term in self.terms.items():
            if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or name == EPISODE_TERM:
                raise ValueError(
                    f"terms.{name} is a bad name; allowed: letters, digits, _ and -, but not {EPISODE_TERM}"
                )
            if name == MODEL_TERM and self.model is not None:
                raise ValueError(f"terms.{name} is a bad name; allowed with model: another, because it names the model")
            if term.is_registered and (limit_s := term.registered().max_duration_s) >= self.timeout_s:
                raise ValueError(
                    f"terms.{name}.options.timeout_s is {limit_s:g}; allowed: below timeout_s ({self.timeout_s:g}), "
                    "so that a slow program scores 0 and is not left out"
                )
        weights = [term.weight for term in self.terms.values()] + ([] if self.model is None else [self.model_weight])
        if weights and not any(weights):
            what = "terms have weight 0 only" if self.model is None else "model_weight and the weights of terms are 0"
            raise ValueError(f"{what}; allowed: at least one other weight")

    def _check_judge_prompt(self, judge_prompt: str) -> None:
        if self.service != "judge":
            raise ValueError(f"judge_prompt is given; allowed: null with service={self.service}")
        try:
            judge_prompt.format(**{**dict.fromkeys(JUDGE_FIELDS, ""), "extra": defaultdict(str)})
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
    except ValueError:  # the port is not a number
        return False


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """Learning rates by what is trained: all weights, LoRA adapters, or the built-in model."""

    full: float
    lora: float
    builtin: float


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Supervised training on demonstrations: the SFT app, and the warm start before reinforcement learning."""

    steps: int = 0
    """Number of optimizer steps; 0: no warm start."""
    batch_size: int = 64
    """Demonstrations per step, over all ranks and micro batches."""
    files: tuple[str, ...] = ()
    """Files of demonstrations, of the kinds of `data.train`; empty: those of the built-in task. Their columns are
    `question` and `answer`, `messages`, `prompt` and `completion`, or `text` (docs/data.md)."""
    turns: TurnsTrained = "all"
    """Turns of a conversation that are trained on. `all`: every assistant turn. `each`: every one, as a sequence of its
    own with the messages before it as the prompt, for templates that render earlier turns differently. `last`: only the
    last one."""
    max_length: int | None = None
    """Maximum tokens of a demonstration, prompt and response; `data.overlong` says what happens to longer ones. None
    of them is cut, which would teach to stop anywhere. null: no limit."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, schedule="cosine"))
    """The optimizer; the schedule is as long as the training. A learning rate of null is chosen for the model: 1e-5 for
    all weights, between Tulu 3's 5e-6 (8B, arXiv:2411.15124) and Llama 2's 2e-5 (arXiv:2307.09288); 1e-4 for LoRA,
    which wants about ten times as much ('LoRA Without Regret', Schulman 2025; QLoRA takes 1e-4 to 2e-4,
    arXiv:2305.14314); 2e-3 for `builtin:tiny`, which has 0.4M parameters and starts from random weights."""

    def __post_init__(self) -> None:
        _check_at_least(0, self, "steps")
        _check_at_least(1, self, "batch_size")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; allowed: 2 or more tokens, or null")
        if self.optim.total_steps is not None:
            raise ValueError(f"optim.total_steps is {self.optim.total_steps}; allowed: null, because the run sets it")

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return self.steps > 0

    @property
    def learning_rates(self) -> LearningRates:
        """What `optim.lr=null` becomes."""
        return LearningRates(full=1e-5, lora=1e-4, builtin=2e-3)

    @property
    def keys_of_files(self) -> dict[str, tuple[str, ...]]:
        """The keys that name files of demonstrations."""
        return {"files": self.files}


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(SupervisedConfig):
    """What an SFT run trains on, and how it is validated."""

    steps: int = 0
    """Number of optimizer steps; 0: as many as `epochs` have."""
    epochs: float = 2.0
    """Passes over the demonstrations, where `steps` is 0; the last step has what is left of them."""
    val_files: tuple[str, ...] = ()
    """Files of held-out demonstrations, for the validation loss; empty: `val_size`."""
    val_size: int = 0
    """Without `val_files`: number of demonstrations that are held out of `files`, chosen by `trainer.seed`."""
    num_samples: int = 4
    """Greedy responses to the first held-out prompts at each validation, in `rollouts/`; 0: none. The training engine
    decodes them without a key/value cache: exact at every ZeRO stage and without a server, at the cost of a forward
    pass for each token."""
    sample_tokens: int = 64
    """Maximum tokens of such a response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(0, self, "val_size", "num_samples")
        _check_at_least(1, self, "sample_tokens")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; allowed: above 0")
        if self.val_files and self.val_size:
            raise ValueError(f"val_size is {self.val_size}; allowed: 0 with val_files, which are all held out")

    @property
    def trains(self) -> bool:
        """Always."""
        return True

    @property
    def keys_of_files(self) -> dict[str, tuple[str, ...]]:
        """The keys that name files of demonstrations."""
        return {"files": self.files, "val_files": self.val_files}

    def num_steps(self, num_demonstrations: int) -> int:
        """Optimizer steps of the run: `steps`, or those of `epochs`."""
        return self.steps or max(1, -(-self.num_drawn(num_demonstrations) // self.batch_size))

    def num_drawn(self, num_demonstrations: int) -> int:
        """Demonstrations of all steps."""
        return self.steps * self.batch_size or max(1, round(self.epochs * num_demonstrations))


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainingConfig(FineTuningConfig):
    """What a reward model or a preference run trains on, and how it is validated."""

    batch_size: int = 64
    """Pairs, or labeled responses, per step, over all ranks and micro batches."""
    files: tuple[str, ...] = ()
    """Files of preferences, of the kinds of `data.train`; empty: those of the built-in task. Pairs have the columns
    `question` or `prompt`, `chosen`, `rejected` and optionally `margin`; labeled responses (KTO) `prompt`, `completion`
    and `label` (docs/data.md)."""
    epochs: float = 1.0
    """Passes over the preferences, where `steps` is 0; the last step has what is left of them."""
    val_files: tuple[str, ...] = ()
    """Files of held-out preferences; empty: `val_size`, or those of the built-in task."""
    val_size: int = 0
    """Without `val_files`: number of preferences that are held out of `files`, chosen by `trainer.seed`."""
    max_length: int | None = None
    """Maximum tokens of a prompt with one response; `data.overlong` says what happens to preferences with a longer
    one. null: no limit."""
    num_samples: int = 0
    """Greedy responses to the first held-out prompts at each validation, in `rollouts/`, by the training engine; 0:
    none. A reward model has none."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, schedule="cosine"))
    """The optimizer; the schedule is as long as the training. A learning rate of null is chosen for the model. Reward
    models: 1e-5 for all weights (InstructGPT's is 9e-6, arXiv:2203.02155), 1e-4 for LoRA. DPO, IPO and KTO: 1e-6 for
    all weights (DPO's paper, arXiv:2305.18290), 1e-5 for LoRA. `builtin:tiny`: 1e-3 and 3e-4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns != "all":
            raise ValueError(f"turns is {self.turns}; allowed: all, because a preference is about the last turn")


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """The built-in task and its numbers of problems."""

    kind: Literal["arithmetic", "calculator", "stones"] = "arithmetic"
    """Additions with their working shown, larger additions with a calculator tool, or a game of taking stones."""
    num_train: int = 2000
    """Number of training problems."""
    num_val: int = 256
    """Number of held-out problems; their operand pairs are in no training problem."""
    num_demonstrations: int = 4000
    """Number of demonstrations for the warm start; four in ten show the working or call the calculator."""

    def __post_init__(self) -> None:
        _check_at_least(1, self, "num_train", "num_val", "num_demonstrations")


@dataclass(frozen=True, kw_only=True)
class PreferenceTaskSize(TaskSize):
    """The built-in task with its pairs of responses: the right calculation, and a wrong one or a wrong bare answer."""

    num_pairs: int = 4000
    """Number of training pairs."""
    num_val_pairs: int = 256
    """Number of held-out pairs; their operands are in no training pair and no demonstration."""
    slip_share: float = 0.0
    """Share of pairs whose rejected response is the right calculation but for one wrong number and what follows from
    it. A reward model that a policy will learn from needs them: they are the mistakes of the trained policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, self, "num_pairs", "num_val_pairs")
        if not 0 <= self.slip_share <= 1:
            raise ValueError(f"slip_share is {self.slip_share}; allowed: 0 to 1")
        if self.kind != "arithmetic":
            raise ValueError(f"kind is {self.kind}; allowed: arithmetic, the only built-in task with preferences")
