"""Runs a job: starts its processes, trains, starts lost ranks again, and writes its run folder."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from rl_data import PromptSampler
from run_kit import StopRequest
from run_kit.timing import Laps

from ..job_config import JobConfigT
from ..launch.ahead import SessionKeys
from ..launch.session import open_session
from ..ranks.model_handle import ModelHandle
from ..resolve.job import resolve_traces
from ..resolve.resolved import ResolvedConfig
from ..rollout.ahead import RolloutsAhead
from ..rollout.memory_turns import MemoryTurns, put_to_sleep, sleep_level
from ..rollout.phase import RolloutPhase
from ..rollout.schedule import Schedule
from ..rollout.scoring import Scorer
from ..rollout.servers import RolloutServers
from ..rollout.step_rollouts import StepRollouts
from ..training.learning_signal import LearningSignal
from ..training.ledger import SampleLedger
from ..training.loop import LoopResult, Restart, TrainingLoop
from ..training.reward_model import RewardModel
from ..training.run_files import open_run_files
from . import kept
from .inputs import chat_format, load_inputs
from .job import Algorithm, Job
from .restarts import Restarts
from .training_run import JobPlan, create_run_folder, end_stopped, open_run


def run_job(resolved: ResolvedConfig[JobConfigT], plan: JobPlan, compose: Callable[[Job], Algorithm]) -> None:
    """Runs the job into a new run folder: processes, engines, training loop, export, summary.

    SIGINT, SIGTERM and SIGUSR1 end it after the current step, with a checkpoint; a second one ends it at once.

    Args:
        resolved: the configuration, without open settings; those that were chosen are printed, and explained in
            config.yaml.

    Raises:
        run_kit.RunStopped: a signal ended the run before its last step; the exit code is 128 + the signal.
    """
    kept.end_rehearsal()
    start, stop = Laps(), StopRequest()
    run = create_run_folder(resolved.config.trainer, plan.resume_from)
    resolved = resolve_traces(resolved, run.path)
    config, trainer = resolved.config, resolved.config.trainer
    num_steps = trainer.num_steps
    with open_run(run, resolved, plan, num_steps=num_steps) as (tracker, memory):
        tracker.info(f"run folder {run.path}; starting {config.trainer.rank_count} ranks and the servers")
        if why := resolved.reasons.get("trainer.total_training_steps"):
            tracker.info(f"{num_steps} steps: {why}")
        for line in (*resolved.lines(), *plan.lines):
            tracker.info(line)
        inputs = plan.inputs or load_inputs(config, config.warm_start, folder=run.path, seed=trainer.seed)
        for line in inputs.lines:
            tracker.info(line)
        start.mark("inputs")
        with open_run_files(trainer, run.path, tracker.info) as files:
            files.bring(inputs.model_path, plan.placement.nodes)  # the servers load it
            keys = SessionKeys.of(plan.placement, config.trainer, config.rollout, str(inputs.model_path))
            with open_session(keys, log_dir=run.path / "servers", mark=start.mark) as session:
                if session.note:
                    tracker.info(session.note)
                job = Job(
                    config=config,
                    session=session,
                    tracker=tracker,
                    inputs=inputs,
                    folder=run.path,
                    resumed=plan.resume_from,
                    digests=plan.digests,
                    memory=memory,
                    stop=stop,
                    start=start,
                    files=files,
                )
                result = Restarts(job).attempts(partial(_run_attempt, compose=compose))
                if trainer.keep_servers and result.stopped_after is None:
                    tracker.info(kept.keep(keys, session, run=run.path))
            # Ranks and servers are gone; uploads continue to the end of the outer block.
            tracker.summary(before=result.accuracy_before, after=result.accuracy_after)
        if stop.signal and result.stopped_after is not None:
            end_stopped(run, tracker, trainer, stop.signal, f"{result.stopped_after}")


def _run_attempt(job: Job, restart: Restart | None, *, compose: Callable[[Job], Algorithm]) -> LoopResult:
    if job.config.trainer.takes_turns:  # before the models need the servers' memory
        job.session.wait_ready()
        job.start.mark("servers")
        put_to_sleep(job.session.servers, level=sleep_level(job.config.rollout))
    algorithm = compose(job)
    reward_model = job.reward_model()
    job.start.mark("models")
    job.session.wait_ready()
    job.start.mark("servers, which started with the ranks,")
    if restart is None:
        job.tracker.info(f"ready after {job.start}")
    result = _train(job, algorithm, reward_model, restart)
    if job.config.trainer.export_model and result.stopped_after is None:
        # A rank may have died after the folder was complete.
        algorithm.roles["actor"].export(str(job.folder / "model"), job.model_path, overwrite=True)
    return result


def _train(job: Job, algorithm: Algorithm, reward_model: RewardModel | None, restart: Restart | None) -> LoopResult:
    """All steps of the training loop."""
    with (
        Scorer(job.config.reward, report=job.tracker.info, printed_dir=job.folder / "rewards") as scorer,
        _servers(job, algorithm.roles["actor"]) as servers,
        _rollouts(job, scorer, servers) as rollouts,
    ):
        loop = TrainingLoop(
            job.config.trainer,
            rollouts=rollouts,
            servers=servers,
            checkpoints=job.checkpoints(algorithm.roles, {**rollouts.parts, **algorithm.state}),
            record=job.record(SampleLedger(job.folder, job.resumed)),
            reward_model=reward_model,
            signal=_signal(job, scorer),
            is_exact=job.config.actor.match_servers,
        )
        return loop.run(algorithm.learn, job.resumed, stop=job.stop, restart=restart)


def _signal(job: Job, scorer: Scorer) -> LearningSignal | None:
    """The warning of scores that teach nothing; None for a run that does not learn from scores."""
    algorithm = getattr(job.config, "algorithm", None)
    if algorithm is None or not algorithm.learns_from_scores:
        return None
    return LearningSignal(
        job.tracker.info,
        compares_group=algorithm.compares_group,
        finds_answers=lambda samples: job.session.client.run(scorer.finds_answers(samples)),
        read_answer=scorer.read_answer,
    )


def _servers(job: Job, actor: ModelHandle) -> RolloutServers:
    """The rollout servers, to which the actor's weights are pushed."""
    config, session = job.config, job.session
    return RolloutServers(
        session.servers,
        session.client,
        actor,
        config.sync,
        max_restarts=config.trainer.max_server_restarts,
        report=job.tracker.info,
        adapters_alone=config.rollout.max_lora_rank is not None,
        pushes_base=config.rollout.quantization == "none",
        holds_requests=config.trainer.max_staleness > 0,
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
        level=sleep_level(job.config.rollout),
        report=job.tracker.info,
    )


def _rollouts(
    job: Job, scorer: Scorer, servers: RolloutServers
) -> AbstractContextManager[StepRollouts | RolloutsAhead]:
    """The prompts of the run and how they are sampled and scored: step by step, or ahead of the trainer."""
    config, inputs = job.config, job.inputs
    rollouts = StepRollouts(
        phase=RolloutPhase(
            job.session.client,
            inputs.tokenizer,
            scorer=scorer,
            seed=config.trainer.seed,
            episode=config.episode,
            chat=chat_format(inputs, config.data) if config.episode.has_process else None,
            max_prompt_tokens=config.data.max_prompt_length,
            oversampling=config.oversampling,
            extra_rollout=config.extra_rollout,
            images=job.image_files,
        ),
        sampler=PromptSampler(len(inputs.train_prompts), seed=config.trainer.seed, shuffle=config.data.shuffle),
        train_prompts=inputs.train_prompts,
        val_prompts=inputs.val_prompts,
        train_batch_size=config.batch.train_batch_size,
        sampling=config.sampling,
        dynamic_sampling=config.dynamic_sampling,
        validation=config.validation,
    )
    if not config.trainer.max_staleness:
        return nullcontext(rollouts)
    schedule = Schedule(
        batch_size=config.batch.train_batch_size,
        extra_groups=config.oversampling.extra_prompts,
        max_staleness=config.trainer.max_staleness,
        last_step=config.trainer.num_steps,
        replaces=config.dynamic_sampling.max_rounds > 0,
    )
    return RolloutsAhead(rollouts, job.session.client, schedule, check=servers.check)
