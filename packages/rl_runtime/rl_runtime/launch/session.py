"""The processes of a run: Ray, trainer ranks and rollout servers, started and ended together.

They end on success, on errors and on Ctrl-C; no process is left.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import ray

from plinth_base.errors import prefix_fields
from rollout_vllm import RolloutClient, RolloutConfig, ServerGroup, launch_on_ray
from rollout_vllm.servers import control
from weight_sync import server_args, server_env

from ..config import RanksConfig, TrainingConfig
from ..ranks.environment import visible_gpus
from ..ranks.trainer_worker import TrainerWorker
from ..ranks.worker_group import Seat, WorkerGroup
from .ahead import SessionKeys, begin_ahead, take_ahead, take_servers
from .cluster import Reservation, cluster_nodes, join_cluster, read_nodes
from .gpus import Gpu, read_gpus
from .local_ray import check_local_ray, take_ray
from .placement import Node, Placement, Slot, plan_placement

T = TypeVar("T")


class RankSession:
    """The trainer ranks of a run, which can be started again. Made by `open_rank_session`."""

    def __init__(self, placement: Placement, trainer: TrainingConfig, *, devices: "_Devices") -> None:
        self.placement = placement
        self._trainer, self._devices = trainer, devices
        self._stack = ExitStack()
        self._begun = self._connected = False

    def restart_ranks(self) -> None:
        """Starts new ranks on the devices of those that run, and ends these.

        Raises:
            RankError: a rank could not start, or a node of the cluster was lost.
        """
        self.close()
        if self._devices.reservation is not None:
            self._devices.reservation.check_living()
        self.start_ranks()

    def begin_ranks(self) -> None:
        """Starts the processes of all ranks, and does not wait for them."""
        self.ranks = self._stack.enter_context(_ranks(self._trainer, self._devices.ranks))
        """The ranks of the actor and of every role without ranks of its own."""
        self.own_ranks = {
            role: self._stack.enter_context(_ranks(self._trainer, seats, name=role))
            for role, seats in self._devices.own_ranks.items()
        }
        """Role -> the ranks that compute for it alone."""
        self._begun = True

    def start_ranks(self, mark: Callable[[str], None] = lambda _: None) -> None:
        """Starts all ranks. `mark`: called with the name of each part of the start when it has ended."""
        if self._connected:
            return
        if not self._begun:
            self.begin_ranks()
        for group in self.rank_groups:
            group.wait_started()
        mark("rank processes")
        for group in self.rank_groups:
            group.connect()
        mark("their group" if len(self.rank_groups) == 1 else "their groups")
        self._devices.watch()
        self._connected = True

    def close(self) -> None:
        """Ends the ranks; nothing is saved."""
        self._begun = self._connected = False
        self._stack.close()

    def ranks_of(self, role: str) -> WorkerGroup:
        """The ranks of the engine of `role`."""
        return self.own_ranks.get(role, self.ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ray's ids of the nodes that the ranks are on."""
        return tuple(dict.fromkeys(node for group in self.rank_groups for node in group.nodes))

    @property
    def rank_groups(self) -> tuple[WorkerGroup, ...]:
        """All rank groups, the actor's first."""
        return (self.ranks, *self.own_ranks.values())


class Session(RankSession):
    """Trainer ranks, rollout servers and their client. Made by `open_session`."""

    def __init__(
        self,
        placement: Placement,
        trainer: TrainingConfig,
        rollout: RolloutConfig,
        *,
        devices: "_Devices",
        servers: ServerGroup,
    ) -> None:
        super().__init__(placement, trainer, devices=devices)
        self.servers = servers
        self.profile_dir = None if rollout.profile_dir is None or not servers.servers else Path(rollout.profile_dir)
        """Folder to which the servers write traces; None: they are not traced."""
        self.note = ""
        """A line for the log."""
        self.logs_ahead: Path | None = None
        """A folder for the servers' logs until there is that of the run; it goes when they have names there."""
        self._rollout = rollout
        self._is_ready = False

    def enter(self, context: AbstractContextManager[T]) -> T:
        """Enters a context that ends with the ranks, such as further servers."""
        return self._stack.enter_context(context)

    def link_logs(self, log_dir: Path) -> None:
        """Gives the logs of servers that started ahead a name in `log_dir` as well."""
        for server in self.servers.servers:
            link = log_dir / server.log_path.name
            if server.log_path != link:
                log_dir.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # the log of a kept server may be on another disk
                    os.link(server.log_path, link)
                    server.log_path = link
        self._drop_logs_ahead()

    def _drop_logs_ahead(self) -> None:
        """Servers that are ready have opened their logs."""
        in_use = {server.log_path.parent for server in self.servers.servers}
        if self._is_ready and self.logs_ahead is not None and self.logs_ahead not in in_use:
            shutil.rmtree(self.logs_ahead, ignore_errors=True)

    def wait_ready(self) -> None:
        """Waits until all servers answer. Only the first call waits: later the watch waits for each that restarts.

        Raises:
            rollout_vllm.ServerStartError: a server did not start.
        """
        if not self._is_ready:
            self.servers.wait_ready()
            self._is_ready = True
            self._drop_logs_ahead()

    def start_ranks(self, mark: Callable[[str], None] = lambda _: None) -> None:
        """Starts all ranks and the client; the servers stay."""
        if self._connected:
            return
        super().start_ranks(mark)
        self.client = RolloutClient(self.servers.endpoints, self._rollout)
        self._stack.callback(self.client.close)


class SessionRecorder:
    """torch's profiler on all ranks, and vLLM's in the processes of servers that were started with a folder for traces;
    the `TraceRecorder` of run_kit's `StepProfiler`."""

    def __init__(self, session: RankSession) -> None:
        self._ranks = {"actor" if session.own_ranks else "": session.ranks, **session.own_ranks}
        self._servers = session.servers if isinstance(session, Session) and session.profile_dir else None
        self._folder = session.profile_dir if isinstance(session, Session) and session.profile_dir else Path()

    def start(self) -> None:
        """Starts to record."""
        for group in self._ranks.values():
            group.run(TrainerWorker.start_profile)
        if self._servers is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._known = set(self._folder.iterdir())
            control.start_profile(self._servers.endpoints)

    def stop(self, folder: Path) -> None:
        """Stops, and writes the traces on this host: of each rank, and those that the servers wrote since `start`."""
        for role, group in self._ranks.items():
            names = [f"{role}_rank_{rank}".lstrip("_") for rank in range(group.world_size)]
            group.run_each(TrainerWorker.stop_profile, [str(folder / f"{name}.json.gz") for name in names])
        if self._servers is not None:
            control.stop_profile(self._servers.endpoints)
            kinds = Counter[str]()
            for path in sorted(set(self._folder.glob("*.json.gz")) - self._known):
                kind = "server_front_end" if ".async_llm." in path.name else "server_engine"
                kinds[kind] += 1
                path.rename(folder / f"{kind}_{kinds[kind]}.json.gz")


@contextmanager
def open_rank_session(
    placement: Placement, *, trainer: TrainingConfig, mark: Callable[[str], None] = lambda _: None
) -> Iterator[RankSession]:
    """Starts Ray, or joins the cluster, and starts the trainer ranks in one process group; ends them on exit.

    Args:
        mark: called with the name of each part of the start when it has ended.

    Raises:
        RankError: a rank could not start.
    """
    with _ray(trainer.ray_address, placement) as devices, ExitStack() as stack:
        mark("Ray")
        session = RankSession(placement, trainer, devices=devices)
        stack.callback(session.close)
        session.start_ranks(mark)
        yield session


@contextmanager
def begin_session(
    keys: SessionKeys, *, log_dir: Path, mark: Callable[[str], None] = lambda _: None
) -> Iterator[Session]:
    """Starts Ray and the processes of servers and ranks, and does not wait for them. Arguments as of `open_session`."""
    placement, address = keys.placement, keys.trainer.ray_address
    # Servers end while ranks and Ray do; only in a cluster, as Ray's actors, before it.
    with ExitStack() as last, ExitStack() as stack:
        start = partial(_servers, placement, keys.rollout, keys.model_path, log_dir)
        kept = take_servers(keys)
        servers = kept and last.enter_context(kept)
        # A run waits longest for its servers, so they start first where they do not need Ray's nodes. Not on the CPU:
        # Ray's processes must start within 30 s, and vLLM's start uses every core.
        early = placement.on_gpu and address is None
        servers = servers or (last.enter_context(start(None)) if early else None)
        devices = stack.enter_context(_ray(address, placement))
        servers = servers or (last if address is None else stack).enter_context(start(devices.reservation))
        mark("Ray")
        session = Session(placement, keys.trainer, keys.rollout, devices=devices, servers=servers)
        stack.callback(session.close)
        stack.callback(servers.ask_to_stop)
        session.begin_ranks()
        yield session


@contextmanager
def open_session(
    keys: SessionKeys, *, log_dir: Path, mark: Callable[[str], None] = lambda _: None
) -> Iterator[Session]:
    """Starts servers and ranks, unless they have started ahead; the servers may still be loading when this yields.

    Args:
        mark: called with the name of each part of the start when it has ended.

    Raises:
        RankError: a rank could not start.
    """
    ahead, differing = take_ahead(keys)
    with ahead or begin_session(keys, log_dir=log_dir, mark=mark) as session:
        if differing:
            session.note = f"servers and ranks that had started are not used: other {', '.join(differing)}"
        session.link_logs(log_dir)
        session.start_ranks(mark)
        yield session


def begin_session_ahead(keys: SessionKeys) -> None:
    """Begins the session that `open_session` will be asked for, and lets its ranks import what the model needs."""

    @contextmanager
    def begin(logs: Path) -> Iterator[Session]:
        with begin_session(keys, log_dir=logs) as session:
            session.logs_ahead = logs
            for group in session.rank_groups:
                group.begin_warm_up(keys.model_path)
            yield session

    begin_ahead(keys, begin, Path(keys.trainer.output_dir))


def plan_session(
    trainer: RanksConfig,
    rollout: RolloutConfig | None = None,
    own_ranks: Mapping[str, int] | None = None,
    sequence_parallel: Mapping[str, int] | None = None,
) -> Placement:
    """The placement of the ranks and the servers, on this host or on the nodes of the cluster, which it joins.

    Args:
        rollout: None for an app without servers.
        own_ranks: role -> number of ranks for it alone.
        sequence_parallel: role -> size of its groups of ranks, each of which stays on a node.

    Raises:
        PlacementError: more GPUs requested than available.
        InputError: there is no cluster at `trainer.ray_address`.
    """
    return plan_placement(
        usable_nodes(trainer),
        device=trainer.device,
        num_ranks=trainer.rank_count,
        num_servers=0 if rollout is None or rollout.urls else rollout.server_count,
        tensor_parallel_size=1 if rollout is None else rollout.tensor_parallel_size,
        colocate=getattr(trainer, "colocate", True),
        own_ranks=own_ranks,
        sequence_parallel=sequence_parallel,
        ranks_per_node=trainer.ranks_per_node,
    )


def usable_nodes(trainer: RanksConfig) -> Sequence[Node]:
    """The hosts that the run may use: the nodes of the cluster, which this process joins, or this host."""
    if trainer.ray_address is None:
        check_local_ray()
        return (Node(gpu_ids=[] if trainer.device == "cpu" else visible_gpus()),)
    join_cluster(trainer.ray_address)
    nodes = cluster_nodes()
    return [replace(node, gpu_ids=()) for node in nodes] if trainer.device == "cpu" else nodes


@dataclass(frozen=True, kw_only=True)
class HostDevices:
    """The devices that a run may use, over all hosts."""

    gpus: tuple[Gpu, ...] = ()
    """Empty: the run is on the CPU."""
    host_cores: tuple[int, ...]
    """CPU cores of each host."""
    host_bytes: int | None = None
    """Free memory of the hosts, as if all had the least; None: unknown."""


_fixed: list[HostDevices] = []
_last: list[HostDevices] = []


def fix_devices(devices: HostDevices) -> None:
    """Makes `read_devices` return these, for a run whose servers and ranks hold memory already."""
    _fixed[:] = [devices]


def last_devices() -> HostDevices:
    """The devices that `read_devices` returned last."""
    return _last[0]


def read_devices(trainer: RanksConfig) -> HostDevices:
    """The devices that the run may use."""
    _last[:] = _fixed or [_read_devices(trainer)]
    return _last[0]


def _read_devices(trainer: RanksConfig) -> HostDevices:
    usable = usable_nodes(trainer)
    cores = tuple(node.num_cpus or len(os.sched_getaffinity(0)) for node in usable)
    nodes = [node for node in usable if node.gpu_ids]
    if not nodes:
        return HostDevices(host_cores=cores)
    if trainer.ray_address is None:
        free = psutil.virtual_memory().available
        return HostDevices(gpus=read_gpus(nodes[0].gpu_ids), host_cores=cores, host_bytes=free)
    reports = read_nodes(nodes).values()
    gpus = tuple(gpu for report in reports for gpu in report.gpus)
    least = min(report.free_memory_bytes for report in reports)
    return HostDevices(gpus=gpus, host_cores=cores, host_bytes=len(reports) * least)


def _servers(
    placement: Placement, rollout: RolloutConfig, model_path: str, log_dir: Path, reservation: Reservation | None
) -> ServerGroup:
    """Starts the servers on this host, or on the reserved nodes of the cluster; they may still be loading."""
    device = "cuda" if placement.on_gpu else "cpu"
    extra_args, env = server_args(), server_env(device)
    if reservation is not None and not rollout.urls:
        seats = reservation.servers
        with prefix_fields("rollout"):
            return launch_on_ray(model_path, rollout, log_dir=log_dir, seats=seats, extra_args=extra_args, env=env)
    gpus = [slot.gpus for slot in placement.servers]
    with prefix_fields("rollout"):
        return ServerGroup.launch(
            model_path,
            rollout,
            log_dir=log_dir,
            extra_args=extra_args,
            env=env,
            gpu_ids_per_server=gpus if gpus and placement.on_gpu else None,
        )


def _ranks(trainer: RanksConfig, seats: Sequence[Seat], *, name: str = "") -> AbstractContextManager[WorkerGroup]:
    ranks = WorkerGroup(
        seats,
        num_threads=trainer.cpu_threads_per_rank,
        timeout_s=trainer.step_timeout_s,
        stall_timeout_s=trainer.stall_timeout_s,
        name=name,
    )
    return closing(ranks)


@dataclass(kw_only=True)
class _Devices:
    """The seats that Ray gives the processes of a placement."""

    ranks: Sequence[Seat]
    own_ranks: Mapping[str, Sequence[Seat]]
    reservation: Reservation | None = None
    """The reservation in a cluster; None: everything is on this host."""
    watch: Callable[[], None] = lambda: None
    """`LocalRay.watch`; does nothing for a cluster that others have started."""


@contextmanager
def _ray(address: str | None, placement: Placement) -> Iterator[_Devices]:
    """Starts a local Ray, or reserves the placement's devices in the cluster at `address`.

    Ignores RAY_ADDRESS: it would join the ranks to an unrelated cluster.
    """
    with ExitStack() as stack:
        if address is None:
            local = take_ray(placement.num_ranks)
            stack.callback(local.close)
            local.start()
            own = {role: _here(slots) for role, slots in placement.own_ranks.items()}
            devices = _Devices(ranks=_here(placement.ranks), own_ranks=own, watch=local.watch)
        else:
            stack.callback(ray.shutdown)
            join_cluster(address)
            nodes = [node for node in cluster_nodes() if node.node_id in placement.nodes]
            reservation = Reservation(placement, read_nodes(nodes))
            stack.callback(reservation.release)
            devices = _Devices(ranks=reservation.ranks, own_ranks=reservation.own_ranks, reservation=reservation)
        yield devices


def _here(slots: Sequence[Slot]) -> tuple[Seat, ...]:
    return tuple(Seat(gpus=slot.gpus) for slot in slots)
