"""The trainer ranks as Ray actors: started together, called together, and given up together when one dies."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import RankError
from .environment import rank_env
from .trainer_worker import RankWorker


class RankGroup:
    """`world_size` ranks. `call` runs one method on all of them, each with its own arguments where given."""

    def __init__(
        self, rank_gpus: Sequence[tuple[int, ...]], *, num_threads: int, timeout_s: float, name: str = ""
    ) -> None:
        """`rank_gpus`: the GPU of every rank, or () for the CPU. `name`: what errors call the group."""
        self.world_size = len(rank_gpus)
        self._timeout_s, self._name = timeout_s, f"{name} " if name else ""
        device = "cuda" if rank_gpus[0] else "cpu"
        here = ray.get_runtime_context().get_node_id()  # the placement is about this host's devices
        actor = ray.remote(RankWorker)
        self._actors = [
            actor.options(
                num_cpus=1,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
                runtime_env={"env_vars": rank_env(gpus, num_threads)},
            ).remote(rank, self.world_size, device=device, num_threads=num_threads)
            for rank, gpus in enumerate(rank_gpus)
        ]

    def connect(self) -> None:
        """Waits for the processes and joins them in one process group."""
        address, port = self._wait([self._actors[0].reserve_address.remote()], "reserve_address")[0]
        self.call("connect", address, port)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `method(*args)` on every rank; results in rank order.

        Raises:
            RankError: a rank raised, died, or did not answer in time; names the rank and the method.
        """
        return self._wait([getattr(actor, method).remote(*args) for actor in self._actors], method)

    def call_each(self, method: str, args_of: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Calls `method(*args_of(rank))` on every rank; results in rank order."""
        refs = [getattr(actor, method).remote(*args_of(rank)) for rank, actor in enumerate(self._actors)]
        return self._wait(refs, method)

    def close(self) -> None:
        """Ends the processes at once; nothing is saved here."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _wait(self, refs: Sequence[Any], method: str) -> list[Any]:
        # Whoever finishes first is looked at first: when one rank dies, the others wait in a collective for ever,
        # so waiting for them in rank order would hide the death behind the hang.
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: list[Any] = [None] * len(refs)
        pending = list(refs)
        deadline = time.monotonic() + self._timeout_s
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                ranks = sorted(rank_of[ref] for ref in pending)
                raise RankError(
                    f"{self._name}ranks {ranks} of {len(refs)} did not finish {method!r} in {self._timeout_s:.0f} s"
                )
            for ref in done:
                try:
                    results[rank_of[ref]] = ray.get(ref)
                except RayTaskError as error:
                    _forget(pending)
                    text = f"{self._name}rank {rank_of[ref]} of {len(refs)} failed in {method!r}:\n{error}"
                    raise RankError(text, error.cause) from error
                except RayActorError as error:
                    raise RankError(
                        f"{self._name}rank {rank_of[ref]} of {len(refs)} died in {method!r}: {error}"
                    ) from error
        return results


def _forget(refs: Sequence[Any]) -> None:
    """What other ranks raised for the same reason: Ray would print every error that nobody asked for."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=1.0) if refs else ([], [])
    for ref in done:
        with suppress(RayError):
            ray.get(ref)
