"""Runs supervised fine-tuning: starts its ranks, trains, starts lost ranks again, and writes its run folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ckpt import Checkpoint
from rl_data import Demonstration, PromptSampler, load_demonstrations
from run_kit import RunFolder, RunStopped, StopRequest, Tracker
from run_kit.config.redaction import yaml_without_secrets
from run_kit.memory import MemorySampler
from run_kit.profiling import StepProfiler
from run_kit.timing import Laps

from ..errors import InputError
from ..launch.placement import Placement
from ..launch.session import open_rank_session
from ..ranks.model_handle import ModelHandle
from ..training.checkpoints import RunCheckpoints
from ..training.held_out import HeldOut
from ..training.local_disks import LocalDisks
from ..training.loop import Restart
from ..training.record import RunRecord
from ..training.supervised_loop import Learn, SupervisedLoop, SupervisedResult
from ..training.uploads import open_uploader
from .choices import Choice
from .inputs import Inputs, load_inputs
from .preflight import check_optimizer_steps
from .restarts import Restarts
from .resume import check_steps_left
from .supervised_config import SupervisedJobConfig, SupervisedJobConfigT
from .training_run import TrainingRun, noting_resume_command, resume_command, resumed_folder, unsavable


@dataclass(frozen=True, kw_only=True)
class SupervisedPlan:
    """What the checks of an SFT app find out: devices, the checkpoint to resume from, lines for the user."""

    placement: Placement
    resume_from: Checkpoint | None
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class SupervisedRun(TrainingRun):
    """A started run of supervised fine-tuning."""

    config: SupervisedJobConfig
    train: Sequence[Demonstration]
    held_out: Sequence[Demonstration]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.supervised.num_steps(len(self.train))


def run_supervised(
    config: SupervisedJobConfigT, plan: SupervisedPlan, learn: Learn, *, choice: Choice[SupervisedJobConfigT]
) -> None:
    """Trains into a new run folder, and writes the model to `<run folder>/model`.

    SIGINT, SIGTERM and SIGUSR1 end it after the current step, with a checkpoint and the model; a second one ends it at
    once.

    Args:
        learn: one optimizer step on a batch of demonstrations.

    Raises:
        run_kit.RunStopped: a signal ended the run before its last step; the exit code is 128 + the signal.
    """
    trainer, stop, start = config.trainer, StopRequest(), Laps()
    run = RunFolder.create(trainer.output_dir, trainer.experiment, private=trainer.private_output)
    with (
        MemorySampler(interval_s=config.tracking.memory_interval_s) as memory,
        Tracker(
            run,
            config,
            num_steps=config.supervised.steps,
            comment=choice.comment(),
            resumes=resumed_folder(plan.resume_from),
        ) as tracker,
        noting_resume_command(run, trainer),
    ):
        tracker.info(f"run folder {run.path}; starting {trainer.rank_count} ranks")
        for line in (*choice.lines(), *plan.lines):
            tracker.info(line)
        inputs, train, held_out = _load(config, run.path)
        last_step = _check_steps(config, len(train), plan.resume_from)
        tracker.expect(last_step)
        tracker.info(_describe(config, len(train), len(held_out)))
        start.mark("inputs")
        with open_uploader(trainer, run.path, tracker.info) as uploader:
            with open_rank_session(plan.placement, trainer=trainer, fits=partial(_fits, config)) as session:
                start.mark("ranks")
                job = SupervisedRun(
                    config=config,
                    session=session,
                    tracker=tracker,
                    inputs=inputs,
                    folder=run.path,
                    resumed=plan.resume_from,
                    uploader=uploader,
                    local_disks=LocalDisks(trainer, run.path, tracker.info) if trainer.local_disks else None,
                    train=train,
                    held_out=held_out,
                )
                attempt = partial(_run_attempt, learn=learn, memory=memory, stop=stop, start=start)
                result = Restarts(job).attempts(attempt)
            if line := result.describe():
                tracker.info(line)
            tracker.summary()
        if stop.signal and result.last_step < last_step:
            tracker.info(f"stopped by {stop.signal.name} after step {result.last_step} of {last_step}")
            tracker.info(resume_command(run, trainer) or "There is no checkpoint to resume from.")
            raise RunStopped(stop.signal)


def hold_out(
    demonstrations: Sequence[Demonstration], size: int, *, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Divides demonstrations into those to train on and `size` held-out ones; both stay in order.

    Raises:
        InputError: nothing would be left to train on.
    """
    if size >= len(demonstrations):
        raise InputError(
            f"supervised.val_size is {size}, and there are {len(demonstrations)} demonstrations; allowed: fewer, so "
            "that some are left to train on"
        )
    # A stream of its own: the same demonstrations, whatever else the seed decides.
    chosen = set(np.random.default_rng([seed, 1]).permutation(len(demonstrations))[:size].tolist())
    parts: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    for index, demonstration in enumerate(demonstrations):
        parts[index in chosen].append(demonstration)
    return parts


def _load(config: SupervisedJobConfig, folder: Path) -> tuple[Inputs, list[Demonstration], list[Demonstration]]:
    """The inputs, and the demonstrations to train on and those held out."""
    supervised, seed = config.supervised, config.trainer.seed
    inputs = load_inputs(
        config.model, config.data, supervised, config.task, folder=folder, seed=seed, with_prompts=False
    )
    train, held_out = hold_out(inputs.demonstrations, supervised.val_size, seed=seed)
    if supervised.val_files:
        held_out = load_demonstrations(
            supervised.val_files,
            inputs.tokenizer,
            config.data,
            turns=supervised.turns,
            max_length=supervised.max_length,
        )
    check_lengths(inputs.model_path, [*train, *held_out])
    return inputs, train, held_out


def check_lengths(model_path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """Raises InputError for a demonstration that is longer than the positions that the model was made for."""
    limit = json.loads((model_path / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    longest = max(one.num_tokens for one in demonstrations)
    if isinstance(limit, int) and longest > limit:
        raise InputError(
            f"supervised.files: the longest demonstration has {longest} tokens, and the model's config.json has "
            f"max_position_embeddings={limit}; drop longer ones with supervised.max_length={limit}"
        )


def _check_steps(config: SupervisedJobConfig, num_demonstrations: int, resumed: Checkpoint | None) -> int:
    """The last step. Raises InputError for settings that do not fit it."""
    supervised = config.supervised
    last = supervised.num_steps(num_demonstrations)
    check_optimizer_steps(supervised.optim, last, section="supervised")
    if resumed is not None:
        key = "supervised.steps" if supervised.steps else f"with supervised.epochs={supervised.epochs:g} the last"
        check_steps_left(resumed, last, key=key, run=str(resumed.path.parent.parent))
    if late := [step for step in config.trainer.profile_steps if step > last]:
        raise InputError(f"trainer.profile_steps has {late[0]}; allowed: steps up to the last one ({last})")
    return last


def _describe(config: SupervisedJobConfig, num_train: int, num_held_out: int) -> str:
    supervised = config.supervised
    epochs = supervised.num_drawn(num_train) / num_train
    return (
        f"{num_train} demonstrations, {num_held_out} held out; {supervised.num_steps(num_train)} steps of "
        f"{supervised.batch_size}, {epochs:.4g} epochs"
    )


def _fits(config: SupervisedJobConfig, num_ranks: int) -> bool:
    """Whether the model can be trained on this number of ranks."""
    return num_ranks % config.engine.sequence_parallel == 0


def _run_attempt(
    run: SupervisedRun,
    restart: Restart | None,
    *,
    learn: Learn,
    memory: MemorySampler,
    stop: StopRequest,
    start: Laps,
) -> SupervisedResult:
    """Builds the model, trains, and writes the model."""
    model = _build(run)
    start.mark("model")
    if restart is None:
        run.tracker.info(f"ready after {start}")
    result = _train(run, model, restart, learn=learn, memory=memory, stop=stop)
    if run.trainer.export_model:
        folder = run.folder / "model"
        model.export(str(folder), str(run.inputs.model_path))
        run.tracker.info(f"model written to {folder}")
    return result


def _build(run: SupervisedRun) -> ModelHandle:
    config = run.config
    model = ModelHandle(
        run.session.ranks,
        "actor",
        config.batch,
        max_skipped_updates=config.trainer.max_skipped_updates,
        report=run.tracker.info,
    )
    engine = replace(config.engine, optim=config.supervised.optim)
    model.build(run.for_ranks(run.inputs.model_path), engine, total_steps=run.num_steps)
    return model


def _train(
    run: SupervisedRun,
    model: ModelHandle,
    restart: Restart | None,
    *,
    learn: Learn,
    memory: MemorySampler,
    stop: StopRequest,
) -> SupervisedResult:
    """All steps of the loop."""
    config, session = run.config, run.session
    sampler = PromptSampler(len(run.train), seed=config.trainer.seed, shuffle=config.data.shuffle)
    checkpoints = RunCheckpoints(
        run.folder / "checkpoints",
        config.trainer,
        session.rank_groups,
        roles={model.name: model},
        parts={"sampler": sampler},
        config=yaml_without_secrets(config),
        unsavable=unsavable({"engine": config.engine}),
        uploader=run.uploader,
        local_disks=run.local_disks,
    )
    profiler = StepProfiler(session.recorders, run.folder / "profile", config.trainer.profile_steps)
    loop = SupervisedLoop(
        config.trainer,
        config.supervised,
        model=model,
        demonstrations=run.train,
        sampler=sampler,
        held_out=HeldOut(run.held_out, run.inputs.tokenizer, config.supervised) if run.held_out else None,
        checkpoints=checkpoints,
        record=RunRecord(run.tracker, memory, profiler, session),
    )
    return loop.run(learn, run.resumed, stop=stop, restart=restart)
