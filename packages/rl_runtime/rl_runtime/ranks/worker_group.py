"""Trainer ranks as Ray actors: starts them, runs a `TrainerWorker` method on all of them, and ends them.

The methods are passed as functions, so that mypy checks the call: `group.run(TrainerWorker.drop, "actor")`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ds_engine.model.trial import TRIALS
from ds_engine.torch_errors import classify_torch_error

from ..errors import RankError, RankLost
from .environment import GpuId, rank_env
from .heartbeat import Beat, Heartbeats, find_frozen, find_stalled
from .trainer_worker import TrainerWorker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LIMITED_ELSEWHERE = (  # calls in which a rank may rest: until servers have paused, until a thread has written
    TrainerWorker.connect_servers.__name__,
    TrainerWorker.push_weights.__name__,
    TrainerWorker.close_saver.__name__,
)
_LATE_S = 1.0
"""Time to wait for the errors of the other ranks when one has failed."""
_DEATH_NOTICE_S = 45.0
"""Time in which Ray notices that a process, or a whole node, has died."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Place of a rank; the defaults are the CPU of this host."""

    node: str = ""
    """Ray's id of its node; empty: this process's."""
    gpus: tuple[GpuId, ...] = ()
    """Its GPUs; empty: the CPU."""
    strategy: Any = None
    """Ray's scheduling strategy; None: this process's node."""
    address: str = "127.0.0.1"
    """Address of its node, as the other ranks reach it."""
    interface: str | None = None
    """Network interface of that address; None: all ranks are on one host."""


class WorkerGroup:
    """`world_size` trainer ranks in one process group."""

    def __init__(
        self,
        seats: Sequence[Seat],
        *,
        num_threads: int,
        timeout_s: float,
        stall_timeout_s: float = 600.0,
        name: str = "",
    ) -> None:
        """Starts the processes; `wait_started` waits for them, and `connect` joins them.

        Args:
            seats: one for each rank, in rank order.
            num_threads: torch threads of each rank.
            timeout_s: seconds that one call may take on the ranks.
            stall_timeout_s: seconds in which at least one rank has to move.
            name: the group's name in error messages.
        """
        self.world_size = len(seats)
        self.nodes = tuple(dict.fromkeys(seat.node for seat in seats))
        """Ray's ids of the nodes that the ranks are on."""
        self.built: dict[str, tuple[Any, ...]] = {}
        """Role -> the last settings of `TrainerWorker.build`."""
        self._timeout_s, self._stall_timeout_s = timeout_s, stall_timeout_s
        self._name = f"{name} " if name else ""
        self._address = seats[0].address
        self._one_host = all(seat.interface is None for seat in seats)
        self._heartbeats = Heartbeats("127.0.0.1" if self._one_host else ray.util.get_node_ip_address())
        device = "cuda" if seats[0].gpus else "cpu"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(TrainerWorker)
        self._actors = [
            actor.options(
                num_cpus=1,
                max_restarts=0,
                scheduling_strategy=seat.strategy or here,
                runtime_env={"env_vars": rank_env(seat.gpus, num_threads, seat.interface)},
            ).remote(
                rank, self.world_size, device=device, num_threads=num_threads, heartbeats=self._heartbeats.receiver
            )
            for rank, seat in enumerate(seats)
        ]

    def begin_warm_up(self, model_path: str) -> None:
        """Lets the processes prepare for engines of this model as soon as they have started."""
        for actor in self._actors:
            actor.warm_up.remote(model_path)

    def wait_started(self) -> None:
        """Waits until every process has imported what a rank needs."""
        self._port = self.run(TrainerWorker.reserve_port, self._address)[0]

    def connect(self) -> None:
        """Joins the started processes in one process group, and tells them which models this process has tried."""
        self.run(TrainerWorker.connect, self._address, self._port, TRIALS if self._one_host else {})

    def run(self, method: Callable[Concatenate[TrainerWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Runs `method` with the same arguments on every rank; results in rank order.

        Raises:
            RankError: a rank raised; names the rank and the method.
            RankLost: a rank died or did not answer in time.
        """
        name = method.__name__
        if name == TrainerWorker.build.__name__:
            self.built[str(args[0])] = args[1:]
        return self._wait([getattr(actor, name).remote(*args, **kwargs) for actor in self._actors], name)

    def run_each(
        self,
        method: Callable[Concatenate[TrainerWorker, T, P], R],
        first_args: Sequence[T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Like `run`, with `first_args[rank]` as the first argument on each rank.

        Raises:
            RankError: as `run`.
        """
        name = method.__name__
        calls = zip(self._actors, first_args, strict=True)
        return self._wait([getattr(actor, name).remote(first, *args, **kwargs) for actor, first in calls], name)

    def close(self) -> None:
        """Kills the processes; nothing is saved."""
        for actor in self._actors:
            ray.kill(actor)
        if self._actors:
            self._heartbeats.close()
        self._actors = []

    def _wait(self, refs: Sequence[Any], method: str) -> list[Any]:
        # The first rank that finishes is read first: when one rank dies, the others wait in a collective
        # indefinitely, so reading in rank order would report a timeout instead of the death.
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        pending = list(refs)
        begin = time.monotonic()
        warned = False
        while pending:
            left_s = begin + self._timeout_s - time.monotonic()
            done, pending = ray.wait(pending, num_returns=1, timeout=min(max(0.0, left_s), self._stall_timeout_s / 10))
            ranks = sorted(rank_of[ref] for ref in pending)
            if not done and left_s <= 0:
                raise RankLost(
                    f"{self._name}ranks {ranks} of {len(refs)} did not finish {method!r} in {self._timeout_s:.0f} s "
                    f"(trainer.step_timeout_s): {self._described(find_stalled, ranks, 0.0) or 'no heartbeat'}"
                )
            if done:
                pass
            elif frozen := self._described(find_frozen, ranks, self._stall_timeout_s):
                limit = f"trainer.stall_timeout_s={self._stall_timeout_s:g}"
                raise RankLost(f"{method!r} waits for a rank that hangs ({limit}): {frozen}")
            elif method in _LIMITED_ELSEWHERE:
                pass
            elif stalled := self._described(find_stalled, ranks, self._stall_timeout_s):
                raise RankLost(
                    f"{method!r} makes no progress on any rank (trainer.stall_timeout_s={self._stall_timeout_s:g}): "
                    + stalled
                )
            elif not warned and (stalled := self._described(find_stalled, ranks, self._stall_timeout_s / 5)):
                warned = True
                print(f"warning: {method!r} makes no progress: {stalled}")
            for ref in done:
                try:
                    results[rank_of[ref]] = ray.get(ref)
                except RayTaskError as error:
                    # When a rank dies, the collectives of the others fail at once, and Ray tells of the death later.
                    lost_peer = classify_torch_error(error) == "lost peer"
                    self._raise_if_dead(rank_of, method, _DEATH_NOTICE_S if lost_peer else _LATE_S)
                    cause = error.cause
                    problem = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
                    kind = RankLost if lost_peer else RankError
                    raise kind(f"{self._where(rank_of[ref])} failed in {method!r}: {problem}", cause) from error
                except RayActorError as error:
                    raise self._lost(rank_of[ref], method, error) from error
        return results

    def _raise_if_dead(self, rank_of: Mapping[Any, int], method: str, wait_s: float) -> None:
        """Raises RankLost if Ray tells within `wait_s` seconds that a rank has died."""
        pending, end = list(rank_of), time.monotonic() + wait_s
        while pending and (left_s := end - time.monotonic()) > 0:
            done, pending = ray.wait(pending, num_returns=1, timeout=left_s)
            for ref in done:
                try:
                    ray.get(ref)
                except RayActorError as error:
                    raise self._lost(rank_of[ref], method, error) from error
                except RayTaskError:
                    pass  # what this rank says of the loss of another

    def _lost(self, rank: int, method: str, error: RayActorError) -> RankLost:
        reason = " ".join(str(error).split()).partition(" Some common causes")[0]
        return RankLost(f"{self._where(rank)} died in {method!r}: {reason}")

    def _where(self, rank: int) -> str:
        return f"{self._name}rank {rank} of {self.world_size}"

    def _described(self, find: Callable[..., Mapping[int, Beat]], ranks: Sequence[int], limit_s: float) -> str:
        """Activity of the ranks that `find` (`find_frozen`, `find_stalled`) selects; empty if it selects none."""
        now = time.monotonic()
        beats = find({rank: self._heartbeats.read(rank) for rank in ranks}, now, limit_s=limit_s)
        return "; ".join(f"{self._name}rank {rank} {beat.describe(now)}" for rank, beat in beats.items())
