"""Plans which process runs on which node and device, with pure functions, before any process starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PlacementError
from ..ranks.environment import GpuId

_REMEDY = (
    "lower trainer.num_ranks, rollout.num_servers or rollout.tensor_parallel_size, or set trainer.colocate=true or "
    "trainer.device=cpu"
)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host that can run processes: this one, or a node of a Ray cluster."""

    node_id: str = ""
    """Ray's id of the node; empty for this host without a cluster."""
    address: str = "this host"
    gpu_ids: Sequence[GpuId] = ()
    """GPUs that this job can use; in a cluster their numbers, until Ray has reserved them."""
    num_cpus: int | None = None
    """CPUs that Ray gives away, one to each process; None: not limited."""

    def describe(self) -> str:
        """`10.0.0.1: 8 CPU 2 GPU`."""
        cpus = "" if self.num_cpus is None else f"{self.num_cpus} CPU "
        return f"{self.address}: {cpus}{len(self.gpu_ids)} GPU"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one process."""

    node: str = ""
    """`Node.node_id`."""
    gpus: tuple[GpuId, ...] = ()
    """Its GPUs on the node; empty: it runs on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The slots of all trainer ranks and all rollout servers that the run starts."""

    ranks: tuple[Slot, ...]
    servers: tuple[Slot, ...] = ()
    own_ranks: Mapping[str, tuple[Slot, ...]] = field(default_factory=dict)
    """Role -> the ranks that compute for it alone."""

    @property
    def on_gpu(self) -> bool:
        """True if the ranks train on CUDA."""
        return bool(self.ranks[0].gpus)

    @property
    def all_ranks(self) -> tuple[Slot, ...]:
        """The ranks of all groups, the actor's first."""
        return (*self.ranks, *(slot for slots in self.own_ranks.values() for slot in slots))

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in use; a GPU shared by a rank and a server counts once. 0 on the CPU."""
        return len({(slot.node, gpu) for slot in (*self.all_ranks, *self.servers) for gpu in slot.gpus})

    @property
    def num_ranks(self) -> int:
        """Trainer processes of all groups."""
        return len(self.all_ranks)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes in use, those of the ranks first."""
        return tuple(dict.fromkeys(slot.node for slot in (*self.all_ranks, *self.servers)))


def plan_placement(
    nodes: Sequence[Node],
    *,
    device: str,
    num_ranks: int,
    num_servers: int,
    tensor_parallel_size: int = 1,
    colocate: bool = True,
    own_ranks: Mapping[str, int] | None = None,
    sequence_parallel: Mapping[str, int] | None = None,
    ranks_per_node: int | None = None,
) -> Placement:
    """Packs the ranks node by node, and gives every server GPUs of one node.

    A rank has one GPU. Servers share the GPUs of the ranks (`colocate`) or use the GPUs after them. On the CPU every
    process takes one of Ray's CPUs, and servers go where fewest are.

    Args:
        nodes: in the order in which they are filled.
        device: "auto", "cpu" or "cuda"; auto is CUDA if a node has a GPU.
        own_ranks: role -> number of ranks that compute for it alone; they follow the first `num_ranks`.
        sequence_parallel: role ("actor" for the first ranks) -> size of its groups of ranks; a group stays on a node.
        ranks_per_node: ranks on a node at most.

    Raises:
        PlacementError: no GPU, or not enough room; lists what every node has.
    """
    has = "; ".join(node.describe() for node in nodes)
    if device == "cuda" and not any(node.gpu_ids for node in nodes):
        raise PlacementError(
            f"no GPU was found ({has})",
            field="trainer.device",
            value="cuda",
            allowed="auto, or cpu",
            remedy="`plinth doctor` lists GPUs, driver and CUDA build",
        )
    on_gpu = device == "cuda" or (device == "auto" and any(node.gpu_ids for node in nodes))
    groups = {"actor": num_ranks, **(own_ranks or {})}
    rooms = [_Room(node, on_gpu, ranks_per_node) for node in nodes]
    needed = _describe_need(groups, num_servers, tensor_parallel_size, colocate=colocate, on_gpu=on_gpu)
    placed: dict[str, tuple[Slot, ...]] = {}
    for role, number in groups.items():
        size = (sequence_parallel or {}).get(role, 1)
        placed[role] = tuple(_place_ranks(rooms, number, size))
        if len(placed[role]) < number:
            most = f", at most {ranks_per_node} on a node (trainer.ranks_per_node)" if ranks_per_node else ""
            whole = f", each group of {size} (sequence_parallel) on one node" if size > 1 else ""
            field = "trainer.num_ranks" if role == "actor" else f"trainer.num_{role}_ranks"
            room = f"room for {len(placed[role])} ranks: {has}"
            raise PlacementError(f"{needed}{most}{whole}", field=field, value=number, allowed=room, remedy=_REMEDY)
    servers = tuple(_place_servers(rooms, num_servers, tensor_parallel_size, share=colocate))
    if len(servers) < num_servers:
        room = f"room for {len(servers)} servers: {has}"
        raise PlacementError(needed, field="rollout.num_servers", value=num_servers, allowed=room, remedy=_REMEDY)
    return Placement(ranks=placed.pop("actor"), servers=servers, own_ranks=placed)


class _Room:
    """The free devices of a node while a placement is made."""

    def __init__(self, node: Node, on_gpu: bool, ranks_per_node: int | None) -> None:
        self.node, self.on_gpu = node, on_gpu
        self.num_ranks = self.num_servers = 0
        self._most = ranks_per_node

    @property
    def ranks_left(self) -> int:
        """Number of further ranks that the node can have."""
        room = len(self.node.gpu_ids) - self.num_ranks if self.on_gpu else self.cpus_left
        return room if self._most is None else min(room, self._most - self.num_ranks)

    @property
    def cpus_left(self) -> int:
        """CPUs that no process has."""
        limit = 10**9 if self.node.num_cpus is None else self.node.num_cpus
        return limit - self.num_ranks - self.num_servers


def _place_ranks(rooms: Sequence[_Room], number: int, size: int) -> Iterator[Slot]:
    """Slots for up to `number` ranks, in whole groups of `size` on a node."""
    for room in rooms:
        fitting = min(number, room.ranks_left) // size * size
        for _ in range(fitting):
            gpus = (room.node.gpu_ids[room.num_ranks],) if room.on_gpu else ()
            room.num_ranks += 1
            yield Slot(node=room.node.node_id, gpus=gpus)
        number -= max(0, fitting)


def _place_servers(rooms: Sequence[_Room], number: int, tp: int, *, share: bool) -> Iterator[Slot]:
    """Slots for up to `number` servers; on GPUs node by node, else where fewest servers are."""
    if not rooms[0].on_gpu:
        for _ in range(number):
            free = [room for room in rooms if room.cpus_left > 0]
            if not free:
                return
            best = min(free, key=lambda room: room.num_servers)
            best.num_servers += 1
            yield Slot(node=best.node.node_id)
        return
    for room in rooms:
        gpus = room.node.gpu_ids[0 if share else room.num_ranks :]
        for first in range(0, len(gpus) - tp + 1, tp):
            if number:
                number -= 1
                yield Slot(node=room.node.node_id, gpus=tuple(gpus[first : first + tp]))


def _describe_need(groups: Mapping[str, int], num_servers: int, tp: int, *, colocate: bool, on_gpu: bool) -> str:
    num_ranks, own = groups["actor"], {role: number for role, number in groups.items() if role != "actor"}
    of_own = "".join(f" and {number} of the {role}" for role, number in own.items())
    if not on_gpu:
        return f"{num_ranks} ranks{of_own} and {num_servers} servers need a CPU of Ray each"
    all_ranks, of_servers = sum(groups.values()), num_servers * tp
    needed = max(all_ranks, of_servers) if colocate else all_ranks + of_servers
    how = "shared" if colocate else "not shared"
    return (
        f"{num_ranks} ranks{of_own} and {num_servers} servers of {tp} GPUs need {needed} GPUs ({how}: trainer.colocate)"
    )
