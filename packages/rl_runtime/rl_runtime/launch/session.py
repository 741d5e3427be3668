"""The processes of a run: Ray, trainer ranks and rollout servers, started and ended together.

They end on success, on errors and on Ctrl-C; no process is left.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import ray

from rollout_vllm import RolloutClient, RolloutConfig, ServerGroup
from rollout_vllm.servers import control
from run_kit.profiling import TraceRecorder
from weight_sync import SyncConfig, server_args, server_env

from ..config import RanksConfig, TrainerConfig
from ..ranks.environment import GpuId, visible_gpus
from ..ranks.trainer_worker import TrainerWorker
from ..ranks.worker_group import WorkerGroup
from .cluster import join_cluster, launch_on_other_nodes
from .local_ray import LocalRay
from .placement import Placement, plan_placement


@contextmanager
def open_ranks(trainer: RanksConfig, placement: Placement) -> Iterator[WorkerGroup]:
    """Starts a local Ray and the trainer ranks in one process group; ends them on exit.

    Raises:
        RankError: a rank could not start.
    """
    with _ray(None, placement.num_ranks) as watch, _ranks(trainer, placement.rank_gpus) as ranks:
        watch()
        yield ranks


@dataclass(frozen=True, kw_only=True)
class Session:
    """The processes of a run: trainer ranks, rollout servers and their client."""

    placement: Placement
    ranks: WorkerGroup
    """The ranks of the actor and of every role without ranks of its own."""
    servers: ServerGroup
    client: RolloutClient
    own_ranks: Mapping[str, WorkerGroup] = field(default_factory=dict)
    """Role -> the ranks that compute for it alone."""
    profile_dir: Path | None = None
    """Folder to which the servers write traces; None: they are not traced."""

    def ranks_of(self, role: str) -> WorkerGroup:
        """The ranks of the engine of `role`."""
        return self.own_ranks.get(role, self.ranks)

    @property
    def recorders(self) -> list[TraceRecorder]:
        """They trace every rank, and the servers that were started with a folder for traces."""
        ranks = [RankRecorder(self.ranks, "actor" if self.own_ranks else "")]
        ranks += [RankRecorder(group, role) for role, group in self.own_ranks.items()]
        return [*ranks, *([ServerRecorder(self.servers, self.profile_dir)] if self.profile_dir is not None else [])]

    @property
    def rank_groups(self) -> tuple[WorkerGroup, ...]:
        """All rank groups, the actor's first."""
        return (self.ranks, *self.own_ranks.values())


class RankRecorder:
    """torch's profiler on all ranks of a group; a `TraceRecorder` of run_kit's `StepProfiler`."""

    def __init__(self, ranks: WorkerGroup, role: str) -> None:
        self._ranks, self._role = ranks, role

    def start(self) -> None:
        """Starts to record."""
        self._ranks.run(TrainerWorker.start_profile)

    def stop(self, folder: Path) -> Mapping[str, Path]:
        """Stops, and writes the traces on this host."""
        names = [f"{self._role} rank {rank}".strip() for rank in range(self._ranks.world_size)]
        paths = [folder / f"{name.replace(' ', '_')}.json.gz" for name in names]
        self._ranks.run_each(TrainerWorker.stop_profile, [str(path) for path in paths])
        return dict(zip(names, paths, strict=True))


class ServerRecorder:
    """vLLM's profiler in all processes of the servers; a `TraceRecorder` of run_kit's `StepProfiler`."""

    def __init__(self, servers: ServerGroup, folder: Path) -> None:
        self._servers, self._folder = servers, folder

    def start(self) -> None:
        """Starts to record."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known = set(self._folder.iterdir())
        control.start_profile(self._servers.endpoints)

    def stop(self, folder: Path) -> Mapping[str, Path]:
        """Stops; the traces are those that the servers wrote since `start`."""
        control.stop_profile(self._servers.endpoints)
        traces: dict[str, Path] = {}
        for path in sorted(set(self._folder.glob("*.json.gz")) - self._known):
            kind = "server front end" if ".async_llm." in path.name else "server engine"
            number = sum(name.startswith(kind) for name in traces) + 1
            traces[f"{kind} {number}"] = path.rename(folder / path.name)
        return traces


@contextmanager
def open_session(
    placement: Placement,
    *,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    model_path: str,
    log_dir: Path,
    sync: SyncConfig,
) -> Iterator[Session]:
    """Starts servers and ranks; the servers may still be loading when this yields.

    Raises:
        RankError: a rank could not start.
    """
    with ExitStack() as stack:
        # Ray starts before the servers: its processes must start within 30 s, and vLLM's start uses every core.
        watch = stack.enter_context(_ray(trainer.ray_address, placement.num_ranks))
        servers = stack.enter_context(_servers(placement, trainer, rollout, model_path, log_dir, sync))
        ranks = stack.enter_context(_ranks(trainer, placement.rank_gpus))
        own_ranks = {
            role: stack.enter_context(_ranks(trainer, gpus, name=role))
            for role, gpus in placement.own_rank_gpus.items()
        }
        watch()
        client = RolloutClient(servers.endpoints, rollout)
        stack.callback(client.close)
        folder = None if rollout.profile_dir is None or not servers.servers else Path(rollout.profile_dir)
        yield Session(
            placement=placement, ranks=ranks, own_ranks=own_ranks, servers=servers, client=client, profile_dir=folder
        )


def plan_session(
    trainer: TrainerConfig, rollout: RolloutConfig, own_ranks: Mapping[str, int] | None = None
) -> Placement:
    """The placement of the ranks and of the servers on this host; `own_ranks`: role -> number of ranks for it alone.

    Raises:
        PlacementError: more GPUs requested than available.
    """
    return plan_placement(
        gpu_ids=usable_gpus(trainer),
        device=trainer.device,
        num_ranks=trainer.rank_count,
        num_servers=0 if rollout.urls else rollout.server_count,
        tensor_parallel_size=rollout.tensor_parallel_size,
        colocate=trainer.colocate,
        own_ranks=own_ranks,
        servers_elsewhere=trainer.ray_address is not None,
    )


def usable_gpus(trainer: RanksConfig) -> list[GpuId]:
    """The GPUs that the run may use; none: it runs on the CPU."""
    return [] if trainer.device == "cpu" else visible_gpus()


def plan_ranks(trainer: RanksConfig) -> Placement:
    """The placement of the ranks alone, for apps without rollout."""
    return plan_placement(
        gpu_ids=usable_gpus(trainer),
        device=trainer.device,
        num_ranks=trainer.rank_count,
        num_servers=0,
        tensor_parallel_size=1,
        colocate=True,
    )


def _servers(
    placement: Placement,
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    model_path: str,
    log_dir: Path,
    sync: SyncConfig,
) -> ServerGroup:
    """Starts the servers on this host, or on the other nodes of the cluster; they may still be loading."""
    device: Literal["cpu", "cuda"] = "cuda" if placement.on_gpu else "cpu"
    rollout = replace(rollout, device=device)
    extra_args, env = server_args(sync, device), server_env(sync, device)
    if trainer.ray_address is not None:
        return launch_on_other_nodes(
            model_path,
            rollout,
            device=device,
            num_ranks=placement.num_ranks,
            log_dir=log_dir,
            extra_args=extra_args,
            env=env,
        )
    return ServerGroup.launch(
        model_path,
        rollout,
        log_dir=log_dir,
        extra_args=extra_args,
        env=env,
        gpu_ids_per_server=placement.server_gpus if placement.server_gpus and placement.on_gpu else None,
    )


@contextmanager
def _ranks(trainer: RanksConfig, rank_gpus: Sequence[tuple[GpuId, ...]], *, name: str = "") -> Iterator[WorkerGroup]:
    ranks = WorkerGroup(
        rank_gpus,
        num_threads=trainer.cpu_threads_per_rank,
        timeout_s=trainer.step_timeout_s,
        stall_timeout_s=trainer.stall_timeout_s,
        name=name,
    )
    try:
        ranks.connect()
        yield ranks
    finally:
        ranks.close()


@contextmanager
def _ray(address: str | None, num_ranks: int) -> Iterator[Callable[[], None]]:
    """Joins the cluster at `address`, or starts a local Ray.

    Yields `LocalRay.watch`, which does nothing for a cluster that others have started.

    Ignores RAY_ADDRESS: it would join the ranks to an unrelated cluster.
    """
    terminate = signal.getsignal(signal.SIGTERM)
    local = LocalRay(num_ranks) if address is None else None
    try:
        if local is not None:
            local.start()
        elif address is not None:
            join_cluster(address)
        if threading.current_thread() is threading.main_thread():
            # Ray has installed its own handler, which ends the process without the app's cleanup on a second signal.
            signal.signal(signal.SIGTERM, terminate)
        yield local.watch if local is not None else lambda: None
    finally:
        ray.shutdown() if local is None else local.close()
