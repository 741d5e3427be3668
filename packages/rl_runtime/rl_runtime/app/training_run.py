"""A started training run, with or without rollout: what each attempt after a loss of ranks gets, and how to resume."""

import json
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from ckpt import Checkpoint, CheckpointError, open_deepspeed
from ckpt.reader import CheckpointReader
from ds_engine.model.trial import one_thread
from rl_data import ImageFiles
from run_kit import RunFolder, RunStopped, StopRequest, Tracker, check_tracking
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import yaml_without_secrets
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.timing import Laps
from run_kit.tracking.metrics_table import atomic_write
from run_kit.tracking.run_folder import begun_s

from ..config import TrainingConfig
from ..errors import InputError
from ..job_config import JobConfig
from ..launch.placement import Placement
from ..launch.session import RankSession, SessionRecorder
from ..ranks.model_handle import ModelHandle
from ..resolve.resolved import ResolvedConfig
from ..supervised_job_config import SupervisedJobConfig
from ..training.checkpoints import RunCheckpoints, Stateful
from ..training.ledger import SampleLedger
from ..training.record import RunRecord
from ..training.run_files import WARM_START_MODEL, RunFiles, check_checkpoint_url, published_run
from ..training.supervised import train_supervised
from .identity import INPUTS_FILE, check_same_run, input_digests
from .inputs import Inputs
from .resume import find_checkpoint

AppConfig = JobConfig | SupervisedJobConfig
"""The configuration of a training app."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The result of an app's checks: devices, the checkpoint to resume from, lines for the user."""

    placement: Placement
    resume_from: Checkpoint | None
    """The checkpoint that the run resumes from; its files are verified."""
    lines: Sequence[str] = ()
    """Checkpoints and runs that `resume=auto` passed over, with reasons, what it downloaded, how the engines compute
    the model, and what the tries of rewards found."""
    inputs: Inputs | None = None
    """The loaded inputs; None: those of the built-in model, which the run writes into its folder."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """`input_digests`."""


def plan_run(
    config: AppConfig,
    placement: Placement,
    lines: Sequence[str],
    *,
    rows: Mapping[str, Sequence[object]],
    inputs: Inputs | None = None,
) -> JobPlan:
    """Checks the folders that the run writes to, and finds the checkpoint to resume from.

    Args:
        lines: of the other checks.
        rows: the loaded prompts and examples by the key of their files.

    Raises as `find_checkpoint` and `check_same_run`; InputError for a folder of `trainer.states_from` that is no
    DeepSpeed checkpoint.
    """
    check_tracking(config.tracking)
    check_checkpoint_url(config.trainer)
    skipped: list[str] = []
    resume_from = find_checkpoint(config.trainer, skipped.append)
    digests = input_digests(config, rows)
    if resume_from is not None:
        skipped += check_same_run(resume_from, config, digests, allows_changes=config.trainer.allow_changes)
    else:  # a resumed run does not read them
        roles = {"actor", *(model.section for model in config.models)} - {"engine"}
        check_states_from(config.trainer.states_from, roles, warm_start=config.first_stage.trains)
    return JobPlan(
        placement=placement, resume_from=resume_from, lines=(*skipped, *lines), inputs=inputs, digests=digests
    )


def check_states_from(folders: Mapping[str, str], roles: Collection[str], *, warm_start: bool = False) -> None:
    """Refuses states of a model that the run does not train, or of an actor that has a `warm_start`, and a folder that
    is no whole DeepSpeed checkpoint.

    Raises:
        InputError: with the key of the folder.
    """
    for role, folder in folders.items():
        key = f"trainer.states_from.{role}"
        if role not in roles:
            raise InputError("no such model", field=key, value=folder, allowed=", ".join(sorted(roles)))
        if warm_start and role == "actor":
            raise InputError("it would replace the weights of the warm start", field=key, value=folder, allowed="none")
        try:
            open_deepspeed(Path(folder)).check()
        except CheckpointError as error:
            raise InputError(error.problem or error.explanation, field=key, value=folder) from error


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A started run, from which its engines are built."""

    config: AppConfig
    session: RankSession
    tracker: Tracker
    inputs: Inputs
    folder: Path
    """The run folder."""
    resumed: Checkpoint | None
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the run's inputs, by key."""
    memory: MemorySampler
    """Memory of this process and its descendants."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Has the signal that ends the run after a step."""
    start: Laps = field(default_factory=Laps)
    """Seconds of the parts of the start."""
    files: RunFiles
    """Brings files to other hosts and to the storage."""

    @property
    def trainer(self) -> TrainingConfig:
        """The configuration section of every training app."""
        return self.config.trainer

    def handle(self, role: str, *, temperature: float = 1.0) -> ModelHandle:
        """The model of `role` on its ranks, without an engine yet."""
        return ModelHandle(
            self.session.ranks_of(role),
            role,
            self.config.batch,
            temperature=temperature,
            max_skipped_updates=self.trainer.max_skipped_updates,
            report=self.tracker.info,
            images=self.image_files,
        )

    @cached_property
    def image_files(self) -> ImageFiles | None:
        """The files of images of the run, which servers and ranks read."""
        return self.inputs.image_files(self.folder)

    @cached_property
    def model_path(self) -> str:
        """The folder to build the run's models from, which all ranks can read: the configured one, or the result of
        supervised fine-tuning, whose steps are taken first."""
        first, configured = self.config.first_stage, self.inputs.model_path
        if not first.trains:
            return self.for_ranks(configured)
        folder = self.warm_start_folder
        if folder.is_dir():  # the run continues after it has lost its ranks
            return self.for_ranks(folder)
        if self.resumed is not None:  # the copy of the resumed run; kept here too, for the next resume
            shutil.copytree(self.resumed.path.parent.parent / folder.name, folder)
        else:
            model = self.handle("actor")
            engine = replace(self.config.models[0].engine, optim=first.optim, router_replay="off")
            model.build(self.for_ranks(configured), engine, total_steps=first.steps)
            examples, log = self.inputs.demonstrations, self.tracker.log_supervised
            for step, stats in train_supervised(model, examples, first, seed=self.trainer.seed):
                log(step, {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr})
            model.export(str(folder), str(configured))
        self.files.add_model(folder)  # before the first checkpoint
        return self.for_ranks(folder)

    def for_ranks(self, folder: Path) -> str:
        """The path of a model folder that all ranks can read."""
        self.files.bring(folder, self.session.nodes)
        return str(folder)

    @property
    def warm_start_folder(self) -> Path:
        """The folder of the model after the warm start."""
        return self.folder / WARM_START_MODEL

    def checkpoints(self, roles: Mapping[str, ModelHandle], parts: Mapping[str, Stateful]) -> RunCheckpoints:
        """Saves and loads the engines of `roles` and the `parts` of the run."""
        sections = [m.section for m in self.config.models if m.engine.zero.offload.optimizer == "nvme"]
        nvme = f"{sections[0]}.zero.offload.optimizer is nvme, whose files no checkpoint holds" if sections else ""
        return RunCheckpoints(
            self.folder / "checkpoints",
            self.trainer,
            self.session.rank_groups,
            roles=roles,
            parts=parts,
            config=yaml_without_secrets(self.config),
            inputs=self.digests,
            unsavable=nvme,  # `check_states` refuses it with save_freq
            files=self.files,
        )

    def record(self, ledger: SampleLedger | None = None) -> RunRecord:
        """The record of the steps: metrics, memory, traces; with `ledger` also the samples of a run with rollout."""
        profiler = StepProfiler(SessionRecorder(self.session), self.folder / "profile", self.trainer.profile_steps)
        return RunRecord(self.tracker, self.memory, profiler, self.session, ledger)


def create_run_folder(trainer: TrainingConfig, resumed: Checkpoint | None) -> RunFolder:
    """A new folder with the name of the experiment, and of a later time than the run that is resumed."""
    earliest = 0.0 if resumed is None else begun_s(resumed.path.parents[1]) + 1
    return RunFolder.create(
        trainer.output_dir,
        trainer.experiment,
        private=trainer.private_output,
        now=lambda: max(time.time(), earliest),
    )


@contextmanager
def open_run(
    run: RunFolder, resolved: ResolvedConfig[Any], plan: JobPlan, *, num_steps: int
) -> Iterator[tuple[Tracker, MemorySampler]]:
    """The tracker of a new run folder, and the memory of this process, which computes on one thread.

    An error that ends the run gets the command that resumes it, if there is a checkpoint.
    """
    config: AppConfig = resolved.config
    trainer = config.trainer
    former = None if plan.resume_from is None else plan.resume_from.path.parents[1]
    atomic_write(run.path / INPUTS_FILE, json.dumps(dict(plan.digests), indent=1) + "\n")
    with (
        one_thread(),  # ranks and servers need the cores
        MemorySampler() as memory,
        Tracker(run, config, num_steps=num_steps, comment=resolved.comment(), resumes=former) as tracker,
    ):
        try:
            yield tracker, memory
        except Exception as error:
            if command := resume_command(run, trainer):
                error.add_note(command)
            raise


def end_stopped(run: RunFolder, tracker: Tracker, trainer: TrainingConfig, signal: Signals, where: str) -> NoReturn:
    """Says that a signal ended the run after step `where`, and how to resume it. Raises RunStopped."""
    tracker.info(f"stopped by {signal.name} after step {where}")
    tracker.info(resume_command(run, trainer) or "There is no checkpoint to resume from.")
    raise RunStopped(signal)


def resume_command(run: RunFolder, trainer: TrainingConfig) -> str:
    """A sentence with the command that resumes the run; empty if there is no checkpoint, or its storage is away."""
    where, steps = str(run.path), CheckpointReader(run.path / "checkpoints").steps()
    if (remote := published_run(trainer, run.path.name)) is not None:
        with suppress(Exception):  # every storage has classes of its own
            where, steps = remote.url, remote.steps()
    if not steps:
        return ""
    command = INVOKED_AS.get() or "APP"
    return (
        f"To resume after step {max(steps)}: {command} config={shlex.quote(str(run.config_file))} "
        f"trainer.resume=auto trainer.resume_from={shlex.quote(where)}"
    )
