"""Runs supervised training on demonstrations or preferences: starts and restarts its ranks, writes its run folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpt import Checkpoint
from ds_engine import Head
from rl_data import Demonstration, PromptSampler
from run_kit import StopRequest
from run_kit.timing import Laps

from ..config import BUILTIN_MODEL
from ..errors import InputError
from ..launch.cluster import check_cluster
from ..launch.session import open_rank_session, plan_session
from ..ranks.environment import prepare_driver
from ..resolve.resolved import ResolvedConfig
from ..supervised_job_config import SupervisedJobConfig, SupervisedJobConfigT
from ..training.engines import (
    check_architectures,
    check_optimizer_steps,
    check_sequence_parallel,
    check_sight,
    check_states,
)
from ..training.loop import Restart
from ..training.run_files import check_local_disks, open_run_files
from ..training.supervised import sequences_in
from ..training.supervised_loop import Objective, SupervisedLoop, SupervisedResult
from .inputs import (
    Inputs,
    check_prompt_files,
    check_supervised,
    load_examples,
    load_inputs,
    log_lines,
    read_model_config,
)
from .restarts import Restarts
from .resume import check_steps_left
from .training_run import JobPlan, TrainingRun, create_run_folder, end_stopped, open_run, plan_run

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SupervisedRun(TrainingRun):
    """A started run of supervised training, from which `compose` makes its objective."""

    config: SupervisedJobConfig

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.supervised.num_steps(len(self.inputs.examples))


def check_run(config: SupervisedJobConfig, *, head: Head = "lm") -> JobPlan:
    """Refuses settings that cannot work before any process starts; plans the devices and the resume.

    Raises InputError and the errors of the packages that check their parts.
    """
    engine, trainer = config.engine, config.trainer
    prepare_driver(trainer.device)
    check_sequence_parallel(engine, section="engine", num_ranks=trainer.rank_count)
    check_states(engine, section="engine", is_saved=trainer.save_freq > 0)
    placement = plan_session(trainer, sequence_parallel={"actor": engine.sequence_parallel})
    check_prompt_files(config.model, config.data)
    check_supervised(config.model, config.data, config.supervised, section="supervised", examples=config.examples)
    check_supervised(config.model, config.data, config.first_stage, section="warm_start")
    value_heads = ("engine",) if head == "value" else ()
    tried = {"engine": engine}
    architectures = check_architectures(config.model, tried, on_gpu=placement.on_gpu, value_heads=value_heads)
    check_cluster(config.model, trainer, placement)
    check_local_disks(trainer, placement)
    inputs = None if config.model.path == BUILTIN_MODEL else _load(config, Path())
    rows: dict[str, Sequence[object]] = {}
    if inputs is not None:
        if any(one.images for example in inputs.examples for one in sequences_in(example)):
            check_sight(config.model, tried, on_gpu=placement.on_gpu, key="supervised.files")
        rows = {"supervised.files": inputs.examples, "supervised.val_files": inputs.held_out}
        rows |= {"warm_start.files": inputs.demonstrations} if config.first_stage.trains else {}
    plan = plan_run(config, placement, architectures, rows=rows, inputs=inputs)
    if inputs is not None:
        _check_steps(config, len(inputs.examples), plan.resume_from)
    return plan


def run_supervised(
    resolved: ResolvedConfig[SupervisedJobConfigT],
    plan: JobPlan,
    compose: Callable[[SupervisedRun], Objective],
    *,
    head: Head = "lm",
) -> None:
    """Trains into a new run folder, and writes the model to `<run folder>/model`.

    SIGINT, SIGTERM and SIGUSR1 end it after the current step, with a checkpoint and the model; a second one ends it at
    once.

    Args:
        compose: makes what is learned from the run's examples.
        head: "value" for a reward model, which is written as a sequence classifier with one label.

    Raises:
        run_kit.RunStopped: a signal ended the run before its last step; the exit code is 128 + the signal.
    """
    config, trainer = resolved.config, resolved.config.trainer
    stop, start = StopRequest(), Laps()
    run = create_run_folder(trainer, plan.resume_from)
    with open_run(run, resolved, plan, num_steps=config.supervised.steps) as (tracker, memory):
        tracker.info(f"run folder {run.path}; starting {trainer.rank_count} ranks")
        for line in (*resolved.lines(), *plan.lines):
            tracker.info(line)
        inputs = plan.inputs or _load(config, run.path)
        num_train = len(inputs.examples)
        last_step = _check_steps(config, num_train, plan.resume_from)
        tracker.expect(last_step)
        for line in inputs.lines:
            tracker.info(line)
        num_epochs = config.supervised.num_drawn(num_train) / num_train
        tracker.info(
            f"{num_train} {config.noun}, {len(inputs.held_out)} held out; {last_step} steps of "
            f"{config.supervised.batch_size}, {num_epochs:.4g} epochs"
        )
        start.mark("inputs")
        with open_run_files(trainer, run.path, tracker.info) as files:
            with open_rank_session(plan.placement, trainer=trainer, mark=start.mark) as session:
                job = SupervisedRun(
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
                result = Restarts(job).attempts(partial(_run_attempt, compose=compose, head=head))
            if line := result.describe():
                tracker.info(line)
            tracker.summary(before=result.accuracy_before, after=result.accuracy_after)
        if stop.signal and result.last_step < last_step:
            end_stopped(run, tracker, trainer, stop.signal, f"{result.last_step} of {last_step}")


def hold_out(examples: Sequence[T], size: int, *, seed: int, noun: str = "demonstrations") -> tuple[list[T], list[T]]:
    """Divides examples into those to train on and `size` held-out ones; both stay in order.

    Raises:
        InputError: nothing would be left to train on.
    """
    if size >= len(examples):
        raise InputError(
            f"there are {len(examples)} {noun}",
            field="supervised.val_size",
            value=size,
            allowed="fewer, so that some are left to train on",
        )
    # A stream of its own: the same examples, whatever else the seed decides.
    chosen = set(np.random.default_rng([seed, 1]).permutation(len(examples))[:size].tolist())
    parts: tuple[list[T], list[T]] = ([], [])
    for index, example in enumerate(examples):
        parts[index in chosen].append(example)
    return parts


def _load(config: SupervisedJobConfig, folder: Path) -> Inputs:
    """The inputs with the examples; `folder` gets the built-in ones."""
    supervised, seed, kind = config.supervised, config.trainer.seed, config.examples
    is_first = kind == "demonstrations"
    demonstrations = supervised if is_first else config.first_stage
    inputs = load_inputs(
        config,
        demonstrations,
        folder=folder,
        seed=seed,
        with_prompts=False,
        section="supervised" if is_first else "warm_start",
    )
    load = partial(
        load_examples,
        kind,
        tokenizer=inputs.tokenizer,
        model_path=inputs.model_path,
        data=config.data,
        supervised=supervised,
        seed=seed,
    )
    files, val_files = supervised.files, supervised.val_files
    if inputs.task is not None and inputs.task.pairs is not None and inputs.task.val_pairs is not None:
        files, val_files = (str(inputs.task.pairs),), (str(inputs.task.val_pairs),)
    with log_lines() as lines:
        examples = inputs.demonstrations if is_first else load(files)
        train, held_out = hold_out(examples, supervised.val_size, seed=seed, noun=config.noun)
        if val_files:
            held_out = load(val_files, key="val_files")
    check_lengths(inputs.model_path, [one for example in (*train, *held_out) for one in sequences_in(example)])
    lines_once = () if inputs.task is not None else tuple(dict.fromkeys((*inputs.lines, *lines)))
    return replace(inputs, examples=train, held_out=held_out, lines=lines_once)


def check_lengths(model_path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """Raises InputError for a sequence that is longer than the positions that the model was made for."""
    limit = read_model_config(model_path).get("max_position_embeddings")
    longest = max(one.num_tokens for one in demonstrations)
    if isinstance(limit, int) and longest > limit:
        raise InputError(
            f"the longest demonstration has {longest} tokens, and the model's config.json has "
            f"max_position_embeddings={limit}",
            field="supervised.files",
            remedy=f"drop longer ones with supervised.max_length={limit}",
        )


def _check_steps(config: SupervisedJobConfig, num_examples: int, resumed: Checkpoint | None) -> int:
    """The last step. Raises InputError for settings that do not fit it."""
    supervised = config.supervised
    last = supervised.num_steps(num_examples)
    check_optimizer_steps(supervised.optim, last, section="supervised")
    if resumed is not None:
        key = "supervised.steps" if supervised.steps else "supervised.epochs"
        check_steps_left(resumed, last, key=key, run=str(resumed.path.parent.parent))
    if late := [step for step in config.trainer.profile_steps if step > last]:
        raise InputError(field="trainer.profile_steps", value=late[0], allowed=f"steps up to the last one ({last})")
    return last


def _run_attempt(
    run: SupervisedRun, restart: Restart | None, *, compose: Callable[[SupervisedRun], Objective], head: Head
) -> SupervisedResult:
    """Builds the model, trains, and writes the model."""
    model = run.handle("actor")
    engine = replace(run.config.engine, optim=run.config.supervised.optim)
    model.build(run.model_path, engine, total_steps=run.num_steps, head=head)
    run.start.mark("model")
    if restart is None:
        run.tracker.info(f"ready after {run.start}")
    objective, config = compose(run), run.config
    examples = run.inputs.examples
    sampler = PromptSampler(len(examples), seed=config.trainer.seed, shuffle=config.data.shuffle)
    loop = SupervisedLoop(
        config.trainer,
        config.supervised,
        model=model,
        objective=objective,
        examples=examples,
        sampler=sampler,
        checkpoints=run.checkpoints({model.name: model}, {"sampler": sampler, **objective.state}),
        record=run.record(),
    )
    result = loop.run(run.resumed, stop=run.stop, restart=restart)
    if run.trainer.export_model:
        folder = run.folder / "model"
        # A rank may have died after the folder was complete.
        model.export(str(folder), str(run.inputs.model_path), overwrite=True)
        run.tracker.info(f"model written to {folder}")
    return result
