"""The sending rank's session with all servers: claim, pause, start, stream the buckets, publish, resume.

Control calls go over HTTP, in one thread per server; bucket messages go over one socket per worker (`channel` lists
them). The version is published only after every worker of every server has acknowledged everything.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..channel import PROTOCOL, Channel, Listener, Message
from ..config import Adapter, SyncConfig
from ..errors import ChannelError, ReceiverError, ServerError, SyncConfigError, WeightSyncError
from ..plan import NUM_BUFFERS, Bucket, BucketPlan
from ..sources.base import TensorSource
from ..tensors import checksum, synchronize
from ..transports.routes import local_address
from ..transports.select import SenderGroup, make_senders, transport_kind
from .server import ServerControl

#: Longest wait, in seconds, for a server to end a failed update.
_ABORT_WAIT_S = 15.0

T = TypeVar("T")


@dataclass
class Timings:
    """Wall-clock seconds of the phases of a push."""

    pause_s: float = 0.0
    gather_s: float = 0.0
    transfer_s: float = 0.0
    finish_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """The connection to one worker of one server."""

    channel: Channel
    hello: Message
    where: str

    @property
    def server(self) -> int:
        """Index of the worker's server."""
        return int(self.hello["server"])

    def receive(self) -> Message:
        """The worker's next message. Raises ReceiverError for an error message, ChannelError for a lost connection."""
        try:
            message = self.channel.receive()
        except ChannelError as error:
            raise ChannelError(f"{self.where}: {error}") from error
        if message.get("type") == "error":
            raise ReceiverError(
                str(message.get("kind")), str(message.get("tensor", "")), str(message.get("detail")), self.where
            )
        return message


class PushSession:
    """The connection of a pusher to its servers: control clients, transport buffers, listening sockets.

    ``transports``: the transport to each server, in the order of ``controls``.
    """

    def __init__(
        self,
        controls: Sequence[ServerControl],
        transports: Sequence[str],
        config: SyncConfig,
        device: torch.device,
        adapter: Adapter | None = None,
    ) -> None:
        self.timings = Timings()
        self._adapter = adapter
        self._controls = list(controls)
        self._config = config
        self._trainer = secrets.token_hex(8)
        is_local = [bool(transport_kind(name).one_host) for name in transports]
        reached_by_ip = [control.url for control, local in zip(controls, is_local, strict=True) if not local]
        host = config.host or local_address(reached_by_ip)
        self._listener = Listener(host if reached_by_ip else None)
        self._addresses = [self._listener.local_address if local else self._listener.address for local in is_local]
        self._senders = make_senders(transports, config, device, host)
        self._num_workers: list[int] | None = None

    def send(self, source: TensorSource, plan: BucketPlan, version: int, *, must_fill_all: bool) -> Exception | None:
        """Send everything once and publish it. Returns the error instead of raising it.

        With ``must_fill_all`` every bucket is filled even after an error, because other ranks are in the same
        collectives.
        """
        self.timings = Timings()
        filler = _BucketFiller(source, plan, self._senders, self.timings, self._config)
        attempt = _Attempt(secrets.token_hex(8))
        try:
            self._senders.prepare(plan)
            self._claim()
            self._transfer(attempt, filler, plan, version)
            self._publish(version)
        except (WeightSyncError, OSError, ValueError, RuntimeError) as error:
            self._num_workers = None
            self._abort(attempt, error)
            return error
        finally:
            for link in attempt.links:
                link.channel.close()
            if must_fill_all:
                filler.drain()
        return None

    def close(self) -> None:
        """Close the sockets and free the buffers. The servers then accept another pusher."""
        self._listener.close()
        self._senders.close()

    def _claim(self) -> None:
        """Become the owner of every server, before any of them is paused. Fails if another pusher is alive.

        Once for all pushes, and again after one that failed: a server may have been restarted.
        """
        if self._num_workers is None:
            address_of = dict(zip(self._controls, self._addresses, strict=True))
            own = {"trainer": self._trainer, "pid": os.getpid(), "host": socket.gethostname(), "protocol": PROTOCOL}
            self._each(lambda control: control.claim({**own, "address": address_of[control]}))
            self._num_workers = self._each(lambda control: control.world_size())

    def _transfer(self, attempt: "_Attempt", filler: "_BucketFiller", plan: BucketPlan, version: int) -> None:
        for index, control in enumerate(self._controls):
            info = {
                "trainer": self._trainer,
                "address": self._addresses[index],
                "token": self._listener.token,
                "session": attempt.session,
                "server": index,
                "timeout_s": self._config.timeout_s,
                "wait_s": self._config.pause_timeout_s + self._config.timeout_s,
            }
            attempt.futures.append(run_in_thread(self._update_server, attempt, index, control, info))
        ahead = min(NUM_BUFFERS, len(plan.buckets))
        sums = [filler.fill_next() for _ in range(ahead)]  # while the servers finish their requests
        attempt.links = self._accept_workers(attempt)
        self.timings.pause_s = max(attempt.pause_s.values())
        started = time.perf_counter()
        self._send_plan(attempt, plan, version)
        self._stream(attempt, filler, plan, sums)
        for _ in range(1, num_passes(self._config)):
            self._stream(attempt, filler, plan, [])
        for future in attempt.futures:
            future.result(self._config.timeout_s)
        self.timings.transfer_s = time.perf_counter() - started

    def _stream(self, attempt: "_Attempt", filler: "_BucketFiller", plan: BucketPlan, sums: list[int | None]) -> None:
        """Send every bucket once; the first ``len(sums)`` are already filled. Returns when every worker is done."""
        num_buckets = len(plan.buckets)
        ahead = len(sums)
        for index in range(num_buckets):
            if index >= NUM_BUFFERS:
                self._await_replies(attempt, "taken", index - NUM_BUFFERS)
            if index >= ahead:
                sums.append(filler.fill_next())
            self._announce(attempt, plan.buckets[index], sums[index])
        for index in range(max(0, num_buckets - NUM_BUFFERS), num_buckets):
            self._await_replies(attempt, "taken", index)
        self._broadcast(attempt, {"type": "end", "num_tensors": plan.num_tensors})
        self._await_replies(attempt, "done", plan.num_tensors)

    def _update_server(self, attempt: "_Attempt", index: int, control: ServerControl, info: dict[str, Any]) -> None:
        """One server's thread: pause, start the update, and run it until its workers have loaded everything."""
        start = time.perf_counter()
        control.pause(self._config.pause_timeout_s, holds_requests=self._config.holds_requests)
        attempt.pause_s[index] = time.perf_counter() - start
        attempt.raise_if_canceled()
        try:
            control.start()
        except ServerError as error:
            if error.status == 0:
                raise
            # An earlier pusher died between start and finish. This pusher owns the server now, so it ends that update.
            with contextlib.suppress(ServerError):
                control.update({"trainer": info["trainer"], "abort": "taken over"}, self._config.timeout_s)
            control.start()
        attempt.started.add(index)
        attempt.raise_if_canceled()
        control.update(info, None)

    def _accept_workers(self, attempt: "_Attempt") -> list[Link]:
        """Wait until every worker of every server has connected. A server's failure ends the wait at once."""
        assert self._num_workers is not None
        links: list[Link] = []
        deadline = time.monotonic() + self._config.pause_timeout_s + self._config.timeout_s
        while len(links) < sum(self._num_workers):
            accepted = self._listener.accept(0.05, self._config.timeout_s)
            if accepted is not None:
                link = self._accept_worker(attempt, *accepted)
                if link is not None:
                    links.append(link)
                    attempt.links = links
                continue
            for future in attempt.futures:
                if future.done():
                    future.result()
            if time.monotonic() > deadline:
                raise ChannelError(f"{len(links)} of {sum(self._num_workers)} workers connected in time")
        return sorted(links, key=lambda link: (link.hello["server"], link.hello["worker"]))

    def _accept_worker(self, attempt: "_Attempt", channel: Channel, hello: Message) -> Link | None:
        """The link of a worker's connection; None, with the connection closed, if it belongs to another attempt."""
        server: Any = hello.get("server")
        is_known = server in range(len(self._controls)) and isinstance(hello.get("worker"), str)
        if hello.get("session") != attempt.session or not is_known:
            channel.close()
            return None
        self._check_can_keep(self._controls[server].url, hello)
        return Link(channel, hello, f"{self._controls[server].url} worker {hello['worker']}")

    def _check_can_keep(self, url: str, hello: Message) -> None:
        """Refuse ``keep`` before weights are sent if the server could not drop its prefix cache beside requests."""
        problem = hello.get("cannot_keep", "its version of weight_sync is too old")
        if self._config.running_requests == "keep" and problem:
            raise SyncConfigError(
                f"the server at {url} cannot keep requests: {problem}",
                field="running_requests",
                value="keep",
                allowed="wait, recompute",
            )

    def _send_plan(self, attempt: "_Attempt", plan: BucketPlan, version: int) -> None:
        """Send the plan to every worker and wait until all have accepted it. No weights are sent before."""
        senders = [self._senders.of(link.server) for link in attempt.links]
        greetings = [
            sender.greet({**link.hello, "where": link.where})
            for link, sender in zip(attempt.links, senders, strict=True)
        ]
        for link, sender, (greeting, fds) in zip(attempt.links, senders, greetings, strict=True):
            message: Message = {"type": "plan", "digest": plan.digest, "version": version}
            message |= {"transport": sender.name, "greeting": greeting | sender.common_greeting()}
            message |= {"verify": self._config.verify, "apply": self._config.apply}
            if self._adapter is not None:
                message["adapter"] = {"name": self._adapter.name, "settings": dict(self._adapter.settings)}
            if plan.digest not in link.hello.get("plans", ()):
                message["plan"] = plan.to_json()
            link.channel.send(message, fds)
        self._await_replies(attempt, "ready", plan.digest)

    def _announce(self, attempt: "_Attempt", bucket: Bucket, value: int | None) -> None:
        message: Message = {"type": "bucket", "index": bucket.index}
        if value is not None:
            message["checksum"] = f"{value:016x}"
        try:
            self._broadcast(attempt, message)
            self._senders.deliver(bucket, [(link.server, link.channel) for link in attempt.links])
        except ChannelError:
            for link in attempt.links:
                while link.channel.is_hung_up():  # raises with the worker's name and, if it sent one, its error
                    link.receive()
            raise

    def _broadcast(self, attempt: "_Attempt", message: Message) -> None:
        for link in attempt.links:
            link.channel.send(message)

    def _await_replies(self, attempt: "_Attempt", kind: str, value: Any) -> None:
        """Wait until every worker has replied ``kind`` with ``value``. The first error ends the wait."""
        with selectors.DefaultSelector() as selector:
            for link in attempt.links:
                selector.register(link.channel, selectors.EVENT_READ, link)
            while selector.get_map():
                events = selector.select(self._config.timeout_s)
                if not events:
                    raise ChannelError(f"no worker replied {kind!r} within {self._config.timeout_s} s")
                for key, _ in events:
                    message = key.data.receive()
                    if message.get("type") != kind or message.get("value") != value:
                        raise ChannelError(f"{key.data.where}: expected {kind} {value}, got {message}")
                    selector.unregister(key.fileobj)

    def _publish(self, version: int) -> None:
        """Publish the version on every server, then resume all of them."""
        started = time.perf_counter()
        held = self._config.running_requests
        cache_resets = [run_in_thread(control.drop_prefix_cache, held) for control in self._controls]
        cache_resets += [run_in_thread(control.drop_encoder_cache) for control in self._controls]
        self._each(lambda control: control.finish(version))
        for future in cache_resets:
            future.result()
        adapter = self._adapter
        if adapter is not None:
            self._each(lambda control: control.register_adapter(adapter.name, adapter.path))
        self._each(lambda control: control.resume())
        self.timings.finish_s = time.perf_counter() - started

    def _abort(self, attempt: "_Attempt", error: Exception) -> None:
        """End the update on every server that started one. It stays paused and can start another."""
        attempt.canceled = True
        self._senders.reset()
        for link in attempt.links:
            with contextlib.suppress(ChannelError):
                link.channel.send({"type": "abort", "reason": str(error)})
            link.channel.close()
        wait_futures(attempt.futures, timeout=_ABORT_WAIT_S)
        for index, control in enumerate(self._controls):
            if index in attempt.started and attempt.futures[index].done() and not attempt.futures[index].exception():
                with contextlib.suppress(ServerError):
                    control.update({"trainer": self._trainer, "abort": str(error)}, _ABORT_WAIT_S)

    def _each(self, call: Callable[[ServerControl], T]) -> list[T]:
        """Call all servers in parallel. Raises the first error after all have answered."""
        futures = [run_in_thread(call, control) for control in self._controls]
        wait_futures(futures)
        return [future.result() for future in futures]


@dataclass
class _Attempt:
    """State of one attempt: its links, server threads and progress, the latter by the server's index."""

    session: str
    links: list[Link] = field(default_factory=list)
    futures: list[Future[None]] = field(default_factory=list)
    pause_s: dict[int, float] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    canceled: bool = False

    def raise_if_canceled(self) -> None:
        """Stop a server's thread when the push has failed on another server."""
        if self.canceled:
            raise WeightSyncError("canceled: another server failed")


class _BucketFiller:
    """Fills the buckets in order, each once per pass."""

    def __init__(
        self, source: TensorSource, plan: BucketPlan, senders: SenderGroup, timings: Timings, config: SyncConfig
    ) -> None:
        self._source = source
        self._senders = senders
        self._timings = timings
        self._with_checksum = config.checksum
        self._left: Iterator[Bucket] = iter(plan.buckets * num_passes(config))

    def fill_next(self) -> int | None:
        """Fill the next bucket and return its checksum; None without checksums."""
        bucket = next(self._left)
        start = time.perf_counter()
        out = self._senders.buffer(bucket)
        self._source.fill(bucket, out)
        synchronize(out.device)
        self._timings.gather_s += time.perf_counter() - start
        return checksum(out[: bucket.nbytes]) if self._with_checksum else None

    def drain(self) -> None:
        """Take part in the collectives of the remaining buckets without sending them."""
        for bucket in self._left:
            self._source.fill(bucket, None)


def run_in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Run in a daemon thread, so that a server that never answers does not keep the trainer's process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight_sync", daemon=True).start()
    return future


def num_passes(config: SyncConfig) -> int:
    """Passes of a push over all buckets: one to load them and, with ``verify``, one more to compare them."""
    return 2 if config.verify else 1
