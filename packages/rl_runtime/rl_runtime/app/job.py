"""A reinforcement-learning job: the checks before it starts, and what an app builds its engines from.

An app is `run_job(config, check(config), compose)`: `check` is `check_job` with the app's engines, and `compose` builds
these engines from a `Job` and returns the update of one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_engine import EngineConfig, Head
from plinth_base.model_folder import find_model_folder
from rl_core import BatchError, BatchLayout, batch_layout

from ..config import BUILTIN_MODEL
from ..errors import InputError
from ..job_config import JobConfig
from ..launch.ahead import SessionKeys
from ..launch.cluster import check_cluster
from ..launch.placement import Placement
from ..launch.servers import check_lengths, check_servers
from ..launch.session import Session, begin_session_ahead, plan_session
from ..ranks.environment import prepare_driver
from ..ranks.model_handle import ModelHandle, Reference, WithoutAdapters
from ..rollout.ahead import check_groups
from ..rollout.scoring import rewards_of_rows
from ..training.checkpoints import Stateful
from ..training.engines import check_architectures, check_engine, check_sequence_parallel, check_sight
from ..training.loop import Learn
from ..training.reward_model import RewardModel
from ..training.run_files import check_local_disks
from ..training.teacher_config import TeacherConfig
from . import kept
from .first_prompts import check_first_prompts, check_functions
from .inputs import check_context, check_prompt_files, check_supervised, check_train_prompts, load_ahead
from .reward_model import check_reward_model, check_reward_ranks
from .training_run import JobPlan, TrainingRun, plan_run


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
class Job(TrainingRun):
    """A started run with rollout, from which `compose` builds its engines."""

    config: JobConfig
    session: Session

    def trained(self, role: str, engine: EngineConfig, *, num_updates: int, head: Head = "lm") -> ModelHandle:
        """Builds the engine of `role` with an optimizer on its ranks."""
        model = self.handle(role, temperature=self.config.sampling.temperature)
        model.build(self.model_path, engine, total_steps=num_updates, head=head)
        return model

    def frozen(
        self, role: str, engine: EngineConfig, *, model_path: str | None = None, head: Head = "lm"
    ) -> ModelHandle:
        """Builds the engine of `role` without an optimizer: a reference model, or a teacher or reward model with its
        own folder."""
        model = self.handle(role, temperature=self.config.sampling.temperature)
        model.build_frozen(model_path or self.model_path, engine, head=head)
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

    def reward_model(self) -> RewardModel | None:
        """Builds the reward model on the actor's ranks; None if the configuration has none there."""
        reward = self.config.reward
        if not reward.model_on_ranks:
            return None
        folder = find_model_folder(str(reward.model))
        self.tracker.info(f"reward model: {folder}, frozen on the actor's ranks")
        model = self.frozen("reward", self.config.frozen_engine, model_path=self.for_ranks(folder), head="value")
        return RewardModel(model, weight=reward.model_weight)


def job_layout(
    config: JobConfig, *, section: str = "actor", engine: EngineConfig | None = None, num_ranks: int | None = None
) -> BatchLayout:
    """The division of a train batch into mini batches and over the dp x sp ranks of `engine` (default: the actor's).

    Args:
        section: the configuration section of `engine`.
        num_ranks: the number of ranks of the engine; default: the actor's.

    Raises:
        InputError: the sizes do not divide (it names sizes that do), or the number of ranks is no multiple of
            sequence_parallel.
    """
    engine = engine or config.actor
    num_ranks = num_ranks or config.trainer.rank_count
    check_sequence_parallel(engine, section=section, num_ranks=num_ranks)
    sp = engine.sequence_parallel
    try:
        return batch_layout(config.batch, samples_per_prompt=config.sampling.num_samples, dp=num_ranks // sp, sp=sp)
    except BatchError as error:
        raise InputError(
            error.problem,
            field=f"batch.{error.field}",
            value=error.value,
            allowed=error.allowed,
            remedy=f"or use another trainer.num_ranks ({num_ranks})",
        ) from error


def begins_ahead(config: JobConfig, placement: Placement) -> bool:
    """True for a run whose servers and ranks start while it is checked: on this host's GPUs, with a model of its own.

    On the CPU they would take the cores from the checks, for which nobody waits in a kept process.
    """
    elsewhere = config.rollout.urls or config.trainer.ray_address is not None
    late = config.model.path == BUILTIN_MODEL or config.trainer.profile_steps  # the run folder holds the model, traces
    return (placement.on_gpu or kept.is_standby()) and not elsewhere and not late


def _check_images(config: JobConfig, key: str) -> None:
    """Raises InputError for parts of a job that would not see the images of its rows."""
    teacher: TeacherConfig | None = getattr(config, "teacher", None)
    blind = {
        "rollout.urls": bool(config.rollout.urls),
        "reward.model": config.reward.model_on_ranks,
        "teacher.on": teacher is not None and teacher.on == "server",
    }
    for field_, is_blind in blind.items():
        if is_blind:
            raise InputError(
                f"the rows of {key} have images, which it does not see", field=field_, allowed="rows of text"
            )


def check_job(config: JobConfig, engines: Mapping[str, tuple[EngineConfig, int]]) -> JobPlan:
    """Refuses settings that cannot work before any process starts; plans the devices and the resume.

    Args:
        engines: configuration section -> (trained engine, its optimizer steps over the whole run).
    """
    own_ranks = {model.section: model.own_ranks for model in config.models if model.own_ranks}
    prepare_driver(config.trainer.device)
    for section, (engine, _) in engines.items():
        job_layout(config, section=section, engine=engine, num_ranks=own_ranks.get(section))
    sp = {section: engine.sequence_parallel for section, (engine, _) in engines.items()}
    placement = plan_session(config.trainer, config.rollout, own_ranks, sp)
    check_functions(config.episode, config.reward)
    check_prompt_files(config.model, config.data, rewards=rewards_of_rows(config.reward, config.episode))
    check_train_prompts(config.model, config.data)
    check_supervised(config.model, config.data, config.warm_start, section="warm_start")
    for section, (engine, num_updates) in engines.items():
        check_engine(engine, section=section, num_updates=num_updates, is_saved=config.trainer.save_freq > 0)
    validates = config.data.val or not config.data.train
    sections = {"sampling": config.sampling} | ({"validation": config.validation} if validates else {})
    samplings = list(sections.values())
    check_lengths(config.rollout, config.data, samplings)
    check_context(config.model, sections)
    longest = config.data.max_prompt_length + max(sampling.response_tokens for sampling in samplings)
    check_servers(config.model, config.rollout, config.sync, config.trainer, placement)
    if begins_ahead(config, placement):  # what follows imports transformers and DeepSpeed, and reads all data
        folder = str(find_model_folder(config.model.path))
        begin_session_ahead(SessionKeys.of(placement, config.trainer, config.rollout, folder))
    tried = {section: engine for section, (engine, _) in engines.items()}
    architectures = check_architectures(config.model, tried, on_gpu=placement.on_gpu)
    check_reward_model(config.model, config.reward, longest=longest)
    check_cluster(config.model, config.trainer, placement)
    check_local_disks(config.trainer, placement)
    architectures += check_reward_ranks(config, placement)
    seed = config.trainer.seed
    inputs = load_ahead(config, config.warm_start, seed=seed)
    if inputs is not None and (key := inputs.images_in):
        architectures += check_sight(config.model, tried, on_gpu=placement.on_gpu, key=key)
        _check_images(config, key)
    warnings = check_first_prompts(inputs, config, episode=config.episode, reward=config.reward, seed=seed)
    rows: dict[str, Sequence[object]] = {}
    if inputs is not None:
        rows = {"data.train": inputs.train_prompts, "data.val": inputs.val_prompts}
        rows["warm_start.files"] = inputs.demonstrations
    plan = plan_run(config, placement, [*architectures, *warnings], rows=rows, inputs=inputs)
    if plan.resume_from is not None:
        check_groups(plan.resume_from.state.get("parts", {}).get("rollout", {}), config)
    return plan
