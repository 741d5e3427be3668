"""One reinforcement-learning run from its configuration to its run folder; the app brings the algorithm.

An app is `run_job(config, check(config), compose)`: `compose` builds the engines it trains and hands back what one step
does with scored samples.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ckpt import Checkpoint
from ds_engine import EngineConfig, Head
from rl_core import BatchLayout, batch_layout
from rl_data import PromptSampler
from run_kit.config.loader import to_yaml
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.tracking import RunFolder, Tracker, check_tracking

from ..launch.placement import Placement
from ..launch.reachability import resolve_sync_transport
from ..launch.session import Session, open_session, plan_session
from ..ranks.environment import prepare_driver
from ..ranks.model_handle import ModelHandle
from ..rollout.phase import RolloutPhase
from ..rollout.scoring import Scorer
from ..rollout.servers import RolloutServers
from ..training.checkpoints import RunCheckpoints, Stateful
from ..training.loop import Learn, LoopResult, TrainingLoop
from ..training.supervised import train_supervised
from .inputs import Inputs, load_inputs
from .job_config import JobConfig, without_secrets
from .preflight import (
    check_adapters,
    check_engine,
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
    """What an app adds to the loop."""

    roles: Mapping[str, ModelHandle]
    """The trained engines, "actor" among them: saved, resumed."""
    learn: Learn
    """One step on scored samples; returns its metrics."""
    state: Mapping[str, Stateful] = field(default_factory=dict)
    """What else a resumed run goes on from, such as a KL controller; JSON-able states."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `compose` builds its engines from."""

    config: JobConfig
    session: Session
    tracker: Tracker
    inputs: Inputs
    folder: Path
    resumed: Checkpoint | None

    @cached_property
    def model_path(self) -> str:
        """The folder of the model that the run starts from: the given one, or that after the warm start on it."""
        warm_start = self.config.warm_start
        if not warm_start.steps:
            return str(self.inputs.model_path)
        warm = self.folder / "warm_start_model"
        if self.resumed is not None:  # what the run it goes on from started with; kept here too, for the next resume
            earlier = self.resumed.path.parent.parent / warm.name
            shutil.copytree(earlier, warm)
            return str(warm)
        model = ModelHandle(self.session.ranks_of("actor"), "actor", self.config.batch)
        model.build(
            str(self.inputs.model_path),
            replace(self.config.actor, optim=warm_start.optim),
            total_steps=warm_start.steps,
        )
        train_supervised(
            model,
            self.inputs.demonstrations,
            warm_start,
            seed=self.config.trainer.seed,
            on_step=self.tracker.log_supervised,
        )
        model.export(str(warm), str(self.inputs.model_path))
        return str(warm)

    def trained(self, name: str, engine: EngineConfig, *, num_updates: int, head: Head = "lm") -> ModelHandle:
        """The engine `name` with an optimizer, on every rank."""
        role = ModelHandle(
            self.session.ranks_of(name), name, self.config.batch, temperature=self.config.sampling.temperature
        )
        role.build(self.model_path, engine, total_steps=num_updates, head=head)
        return role

    def frozen(self, name: str, engine: EngineConfig) -> ModelHandle:
        """The engine `name` without one: a reference model."""
        role = ModelHandle(
            self.session.ranks_of(name), name, self.config.batch, temperature=self.config.sampling.temperature
        )
        role.build_frozen(self.model_path, engine)
        return role


def job_layout(
    config: JobConfig, *, section: str = "actor", engine: EngineConfig | None = None, num_ranks: int | None = None
) -> BatchLayout:
    """How the batch divides over mini batches and the ranks of `engine` (by default the actor's), dp x sp of them.

    Args:
        section: where `engine` stands in the configuration.
        num_ranks: how many ranks the engine lives on; by default the actor's.

    Raises:
        rl_core.BatchError: it does not; names sizes that would.
        InputError: the ranks do not divide by sequence_parallel.
    """
    engine = engine or config.actor
    num_ranks = num_ranks or config.trainer.num_ranks
    check_sequence_parallel(engine, section=section, num_ranks=num_ranks)
    sp = engine.sequence_parallel
    return batch_layout(config.batch, samples_per_prompt=config.sampling.n, dp=num_ranks // sp, sp=sp)


def check_job(
    config: JobConfig, engines: Mapping[str, tuple[EngineConfig, int]], *, own_ranks: Mapping[str, int] | None = None
) -> Placement:
    """Refuses what cannot work before any process starts; which process runs on which device.

    Args:
        engines: configuration section -> (trained engine, its optimizer steps over the whole run).
        own_ranks: section -> how many ranks compute for that engine alone.
    """
    own_ranks = own_ranks or {}
    prepare_driver(config.trainer.device)
    for section, (engine, _) in engines.items():
        job_layout(config, section=section, engine=engine, num_ranks=own_ranks.get(section))
    check_tracking(config.tracking)
    placement = plan_session(config.trainer, config.rollout, own_ranks)
    check_functions(config.episode, config.reward)
    check_prompt_files(config.model, config.data, any_source=bool(config.reward.function or config.reward.url))
    check_supervised(config.model, config.data, config.warm_start, section="warm_start")
    for section, (engine, num_updates) in engines.items():
        check_engine(engine, section=section, num_updates=num_updates, is_saved=config.trainer.save_freq > 0)
    validates = config.data.val or not config.data.train
    samplings = [config.sampling, config.validation] if validates else [config.sampling]
    check_lengths(config.rollout, config.data, samplings)
    check_adapters(config.actor, config.rollout, config.sync)
    check_servers(config.model, config.rollout, config.sync, config.trainer, placement)
    find_checkpoint(config.trainer)
    return placement


def run_job(config: JobConfig, placement: Placement, compose: Callable[[Job], Algorithm]) -> None:
    """Runs the job into a new run folder and prints what it reached."""
    run = RunFolder.create(config.trainer.output_dir, config.trainer.experiment)
    with (
        MemorySampler(interval_s=config.tracking.memory_interval_s) as memory,
        Tracker(run, without_secrets(config), num_steps=config.trainer.total_training_steps) as tracker,
    ):
        tracker.info(f"run folder {run.path}; starting {config.trainer.num_ranks} ranks and the servers")
        inputs = load_inputs(
            config.model, config.data, config.warm_start, config.task, folder=run.path, seed=config.trainer.seed
        )
        with open_session(
            placement,
            trainer=config.trainer,
            rollout=replace(config.rollout, control_routes=True) if _cuts_short(config) else config.rollout,
            model_path=str(inputs.model_path),
            log_dir=run.path / "servers",
            sync=config.sync,
        ) as session:
            job = Job(
                config=config,
                session=session,
                tracker=tracker,
                inputs=inputs,
                folder=run.path,
                resumed=find_checkpoint(config.trainer),
            )
            result = _train(job, compose(job), memory)
        tracker.summary(result)


def _cuts_short(config: JobConfig) -> bool:
    """Whether the servers must be able to hand back responses that are not finished."""
    return config.oversampling.extra_prompts > 0 and config.oversampling.keep_unfinished


def _train(job: Job, algorithm: Algorithm, memory: MemorySampler) -> LoopResult:
    """The steps, then the export."""
    config, session, inputs = job.config, job.session, job.inputs
    actor = algorithm.roles["actor"]
    sync = resolve_sync_transport(
        config.sync, trainer=config.trainer, rollout=config.rollout, on_gpu=session.placement.on_gpu
    )
    if sync != config.sync:
        job.tracker.info(f"servers on other hosts: weights go to them over {sync.transport}")
    session.servers.wait_ready()
    with (
        Scorer(config.reward) as scorer,
        RolloutServers(
            session.servers,
            session.client,
            actor,
            sync,
            max_restarts=config.trainer.max_server_restarts,
            report=job.tracker.info,
            adapters_alone=config.rollout.max_lora_rank is not None,
        ) as servers,
    ):
        sampler = PromptSampler(len(inputs.train_prompts), seed=config.trainer.seed, shuffle=config.data.shuffle)
        rollout = RolloutPhase(
            session.client,
            inputs.tokenizer,
            scorer=scorer,
            seed=config.trainer.seed,
            episode=config.episode,
            oversampling=config.oversampling,
        )
        checkpoints = RunCheckpoints(
            job.folder / "checkpoints",
            config.trainer,
            session.rank_groups,
            roles=algorithm.roles,
            parts={"sampler": sampler, "rollout": rollout, **algorithm.state},
            config=to_yaml(without_secrets(config)),
        )
        loop = TrainingLoop(
            trainer=config.trainer,
            sampling=config.sampling,
            validation=config.validation,
            train_batch_size=config.batch.train_batch_size,
            train_prompts=inputs.train_prompts,
            val_prompts=inputs.val_prompts,
            sampler=sampler,
            session=session,
            servers=servers,
            rollout=rollout,
            tracker=job.tracker,
            memory=memory,
            profiler=StepProfiler(session.recorder, job.folder / "profile", config.trainer.profile_steps),
            checkpoints=checkpoints,
            resumed=job.resumed,
        )
        result = loop.run(algorithm.learn)
    if config.trainer.export_model:
        actor.export(str(job.folder / "model"), job.model_path)
    return result
