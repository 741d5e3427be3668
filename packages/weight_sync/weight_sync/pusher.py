"""WeightPusher: one call moves a policy from a source into every server, or leaves all of them paused."""

import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .adapter import Adapter
from .config import SyncConfig
from .control import ServerControl
from .errors import ManifestError, ReceiverError, SyncConfigError, WeightSyncError
from .plan import BucketPlan, plan_buckets
from .session import PROTOCOL, PushSession, Timings, choose_transport, num_passes
from .sources.base import WeightSource
from .sources.fp8 import Fp8Source

logger = logging.getLogger(__name__)


class Endpoint(Protocol):
    """A running vLLM server."""

    @property
    def url(self) -> str:
        """``http://host:port``."""

    @property
    def api_key(self) -> str | None:
        """Bearer token, or None."""


#: Starts servers anew: the endpoints that failed and the error in, the endpoints that replace them out.
Restart = Callable[[Sequence[Endpoint], Exception], Sequence[Endpoint]]


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one push did. Times are wall-clock seconds seen by the sending rank and overlap in part."""

    version: int
    num_bytes: int
    num_tensors: int
    total_s: float
    pause_s: float
    """Longest wait for a server to finish its running requests."""
    gather_s: float
    """Time the source took to fill buckets."""
    transfer_s: float
    """From the first worker's readiness to the last worker's acknowledgement of everything."""
    finish_s: float
    """Publishing, dropping the prefix cache, resuming."""
    num_attempts: int = 1


class WeightPusher:
    """Pushes the weights of ``source`` into the servers behind ``endpoints``.

    Every rank builds one and calls ``push``; rank 0 talks to the servers, the others take part in the source's
    collectives. ``group`` is the torch process group of these ranks and ``rank`` the rank within it; None means the
    default group where torch.distributed is initialised, this process alone elsewhere. ``device`` is where the source's
    tensors live. ``adapter`` says that they are a LoRA adapter's, to be served under its name beside the base model.
    While a pusher lives it owns its servers: another one is refused until this one is closed or dies.

    ``restart`` is called on rank 0 when a full resend failed too: with the endpoints that failed (all of them when the
    error does not tell) and the error. It stops those servers, starts them anew and returns, once they are healthy, an
    endpoint for each, in the same order; the weights are then sent to all servers a third time.
    """

    def __init__(
        self,
        source: WeightSource,
        endpoints: Sequence[Endpoint],
        config: SyncConfig | None = None,
        *,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        adapter: Adapter | None = None,
        restart: Restart | None = None,
    ) -> None:
        self._config = config or SyncConfig()
        self._source = Fp8Source(source) if self._config.quantise == "fp8_blocks" else source
        self._rank = rank
        self._group = group
        self._device = torch.device(device)
        self._plan: BucketPlan | None = None
        self._session: PushSession | None = None
        self._endpoints = list(endpoints)
        self._restart = restart
        if rank == 0:
            if not endpoints:
                raise SyncConfigError("endpoints: none given")
            controls = [self._control(endpoint) for endpoint in endpoints]
            self._session = PushSession(controls, self._config, self._device, _identity(), adapter)

    def push(self, version: int) -> SyncReport:
        """Move the weights into all servers and publish them as ``version``. A collective over the group.

        Servers finish their running requests first and hold new ones back. An error is answered by sending everything
        once more, and a second one by restarting the servers that failed, where ``restart`` is given, and sending a
        third time. When that fails too, or cannot help, every rank raises WeightSyncError and the servers stay paused
        with nothing published.
        """
        start = time.perf_counter()
        plan = self._plan_once()
        for attempt in itertools.count(1):
            error = self._attempt(plan, version)
            code, timings = self._agree(self._decide(error, attempt))
            if code == _DONE:
                total_s = time.perf_counter() - start
                return SyncReport(
                    version=version,
                    num_bytes=plan.num_bytes,
                    num_tensors=plan.num_tensors,
                    total_s=total_s,
                    num_attempts=attempt,
                    **timings,
                )
            if code == _FAILED:
                break
        message = self._share(str(error))
        if isinstance(error, ReceiverError):
            raise error
        raise WeightSyncError(f"version {version} was not published: {message}") from error

    def close(self) -> None:
        """Give up the servers and free the buffers. The servers stay as they are. Safe to call twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> "WeightPusher":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _plan_once(self) -> BucketPlan:
        if self._plan is None:
            bound = self._config.bucket_bytes(choose_transport(self._config, self._device))
            plan = plan_buckets(self._source.manifest(), bound)
            self._check_same(plan)
            self._plan = plan
        return self._plan

    def _check_same(self, plan: BucketPlan) -> None:
        """Ranks with different plans would wait for each other for ever; refuse on all of them instead."""
        if self._world() == 1:
            return
        value = int(plan.digest[:15], 16)
        low, high = self._tensor([value], torch.int64), self._tensor([value], torch.int64)
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
        if low.item() != high.item():
            raise ManifestError(f"rank {self._rank}: the ranks' manifests differ; this rank's plan is {plan.digest}")

    def _attempt(self, plan: BucketPlan, version: int) -> Exception | None:
        """One full send. Fills every bucket whatever happens, for the other ranks are in the same collectives."""
        if self._rank != 0:
            for bucket in plan.buckets * num_passes(self._config):
                self._source.fill(bucket, None)
            return None
        if self._session is None:
            return WeightSyncError("this pusher is closed")
        return self._session.send(self._source, plan, version, must_fill_all=self._world() > 1)

    def _decide(self, error: Exception | None, attempt: int) -> int:
        """What rank 0 does after an attempt. Restarts the servers that failed before a third one."""
        if error is None:
            return _DONE
        if attempt > 2 or self._session is None or (isinstance(error, ReceiverError) and not error.retryable):
            return _FAILED
        if attempt == 2:
            if self._restart is None:
                return _FAILED
            try:
                self._replace(self._session, self._restart, error)
            except Exception as problem:
                logger.exception("the servers could not be restarted")
                error.add_note(f"restarting the servers failed: {problem}")
                return _FAILED
        logger.warning("a weight sync failed and is sent once more: %s", error)
        return _AGAIN

    def _replace(self, session: PushSession, restart: "Restart", error: Exception) -> None:
        """Let the servers' owner start those anew that failed, and talk to the new ones from now on."""
        failed = session.blame(error)
        started = restart([self._endpoints[index] for index in failed], error)
        for index, endpoint in zip(failed, started, strict=True):
            self._endpoints[index] = endpoint
            session.replace(index, self._control(endpoint))

    def _control(self, endpoint: Endpoint) -> ServerControl:
        return ServerControl(endpoint.url, endpoint.api_key, self._config.timeout_s)

    def _agree(self, code: int) -> tuple[int, dict[str, float]]:
        """Rank 0's verdict and times, known to all ranks."""
        timings = Timings()
        if self._session is not None:
            timings = self._session.timings
        if self._world() > 1:
            values = [float(code), timings.pause_s, timings.gather_s, timings.transfer_s, timings.finish_s]
            tensor = self._tensor(values, torch.float64)
            dist.broadcast(tensor, src=self._root(), group=self._group)
            values = tensor.tolist()
            code, timings = int(values[0]), Timings(*values[1:])
        return code, timings.as_dict()

    def _share(self, message: str) -> str:
        """Rank 0's message, on every rank."""
        if self._world() == 1:
            return message
        box: list[Any] = [message]
        dist.broadcast_object_list(box, src=self._root(), group=self._group)
        return str(box[0])

    def _world(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        """A tensor where the group's collectives want it."""
        on_gpu = "nccl" in str(dist.get_backend(self._group)) and "gloo" not in str(dist.get_backend(self._group))
        return torch.tensor(values, dtype=dtype, device=self._device if on_gpu else "cpu")

    def _root(self) -> int:
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)


_DONE, _AGAIN, _FAILED = 0, 1, 2


def _identity() -> dict[str, Any]:
    return {"trainer": secrets.token_hex(8), "pid": os.getpid(), "host": socket.gethostname(), "protocol": PROTOCOL}
