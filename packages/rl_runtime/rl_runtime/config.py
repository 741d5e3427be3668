"""Configuration of a run: the model, ranks, steps, validation, checkpoints, restarts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds_engine import EngineConfig, Head
from rl_data.config import expand_files
from run_kit import EXPERIMENT_PATTERN

from .errors import InputError
from .rules import Feature, Rule, check_at_least, check_features, check_seconds, check_value, only, value_of

DEFAULT_NUM_RANKS = 2
"""Ranks on the CPU."""
MAX_RANKS = 65_536
"""A larger number is a slip, which plans of devices would turn into a full memory."""


def is_url(text: str) -> bool:
    """True for the URL of a storage, with something after `scheme://`."""
    return re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", text) is not None


def _check_storage(name: str, url: str | None) -> None:
    """Refuses storages that cannot hold checkpoints, and passwords, which files of the run would show."""
    scheme, _, rest = (url or "").partition("://")
    if url is None or not is_url(url):
        return
    if scheme == "memory":
        raise InputError("memory:// ends with this process", field=name, value=url, allowed="another storage")
    if scheme in ("file", "local") and not rest.startswith("/"):
        raise InputError(field=name, value=url, allowed=f"an absolute folder, {scheme}:///shared/runs")
    if "@" in rest and ":" in rest.partition("@")[0]:
        allowed = "a URL without, and credentials in the environment or in fsspec's configuration"
        raise InputError("the URL has a password", field=name, allowed=allowed)  # the value is a secret


def check_run_name(config: Any, key: str = "experiment") -> None:
    """Raises InputError for a name (`key`) or an `output_dir` that cannot be those of a run folder."""
    check_value(config, "output_dir", bool(config.output_dir), "a folder, created if missing")
    is_name = re.fullmatch(EXPERIMENT_PATTERN, getattr(config, key)) is not None
    check_value(config, key, is_name, "letters, digits and . _ + = -, a letter or digit first")


def check_resume(config: Any) -> None:
    """Raises InputError for a `resume_from` that `resume` ignores."""
    is_read = config.resume_from is None or config.resume != "never"
    check_value(config, "resume_from", is_read, "null with resume=never", remedy="give resume=auto")


BUILTIN_MODEL = "builtin:tiny"
"""The name of the model that the project builds."""


def expand_folder(field: str, path: str) -> str:
    """The path with `~` as the home folder, or the folder that a pattern matches.

    Raises DataConfigError for a pattern without a match, InputError for one with several.
    """
    folders = expand_files(field, [path])
    if len(folders) > 1:
        raise InputError(f"it matches {len(folders)}", field=field, value=path, allowed="a pattern of one folder")
    return folders[0]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that a run trains."""

    section: str
    """Its configuration section."""
    engine: EngineConfig
    head: Head = "lm"
    own_ranks: int = 0
    """Ranks for it alone; 0: it is on the actor's."""


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model of another folder on the actor's ranks, without an optimizer, with the settings of the actor's engine."""

    key: str
    """The configuration key that names it."""
    path: str
    head: Head = "lm"
    keeps_distributions: bool = False
    """True if an update reads its distributions over the whole vocabulary: its hidden states and its whole LM head."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that a run starts from."""

    path: str = BUILTIN_MODEL
    """A Hugging Face causal LM folder (`~` and patterns such as `runs/*/final` are expanded), OWNER/NAME of a model
    fetched by `hf download`, or `builtin:tiny` for the 0.4M-parameter Qwen3 that the project builds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", expand_folder("path", self.path))


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
        check_at_least(1, self, "num_train", "num_val", "num_demonstrations")


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
        check_at_least(1, self, "num_pairs", "num_val_pairs")
        check_value(self, "slip_share", 0 <= self.slip_share <= 1, "0 to 1")
        check_value(self, "kind", self.kind == "arithmetic", "arithmetic, the only built-in task with preferences")


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
        check_at_least(1, self, "num_ranks", "ranks_per_node", "cpu_threads_per_rank")
        check_value(self, "num_ranks", self.rank_count <= MAX_RANKS, f"at most {MAX_RANKS}")
        check_at_least(0, self, "seed", "max_skipped_updates")
        check_seconds(self, "step_timeout_s", "stall_timeout_s")
        check_run_name(self)

    @property
    def rank_count(self) -> int:
        """Number of trainer processes."""
        return DEFAULT_NUM_RANKS if self.num_ranks is None else self.num_ranks


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RanksConfig):
    """Settings of every training run: validation, checkpoints, restarts."""

    val_before_train: bool = True
    """Validate once before the first step."""
    val_after_train: bool = True
    """Validate once after the last step."""
    max_restarts: int = 3
    """Restarts of the trainer ranks after one of them died or hangs, from the newest checkpoint of the run; the servers
    stay. A lost node ends the run, and so does a lost rank with 0, or without a checkpoint although steps are done."""
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
    """The best checkpoint has the highest (max) or the lowest (min) `best_metric`."""
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
    states_from: Mapping[str, str] = field(default_factory=dict)
    """A new run starts with the weights and optimizer states of a DeepSpeed checkpoint, which any program may have
    written: of ZeRO-1 to 3, or universal. `trainer.states_from.actor=FOLDER`, in ppo also critic. `model.path` gives
    the architecture, the tokenizer and the reference model."""
    allow_changes: bool = False
    """With `resume`, go on although settings or inputs that decide what is learned differ from those of the checkpoint:
    data, tokenizer, frozen weights, reward, algorithm, learning rate, sampling. The run lists every difference either
    way. False: refuse."""
    start_over_if_damaged: bool = False
    """With `resume=auto`, start at step 1 if there are checkpoints and none of them can be read; false: refuse."""
    export_model: bool = True
    """Write the final policy to `<run folder>/model` as a Hugging Face folder."""
    profile_steps: tuple[int, ...] = ()
    """Steps to trace: every rank, and the servers on this host, each in a file for Perfetto in
    `<run folder>/profile/step_000003`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "keep_checkpoints")
        check_at_least(0, self, "save_freq", "keep_every", "keep_best", "max_restarts")
        check_value(self, "test_freq", self.test_freq != 0 and self.test_freq >= -1, "-1 (never) or 1 and more")
        for name in ("checkpoint_url", "resume_from"):
            _check_storage(name, getattr(self, name))
        has_url = self.checkpoint_url is None or is_url(self.checkpoint_url)
        check_value(self, "checkpoint_url", has_url, "a URL, such as s3://bucket/runs or file:///shared/runs, or null")
        check_features(self, (LOCAL_DISKS,))
        check_resume(self)
        last = self.last_step
        exist = all(step >= 1 and (last is None or step <= last) for step in self.profile_steps)
        check_value(self, "profile_steps", exist, f"steps from 1 to the last one{'' if last is None else f' ({last})'}")

    @property
    def last_step(self) -> int | None:
        """The last step, if the configuration alone says it."""
        return None

    @property
    def shared_folder(self) -> Path | None:
        """The folder that all hosts share; None with local disks."""
        return None if self.local_disks else Path(self.output_dir).absolute()


LOCAL_DISKS = Feature(
    key="local_disks",
    rules=(
        Rule(field="ray_address", allowed="the address of a cluster", holds=lambda c: c.ray_address is not None),
        Rule(field="checkpoint_url", allowed="the URL of a storage", holds=lambda c: c.checkpoint_url is not None),
        Rule(
            field="resume_from",
            allowed="the URL of a run below a checkpoint_url, or null",
            holds=lambda c: c.resume_from is None or is_url(c.resume_from),
        ),
        Rule(
            field="profile_steps",
            allowed="none",
            holds=lambda c: not c.profile_steps,
            why="so each host would keep its own traces",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainingConfig):
    """The reinforcement-learning loop."""

    total_training_steps: int | None = None
    """Number of steps; a step is rollout, scoring, update and weight sync. null: one epoch, as many as see every prompt
    of `data.train` once."""
    max_staleness: int = 0
    """Policy versions by which the oldest token of a sample may be behind the weights that train on it. 0: rollout and
    training alternate. 1 and more: servers generate for that many later steps while the trainer learns (with
    over-sampling for one less), and `algorithm.rollout_correction` corrects for it."""
    colocate: bool = True
    """Rollout servers share the trainer's GPUs (true) or use the GPUs after them (false). Ignored on the CPU."""
    take_turns: Literal["never", "servers", "both"] | None = None
    """Division of a GPU's memory between ranks and servers. `never`: side by side. `servers`: servers sleep while
    the trainer works. `both`: besides, optimizer states wait in host memory while the servers generate.
    null: side by side if that fits, else in turns."""
    max_server_restarts: int = 3
    """Restarts of each rollout server that died or hangs; it gets the current weights before it serves. Servers of a
    teacher are restarted as often. With 0 a dead server ends the run. Existing servers (`rollout.urls`) are never
    restarted."""
    keep_servers: float = 0.0
    """Minutes for which the servers, and new processes of driver and ranks, wait after the run for the next run of the
    same model and keys. 0: they end with the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "total_training_steps")
        check_at_least(0, self, "max_server_restarts", "max_staleness", "keep_servers")

    @property
    def last_step(self) -> int | None:
        """`total_training_steps`."""
        return self.total_training_steps

    @property
    def num_steps(self) -> int:
        """`total_training_steps`, once it is decided."""
        assert self.total_training_steps is not None
        return self.total_training_steps

    @property
    def takes_turns(self) -> bool:
        """True if servers sleep while the trainer works."""
        return self.take_turns in ("servers", "both")


UNSERVED: Mapping[str, Any] = {"router_replay": "off", "match_servers": False}
"""Settings that make an engine agree with its rollout servers, and their values for a model without servers."""


def check_unserved(config: object, section: str) -> None:
    """Raises InputError if the engine of `section`, a model without servers, is to agree with some."""
    for name, off in UNSERVED.items():
        is_off = value_of(config, f"{section}.{name}") == off
        check_value(config, f"{section}.{name}", is_off, f"{str(off).lower()}: no servers compute this model")


STALENESS = Feature(
    key="trainer.max_staleness",
    rules=(
        only("trainer.take_turns", "never", None, why="so servers generate while the trainer works"),
        only("rollout.deterministic", False, why="so it depends on time which weights sample a token"),
        only(
            "sync.running_requests",
            "auto",
            "wait",
            when=lambda c: bool(c.rollout.urls),
            why="and existing servers (rollout.urls) do not label tokens with policy versions",
        ),
        only(
            "dynamic_sampling.max_rounds",
            0,
            when=lambda c: c.oversampling.extra_prompts > 0,
            why="so a step of oversampling.extra_prompts trains on the groups that end first",
            remedy="use one of the two",
        ),
        Rule(
            field="oversampling.extra_prompts",
            allowed="at most batch.train_batch_size",
            holds=lambda c: c.oversampling.extra_prompts <= c.batch.train_batch_size,
            why="so a step has to train on all that the last one left",
        ),
        only(
            "oversampling.partial_rollouts",
            True,
            when=lambda c: c.oversampling.extra_prompts > 0,
        ),
    ),
)
KEPT_SERVERS = Feature(
    key="trainer.keep_servers",
    rules=(
        Rule(
            field="model.path",
            allowed=f"a folder, not {BUILTIN_MODEL}, whose folder is a new one in every run",
            holds=lambda c: c.model.path != BUILTIN_MODEL,
        ),
        only("trainer.ray_address", None, why="as only this host's processes are kept"),
        only("trainer.take_turns", "never", None, why="as sleeping servers cannot be tried"),
        only("trainer.profile_steps", (), why="as servers write traces to the folder of their run"),
        only("rollout.urls", (), why="as servers of others stay anyway"),
        only("rollout.port", None, why="as the kept servers have theirs"),
        only("actor.lora", None, why="as the kept servers have the adapters of their run"),
    ),
)
TURNS = Feature(
    key="trainer.take_turns",
    is_on=lambda c: c.trainer.takes_turns,
    rules=(
        Rule(
            field="trainer.take_turns",
            allowed="never or null with trainer.colocate=false, where servers and ranks have GPUs of their own",
            holds=lambda c: c.trainer.colocate,
        ),
        Rule(
            field="trainer.take_turns",
            allowed="never or null with rollout.urls, whose servers others may use",
            holds=lambda c: not c.rollout.urls,
        ),
    ),
)
