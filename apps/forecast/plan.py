"""Settings, placement and sizes of a job on hosts that exist only in its configuration, by the rules of a real run."""

from apps.forecast.config import ForecastConfig
from apps.forecast.models import model_shape
from apps.forecast.phases import Job
from ds_engine import ModelShape, estimate_memory
from rl_core import BatchError, batch_layout
from rl_runtime import InputError
from rl_runtime.app.choice import Choice
from rl_runtime.app.choices import choose_for
from rl_runtime.app.preflight import check_sequence_parallel
from rl_runtime.launch.gpus import Gpu
from rl_runtime.launch.placement import Node, Placement, plan_placement


def plan_job(config: ForecastConfig) -> tuple[Choice[ForecastConfig], Job]:
    """The settings that a run would choose, and what its phases are calculated from.

    Raises:
        InputError: the model is not known, its states do not fit, or the batch or the heads do not divide.
        PlacementError: too few GPUs.
    """
    shape = model_shape(config.model.path)
    cluster = config.cluster
    size = int(cluster.gpu_gib * 2**30)
    gpus = (Gpu(name="GPU", total_bytes=size, used_bytes=0),) * (cluster.num_hosts * cluster.gpus_per_host)
    host_bytes = None if cluster.host_gib is None else int(cluster.host_gib * 2**30) * cluster.num_hosts
    frozen = {model.key: model_shape(model.path, key=model.key) for model in config.frozen_models}
    _check_sizes(config, shape)
    choice = choose_for(config, gpus=gpus, shape=shape, host_bytes=host_bytes, frozen_shapes=frozen)
    chosen = choice.config
    sp, ranks = chosen.actor.sequence_parallel, chosen.trainer.rank_count
    try:
        layout = batch_layout(chosen.batch, samples_per_prompt=chosen.sampling.n, dp=max(1, ranks // sp), sp=sp)
    except BatchError as error:
        raise InputError(f"batch: {error}") from None
    memory = estimate_memory(
        shape, chosen.actor, dp=ranks // sp, tokens_per_micro_batch=chosen.batch.max_packed_tokens * sp
    )
    return choice, Job(
        config=chosen,
        shape=shape,
        frozen_shapes=frozen,
        placement=place(chosen),
        layout=layout,
        memory=memory,
        moved_bytes=choice.moved_bytes,
    )


def place(config: ForecastConfig) -> Placement:
    """The placement of a run on hosts that exist only in the configuration."""
    cluster, trainer, rollout = config.cluster, config.trainer, config.rollout
    nodes = [
        Node(node_id=f"host {number}", address=f"host {number}", gpu_ids=range(cluster.gpus_per_host))
        for number in range(1, cluster.num_hosts + 1)
    ]
    return plan_placement(
        nodes,
        device="cuda",
        num_ranks=trainer.rank_count,
        num_servers=rollout.server_count,
        tensor_parallel_size=rollout.tensor_parallel_size,
        colocate=trainer.colocate,
        sequence_parallel={"actor": config.actor.sequence_parallel},
        ranks_per_node=trainer.ranks_per_node,
    )


def _check_sizes(config: ForecastConfig, shape: ModelShape) -> None:
    """What is refused before settings are chosen; the memory plan checks the heads for sequence parallelism."""
    size, heads = config.rollout.tensor_parallel_size, shape.num_heads
    if heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise InputError(
            f"rollout.tensor_parallel_size is {size}; allowed: a divisor of the {heads} attention heads, {fits}"
        )
    if config.trainer.num_ranks is not None:
        check_sequence_parallel(config.actor, section="actor", num_ranks=config.trainer.num_ranks)
