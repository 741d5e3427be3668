"""WeightPusher: one call pushes a policy from a source into every server, or leaves all servers paused."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ..config import Adapter, SyncConfig
from ..errors import ReceiverError, SyncConfigError, WeightManifestError, WeightSyncError
from ..plan import BucketPlan, plan_buckets
from ..sources.base import TensorSource
from ..transports.routes import choose_transports
from ..transports.select import transport_kind
from .server import Endpoint, ServerControl
from .session import PushSession, Timings, num_passes

logger = logging.getLogger(__name__)

#: A failed push is sent once more.
_MAX_ATTEMPTS = 2

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Result of one push. Times are wall-clock seconds on the sending rank and overlap in part."""

    version: int
    num_bytes: int
    num_tensors: int
    total_s: float
    pause_s: float
    """Longest wait for a server to finish its running requests, or to hold them (`SyncConfig.running_requests`)."""
    gather_s: float
    """Time in which the source filled buckets."""
    transfer_s: float
    """From the connection of the last worker to the last worker's final acknowledgement."""
    finish_s: float
    """Publishing, dropping the prefix cache, resuming."""
    transports: Mapping[str, str]
    """URL of each server -> the transport that its weights were sent over."""
    num_attempts: int = 1


class WeightPusher:
    """Pushes the weights of ``source`` into the servers behind ``endpoints``.

    Every rank builds one and calls ``push``; rank 0 controls the servers, the others take part in the source's
    collectives. ``group`` is the torch process group of these ranks and ``rank`` the rank within it; None means the
    default group if torch.distributed is initialized, else this process alone. ``device`` is where the source's tensors
    are. ``adapter``: the tensors are a LoRA adapter, which is served under its name next to the base model. An open
    pusher owns its servers: they reject another pusher until this one is closed or its process ends.

    The transport is chosen per server, on rank 0's host; see SyncConfig. Raises SyncConfigError on rank 0 for an empty
    list of endpoints, a bad URL, or a transport that does not reach a server.
    """

    def __init__(
        self,
        source: TensorSource,
        endpoints: Sequence[Endpoint],
        config: SyncConfig | None = None,
        *,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        adapter: Adapter | None = None,
    ) -> None:
        self._config = config or SyncConfig()
        self._source = source
        self._rank = rank
        self._group = group
        self._device = torch.device(device)
        self._transports: dict[str, str] = {}
        self._plan: BucketPlan | None = None
        self._session: PushSession | None = None
        if rank == 0:
            if not endpoints:
                raise SyncConfigError(field="endpoints", value=endpoints, allowed="at least one")
            controls = [ServerControl(e.url, e.api_key, self._config.timeout_s) for e in endpoints]
            urls = [endpoint.url for endpoint in endpoints]
            self._transports = choose_transports(self._config, urls, on_gpu=self._device.type == "cuda")
            transports = [self._transports[url] for url in urls]
            self._session = PushSession(controls, transports, self._config, self._device, adapter)

    def push(self, version: int) -> SyncReport:
        """Send the weights to all servers and publish them as ``version``. A collective over the group.

        The servers first finish or hold their running requests (`SyncConfig.running_requests`) and hold new ones. After
        an error everything is sent once more, unless a resend cannot succeed (a rejected plan).

        Raises on every rank, with the servers paused and nothing published:
            ReceiverError: on rank 0, when a worker rejected the plan or a bucket.
            WeightSyncError: on the other ranks, and for any other failure.
            WeightManifestError: the ranks' manifests differ.
        """
        start = time.perf_counter()
        plan = self._plan_once()
        error: Exception | None = None
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            error = self._attempt(plan, version)
            timings = self._session.timings if self._session is not None else Timings()
            is_done, timings = self._broadcast((error is None, timings))
            if is_done:
                return SyncReport(
                    version=version,
                    num_bytes=plan.num_bytes,
                    num_tensors=plan.num_tensors,
                    total_s=time.perf_counter() - start,
                    transports=self._transports,
                    num_attempts=attempt,
                    **asdict(timings),
                )
            is_final = self._session is None or (isinstance(error, ReceiverError) and not error.retryable)
            if attempt == _MAX_ATTEMPTS or self._broadcast(is_final):
                break
            if error is not None:
                logger.warning("weight sync failed, sending everything once more: %s", error)
        message = self._broadcast(str(error))
        if isinstance(error, ReceiverError):
            raise error
        raise WeightSyncError(f"version {version} was not published: {message}") from error

    def close(self) -> None:
        """Release the servers, which stay as they are, and free the buffers. Can be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> "WeightPusher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan_once(self) -> BucketPlan:
        if self._plan is None:
            self._transports = self._broadcast(self._transports)  # other ranks may be on other hosts than rank 0
            # All servers get one plan. Its bound is the smallest: a small bucket costs a fast transport half a
            # millisecond, while a slow one could not overlap sending and loading with a large bucket.
            names = self._transports.values()
            bound = min(self._config.bucket_bytes(name, transport_kind(name).bucket_mib) for name in names)
            plan = plan_buckets(self._source.manifest(), bound)
            self._check_same(plan)
            self._plan = plan
        return self._plan

    def _check_same(self, plan: BucketPlan) -> None:
        """Ranks with different plans would wait for each other indefinitely; raise on all of them instead."""
        digests = [plan.digest]
        if self._world_size() > 1:
            digests *= self._world_size()
            dist.all_gather_object(digests, plan.digest, group=self._group)
        if len(set(digests)) > 1:
            raise WeightManifestError(f"rank {self._rank}: the ranks' manifests differ; their plans are {digests}")

    def _attempt(self, plan: BucketPlan, version: int) -> Exception | None:
        """Send everything once. Fills all buckets even after an error, because other ranks run the same collectives."""
        if self._rank != 0:
            for bucket in plan.buckets * num_passes(self._config):
                self._source.fill(bucket, None)
            return None
        if self._session is None:
            return WeightSyncError("this pusher is closed")
        return self._session.send(self._source, plan, version, must_fill_all=self._world_size() > 1)

    def _broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self._world_size() == 1:
            return value
        box, root = [value], 0 if self._group is None else dist.get_global_rank(self._group, 0)
        # With a backend of GPUs alone, the message travels through one.
        backend = str(dist.get_backend(self._group))
        device = self._device if "nccl" in backend and "gloo" not in backend else torch.device("cpu")
        dist.broadcast_object_list(box, src=root, group=self._group, device=device)
        return box[0]

    def _world_size(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)
