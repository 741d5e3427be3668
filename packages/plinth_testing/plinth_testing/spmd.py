"""Driver code on every rank, so that a test of it needs no Ray."""

from collections.abc import Callable, Sequence
from typing import Any


class SpmdGroup:
    """Stands for a group of workers where each process is one of them and runs the driver's code too.

    Every process makes the same calls; each returns the results of all ranks, in their order.
    """

    def __init__(self, worker: Any) -> None:
        """`worker`: that of this rank, with its `rank` and the `world_size`."""
        self.worker, self.world_size = worker, worker.world_size

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method(worker, *args, **kwargs)` on every rank."""
        return self._gather(method(self.worker, *args, **kwargs))

    def run_each(self, method: Callable[..., Any], first_args: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method(worker, first_args[rank], *args, **kwargs)` on every rank."""
        return self._gather(method(self.worker, first_args[self.worker.rank], *args, **kwargs))

    def _gather(self, result: Any) -> list[Any]:
        import torch.distributed as dist

        results: list[Any] = [None] * self.world_size
        dist.all_gather_object(results, result)
        return results
