"""Runs one reinforcement-learning job from its configuration to its run folder; the app provides the algorithm.

An app is `run_job(config, check(config), compose)`: `check` is `check_job` with the app's engines, and `compose` builds
these engines and returns the update of one step.
"""

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ckpt import Checkpoint
from ckpt.reader import CheckpointReader
from ds_engine import EngineConfig, Head
from rl_core import BatchLayout, batch_layout
from rl_data import PromptSampler
from rollout_vllm import RolloutConfig
from rollout_vllm.servers import control
from run_kit import RunFolder, Tracker, check_tracking
from run_kit.cli import INVOKED_AS
from run_kit.config.loader import to_yaml
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.timing import Laps

from ..launch.placement import Placement
from ..launch.reachability import resolve_sync_transport
from ..launch.session import Session, open_session, plan_session
from ..ranks.environment import prepare_driver
from ..ranks.model_handle import ModelHandle, Reference, WithoutAdapters
from ..rollout.memory_turns import MemoryTurns, SleepLevel, sleep_level
from ..rollout.phase import RolloutPhase
from ..rollout.scoring import Scorer, rewards_of_rows
from ..rollout.servers import RolloutServers
from ..rollout.step_rollouts import StepRollouts
from ..training.checkpoints import RunCheckpoints, Stateful
from ..training.loop import Learn, LoopResult, TrainingLoop
from ..training.record import RunRecord
from ..training.supervised import train_supervised
from .choices import Choice
from .inputs import Inputs, chat_format, load_inputs
from .job_config import JobConfig, JobConfigT, without_secrets
from .preflight import (
    check_adapters,
    check_architectures,
    check_engine,
    check_environment,
    check_functions,
    check_lengths,
    check_prompt_files,
    check_sequence_parallel,
    check_servers,
    check_supervised,
    find_checkpoint,
)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The models and the update of an app."""

    roles: Mapping[str, ModelHandle]
    """The trained models by role, "actor" among them; saved and resumed."""
    learn: Learn
    """The update of one step on scored samples; returns its metrics."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """Further state that is saved and resumed, such as a KL controller; JSON-able."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The result of `check_job`: devices, the checkpoint to resume from, and how models are computed."""

    placement: Placement
    resume_from: Checkpoint | None
    """The checkpoint that the run resumes from; its files are verified."""
    skipped: Sequence[str] = ()
    """Checkpoints and runs that `resume=auto` passed over, with reasons, one a line."""
    architectures: Sequence[str] = ()
    """How the engines compute the model, one line each."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A started run, from which `compose` builds its engines."""

    config: JobConfig
    session: Session
    tracker: Tracker
    inputs: Inputs
    folder: Path
    """The run folder."""
    resumed: Checkpoint | None

    @cached_property
    def model_path(self) -> str:
        """The model folder that the run starts from: the configured one, or the result of the warm start."""
        if not self.config.warm_start.steps:
            return str(self.inputs.model_path)
        warm = self.folder / "warm_start_model"
        if self.resumed is not None:  # the copy of the resumed run; kept here too, for the next resume
            shutil.copytree(self.resumed.path.parent.parent / warm.name, warm)
        else:
            self._warm_start(warm)
        return str(warm)

    def trained(self, role: str, engine: EngineConfig, *, num_updates: int, head: Head = "lm") -> ModelHandle:
        """Builds the engine of `role` with an optimizer on its ranks."""
        model = self._handle(role)
        model.build(self.model_path, engine, total_steps=num_updates, head=head)
        return model

    def frozen(self, role: str, engine: EngineConfig) -> ModelHandle:
        """Builds the engine of `role` without an optimizer: a reference model."""
        model = self._handle(role)
        model.build_frozen(self.model_path, engine)
        return model

    def reference(self, actor: ModelHandle) -> Reference:
        """The model that the run starts from, for a KL term: the actor without its LoRA adapters, or a frozen engine.

        The actor's base weights are those of `model_path` and never change, so that with LoRA nothing is built.
        """
        if self.config.actor.lora is not None:
            self.tracker.info("reference model: the actor's engine with its LoRA adapters off; no second copy")
            return WithoutAdapters(actor)
        self.tracker.info("reference model: a frozen copy on the actor's ranks")
        return self.frozen("ref", self.config.actor)

    def _handle(self, role: str, *, temperature: float | None = None) -> ModelHandle:
        """`temperature`: default that of the rollout."""
        config = self.config
        return ModelHandle(
            self.session.ranks_of(role),
            role,
            config.batch,
            temperature=temperature or config.sampling.temperature,
            max_skipped_updates=config.trainer.max_skipped_updates,
            report=self.tracker.info,
        )

    def _warm_start(self, folder: Path) -> None:
        """Trains on the demonstrations and writes the model to `folder`."""
        config, inputs = self.config.warm_start, self.inputs
        model = self._handle("actor", temperature=1.0)
        model.build(str(inputs.model_path), replace(self.config.actor, optim=config.optim), total_steps=config.steps)
        seed = self.config.trainer.seed
        train_supervised(model, inputs.demonstrations, config, seed=seed, on_step=self.tracker.log_supervised)
        model.export(str(folder), str(inputs.model_path))


def job_layout(
    config: JobConfig, *, section: str = "actor", engine: EngineConfig | None = None, num_ranks: int | None = None
) -> BatchLayout:
    """How a train batch divides into mini batches and over the dp x sp ranks of `engine` (default: the actor's).

    Args:
        section: the configuration section of `engine`.
        num_ranks: the number of ranks of the engine; default: the actor's.

    Raises:
        rl_core.BatchError: the sizes do not divide; names sizes that do.
        InputError: the number of ranks is no multiple of sequence_parallel.
    """
    engine = engine or config.actor
    num_ranks = num_ranks or config.trainer.rank_count
    check_sequence_parallel(engine, section=section, num_ranks=num_ranks)
    sp = engine.sequence_parallel
    return batch_layout(config.batch, samples_per_prompt=config.sampling.n, dp=num_ranks // sp, sp=sp)


def check_job(
    config: JobConfig, engines: Mapping[str, tuple[EngineConfig, int]], *, own_ranks: Mapping[str, int] | None = None
) -> JobPlan:
    """Refuses settings that cannot work before any process starts; plans the devices and the resume.

    Args:
        engines: configuration section -> (trained engine, its optimizer steps over the whole run).
        own_ranks: section -> number of ranks that compute for that engine alone.
    """
    own_ranks = own_ranks or {}
    prepare_driver(config.trainer.device)
    for section, (engine, _) in engines.items():
        job_layout(config, section=section, engine=engine, num_ranks=own_ranks.get(section))
    check_tracking(config.tracking)
    placement = plan_session(config.trainer, config.rollout, own_ranks)
    check_functions(config.episode, config.reward)
    is_scored_alone = config.episode.environment is not None and not config.reward.terms
    check_prompt_files(config.model, config.data, rewards=() if is_scored_alone else rewards_of_rows(config.reward))
    check_environment(config.episode, config.model, config.data, config.task, seed=config.trainer.seed)
    check_supervised(config.model, config.data, config.warm_start, section="warm_start")
    for section, (engine, num_updates) in engines.items():
        check_engine(engine, section=section, num_updates=num_updates, is_saved=config.trainer.save_freq > 0)
    tried = {section: engine for section, (engine, _) in engines.items()}
    architectures = check_architectures(config.model, tried, on_gpu=placement.on_gpu)
    validates = config.data.val or not config.data.train
    samplings = [config.sampling, config.validation] if validates else [config.sampling]
    check_lengths(config.rollout, config.data, samplings)
    check_adapters(config.actor, config.rollout, config.sync)
    check_servers(config.model, config.rollout, config.sync, config.trainer, placement)
    skipped: list[str] = []
    resume_from = find_checkpoint(config.trainer, skipped.append)
    return JobPlan(placement=placement, resume_from=resume_from, skipped=skipped, architectures=architectures)


def run_job(
    config: JobConfigT,
    plan: JobPlan,
    compose: Callable[[Job], Algorithm],
    *,
    choice: Choice[JobConfigT] | None = None,
) -> None:
    """Runs the job into a new run folder: processes, engines, training loop, export, summary.

    Args:
        choice: the settings of `config` that were chosen, which are printed and explained in config.yaml.
    """
    chosen = choice or Choice(config=config)
    trainer = config.trainer
    start = Laps()
    run = RunFolder.create(trainer.output_dir, trainer.experiment, private=trainer.private_output)
    with (
        MemorySampler(interval_s=config.tracking.memory_interval_s) as memory,
        Tracker(
            run, without_secrets(config), num_steps=trainer.total_training_steps, comment=chosen.comment()
        ) as tracker,
        _resume_command(run),
    ):
        tracker.info(f"run folder {run.path}; starting {config.trainer.rank_count} ranks and the servers")
        for line in (*chosen.lines(), *plan.skipped, *plan.architectures):
            tracker.info(line)
        inputs = load_inputs(
            config.model, config.data, config.warm_start, config.task, folder=run.path, seed=config.trainer.seed
        )
        start.mark("inputs")
        with open_session(
            plan.placement,
            trainer=config.trainer,
            rollout=_rollout_config(config, run.path),
            model_path=str(inputs.model_path),
            log_dir=run.path / "servers",
            sync=config.sync,
        ) as session:
            start.mark("ranks")
            if config.trainer.takes_turns:  # before the models need the servers' memory
                session.servers.wait_ready()
                control.sleep(session.servers.endpoints, level=_sleep_level(config))
                start.mark("servers")
            job = Job(
                config=config,
                session=session,
                tracker=tracker,
                inputs=inputs,
                folder=run.path,
                resumed=plan.resume_from,
            )
            algorithm = compose(job)
            start.mark("models")
            if not config.trainer.takes_turns:
                session.servers.wait_ready()
                start.mark("servers, which started with the ranks,")
            tracker.info(f"ready after {start}")
            result = _train(job, algorithm, memory)
            if config.trainer.export_model:
                algorithm.roles["actor"].export(str(run.path / "model"), job.model_path)
        tracker.summary(result)


@contextmanager
def _resume_command(run: RunFolder) -> Iterator[None]:
    """Adds the command that resumes the run to an error that ends it, if there is a checkpoint."""
    try:
        yield
    except Exception as error:
        if steps := CheckpointReader(run.path / "checkpoints").steps():
            command, folder = INVOKED_AS.get() or "APP", shlex.quote(str(run.path))
            error.add_note(
                f"To resume after step {max(steps)}: {command} config={shlex.quote(str(run.config_file))} "
                f"trainer.resume=auto trainer.resume_from={folder}"
            )
        raise


def _train(job: Job, algorithm: Algorithm, memory: MemorySampler) -> LoopResult:
    """All steps of the training loop."""
    config, session = job.config, job.session
    profiler = StepProfiler(session.recorders, job.folder / "profile", config.trainer.profile_steps)
    scoring = Scorer(config.reward, report=job.tracker.info, printed_dir=job.folder / "rewards")
    with scoring as scorer, _servers(job, algorithm.roles["actor"]) as servers:
        rollouts = _rollouts(job, scorer)
        checkpoints = RunCheckpoints(
            job.folder / "checkpoints",
            config.trainer,
            session.rank_groups,
            roles=algorithm.roles,
            parts={"sampler": rollouts.sampler, "rollout": rollouts.phase, **algorithm.state},
            config=to_yaml(without_secrets(config)),
        )
        loop = TrainingLoop(
            config.trainer,
            rollouts=rollouts,
            servers=servers,
            checkpoints=checkpoints,
            record=RunRecord(job.tracker, memory, profiler, session),
        )
        return loop.run(algorithm.learn, job.resumed)


def _rollout_config(config: JobConfig, run: Path) -> RolloutConfig:
    """Partial rollouts need servers that can return unfinished responses; turns those that can sleep; traced steps
    those that trace themselves."""
    rollout = replace(config.rollout, sleep_mode=config.rollout.sleep_mode or config.trainer.takes_turns)
    if config.oversampling.extra_prompts > 0 and config.oversampling.partial_rollouts:
        rollout = replace(rollout, control_routes=True)
    if config.trainer.profile_steps and config.trainer.ray_address is None and not rollout.urls:
        rollout = replace(rollout, profile_dir=rollout.profile_dir or str(run / "profile" / "servers"))
    return rollout


def _servers(job: Job, actor: ModelHandle) -> RolloutServers:
    """The rollout servers with the transport that reaches them."""
    config, session = job.config, job.session
    sync = resolve_sync_transport(
        config.sync, trainer=config.trainer, rollout=config.rollout, on_gpu=session.placement.on_gpu
    )
    if sync != config.sync:
        job.tracker.info(f"servers on other hosts: weights are sent over {sync.transport}")
    return RolloutServers(
        session.servers,
        session.client,
        actor,
        sync,
        max_restarts=config.trainer.max_server_restarts,
        report=job.tracker.info,
        adapters_alone=config.rollout.max_lora_rank is not None,
        turns=_turns(job, actor) if config.trainer.takes_turns else None,
    )


def _turns(job: Job, actor: ModelHandle) -> MemoryTurns:
    """Turns of the servers, which sleep already, and the ranks."""
    session = job.session
    return MemoryTurns(
        session.client,
        session.rank_groups,
        pushed_role=actor.name,
        moves_states=job.config.trainer.take_turns == "both",
        level=_sleep_level(job.config),
        report=job.tracker.info,
    )


def _sleep_level(config: JobConfig) -> SleepLevel:
    return sleep_level(adapters_alone=config.rollout.max_lora_rank is not None)


def _rollouts(job: Job, scorer: Scorer) -> StepRollouts:
    """The prompts of the run and how they are sampled and scored."""
    config, inputs = job.config, job.inputs
    return StepRollouts(
        phase=RolloutPhase(
            job.session.client,
            inputs.tokenizer,
            scorer=scorer,
            seed=config.trainer.seed,
            episode=config.episode,
            chat=chat_format(inputs.tokenizer, config.data) if config.episode.environment is not None else None,
            oversampling=config.oversampling,
            greedy_baseline=config.greedy_baseline,
        ),
        sampler=PromptSampler(len(inputs.train_prompts), seed=config.trainer.seed, shuffle=config.data.shuffle),
        train_prompts=inputs.train_prompts,
        val_prompts=inputs.val_prompts,
        train_batch_size=config.batch.train_batch_size,
        sampling=config.sampling,
        dynamic_sampling=config.dynamic_sampling,
        validation=config.validation,
    )
