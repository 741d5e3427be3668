"""The sending rank's conversation with all servers: claim, pause, start, stream the buckets, publish, resume.

Control goes over HTTP, one thread a server; buckets are announced over one socket per worker. The order on the wire:

    worker -> pusher   hello    (token, server, worker rank, what it still has mapped)
    pusher -> worker   plan     (digest; the layout when the worker does not know it; how to attach to the transport)
    worker -> pusher   ready    (digest recomputed, every name and shape checked against the model)
    pusher -> worker   bucket k (checksum)      two at most are unanswered
    worker -> pusher   taken k  (checksum verified, loaded)
    pusher -> worker   end      (number of tensors)
    worker -> pusher   done     (every name counted, layers processed)

Any message may be answered by ``error``; either side closing the socket means it died. Only when every worker of every
server said ``done`` is the version published.
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from .adapter import Adapter
from .channel import Channel, Listener, Message
from .checksum import checksum
from .config import SyncConfig
from .control import ServerControl
from .errors import ChannelError, ReceiverError, ServerError, WeightSyncError
from .plan import Bucket, BucketPlan
from .sources.base import WeightSource
from .transports.base import NUM_SLOTS, Sender
from .transports.shm import ShmSender
from .transports.tcp import TcpSender

#: Version of the messages; both sides must agree.
PROTOCOL = 1

_ABORT_WAIT_S = 15.0

T = TypeVar("T")


@dataclass
class Timings:
    """Wall-clock seconds of the parts of a push."""

    pause_s: float = 0.0
    gather_s: float = 0.0
    transfer_s: float = 0.0
    finish_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The times by name."""
        return asdict(self)


class Link:
    """The connection to one worker of one server."""

    def __init__(self, channel: Channel, hello: Message, where: str) -> None:
        self.channel = channel
        self.hello = hello
        self.where = where

    def receive(self) -> Message:
        """The worker's next message. Raises ReceiverError for an error message, ChannelError when it is gone."""
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
    """Owns the servers, the transport's buffers and the listening socket for the life of a pusher."""

    def __init__(
        self,
        controls: Sequence[ServerControl],
        config: SyncConfig,
        device: torch.device,
        identity: dict[str, Any],
        adapter: Adapter | None = None,
    ) -> None:
        self.timings = Timings()
        self._adapter = adapter
        self._controls = list(controls)
        self._config = config
        self._identity = identity
        transport = choose_transport(config, device)
        host = config.host or _route_to([control.url for control in controls])
        self._listener = Listener(host if transport in ("tcp", "nccl") else None)
        self._sender = make_sender(transport, config, device, host)
        self._num_workers: list[int] | None = None

    def send(self, source: WeightSource, plan: BucketPlan, version: int, *, must_fill_all: bool) -> Exception | None:
        """Send everything once and publish it; the error instead of raising it.

        With ``must_fill_all`` every bucket is filled even after an error, because other ranks are in the same
        collectives.
        """
        self.timings = Timings()
        filler = _Filler(source, plan, self._sender, self.timings, num_passes(self._config))
        push = _Push(secrets.token_hex(8), len(self._controls))
        try:
            self._sender.prepare(plan)
            self._claim()
            self._transfer(push, filler, plan, version)
            self._publish(version)
        except (WeightSyncError, OSError, ValueError, RuntimeError) as error:
            self._num_workers = None
            self._abort(push, error)
            return error
        finally:
            for link in push.links:
                link.channel.close()
            if must_fill_all:
                filler.drain()
        return None

    def close(self) -> None:
        """Free everything; the servers see the pusher as gone."""
        self._listener.close()
        self._sender.close()

    def blame(self, error: Exception) -> list[int]:
        """Indices of the servers an error speaks of; all of them when it does not tell."""
        place = getattr(error, "url", "") or getattr(error, "where", "") or str(error)
        found = [index for index, control in enumerate(self._controls) if _starts_with_url(place, control.url)]
        return found or list(range(len(self._controls)))

    def replace(self, index: int, control: ServerControl) -> None:
        """Talk to another server from now on."""
        self._controls[index] = control

    def _claim(self) -> None:
        """Before anything is paused: are these our servers, and is no other pusher alive?"""
        info = {**self._identity, "address": self._listener.address}
        self._each(lambda control: control.claim(info))
        if self._num_workers is None:
            self._num_workers = self._each(lambda control: control.world_size())

    def _transfer(self, push: "_Push", filler: "_Filler", plan: BucketPlan, version: int) -> None:
        for index, control in enumerate(self._controls):
            info = {
                "trainer": self._identity["trainer"],
                "address": self._listener.address,
                "token": self._listener.token,
                "session": push.session,
                "server": index,
                "timeout_s": self._config.timeout_s,
                "wait_s": self._config.pause_timeout_s + self._config.timeout_s,
            }
            push.futures.append(spawn(self._serve, push, index, control, info))
        ahead = min(NUM_SLOTS, len(plan.buckets))
        sums = [self._fill(filler) for _ in range(ahead)]  # while the servers finish their requests
        push.links = self._accept(push)
        self.timings.pause_s = max(push.pause_s)
        started = time.perf_counter()
        self._introduce(push, plan, version)
        self._stream(push, filler, plan, sums)
        for _ in range(1, num_passes(self._config)):
            self._stream(push, filler, plan, [])
        for future in push.futures:
            future.result(self._config.timeout_s)
        self.timings.transfer_s = time.perf_counter() - started

    def _stream(self, push: "_Push", filler: "_Filler", plan: BucketPlan, sums: list[int | None]) -> None:
        """All buckets once; the first ``len(sums)`` are filled already. Ends when every worker counted every name."""
        num_buckets = len(plan.buckets)
        ahead = len(sums)
        for index in range(num_buckets):
            if index >= NUM_SLOTS:
                self._gather_answers(push, "taken", index - NUM_SLOTS)
            if index >= ahead:
                sums.append(self._fill(filler))
            self._announce(push, plan.buckets[index], sums[index])
        for index in range(max(0, num_buckets - NUM_SLOTS), num_buckets):
            self._gather_answers(push, "taken", index)
        self._broadcast(push, {"type": "end", "num_tensors": plan.num_tensors})
        self._gather_answers(push, "done", plan.num_tensors)

    def _serve(self, push: "_Push", index: int, control: ServerControl, info: dict[str, Any]) -> None:
        """One server's thread: pause, open the update, stay in it until its workers have everything."""
        start = time.perf_counter()
        control.pause(self._config.pause_timeout_s)
        push.pause_s[index] = time.perf_counter() - start
        push.check()
        try:
            control.start()
        except ServerError as error:
            if error.status == 0:
                raise
            # An earlier pusher died between start and finish. We own the server now: end its update, begin ours.
            with contextlib.suppress(ServerError):
                control.update({"trainer": info["trainer"], "abort": "taken over"}, self._config.timeout_s)
            control.start()
        push.started[index] = True
        push.check()
        control.update(info, None)

    def _fill(self, filler: "_Filler") -> int | None:
        bytes_N = filler.fill_next()
        return checksum(bytes_N) if self._config.checksum else None

    def _accept(self, push: "_Push") -> list[Link]:
        """Wait for every worker of every server. A server's failure ends the wait at once."""
        assert self._num_workers is not None
        links: list[Link] = []
        deadline = time.monotonic() + self._config.pause_timeout_s + self._config.timeout_s
        while len(links) < sum(self._num_workers):
            channel = self._listener.accept(0.05, self._config.timeout_s)
            if channel is not None:
                link = self._welcome(push, channel)
                if link is not None:
                    links.append(link)
                    push.links = links
                continue
            for future in push.futures:
                if future.done():
                    future.result()
            if time.monotonic() > deadline:
                raise ChannelError(f"{len(links)} of {sum(self._num_workers)} workers connected in time")
        return sorted(links, key=lambda link: (link.hello["server"], link.hello["worker"]))

    def _welcome(self, push: "_Push", channel: Channel) -> Link | None:
        """Check a new connection's token and session; strangers and probes are turned away."""
        try:
            hello = channel.receive()
        except ChannelError:
            hello = {}
        if hello.get("token") != self._listener.token or hello.get("session") != push.session:
            channel.close()
            return None
        url = self._controls[int(hello["server"])].url
        return Link(channel, hello, f"{url} worker {hello['worker']}")

    def _introduce(self, push: "_Push", plan: BucketPlan, version: int) -> None:
        """Both sides agree on the plan before any byte moves."""
        greetings = [self._sender.greet({**link.hello, "where": link.where}) for link in push.links]
        common = self._sender.settle()
        for link, (greeting, fds) in zip(push.links, greetings, strict=True):
            message: Message = {"type": "plan", "digest": plan.digest, "version": version}
            message |= {"transport": self._sender.name, "greeting": greeting | common}
            message |= {"verify": self._config.verify, "apply": self._config.apply}
            if self._adapter is not None:
                message["adapter"] = {"name": self._adapter.name, "settings": dict(self._adapter.settings)}
            if plan.digest not in link.hello.get("plans", ()):
                message["plan"] = plan.to_json()
            link.channel.send(message, fds)
        self._gather_answers(push, "ready", plan.digest)

    def _announce(self, push: "_Push", bucket: Bucket, value: int | None) -> None:
        message: Message = {"type": "bucket", "index": bucket.index}
        if value is not None:
            message["checksum"] = f"{value:016x}"
        try:
            self._broadcast(push, message)
            self._sender.deliver(bucket, [link.channel for link in push.links])
        except ChannelError:
            for link in push.links:
                while link.channel.is_hung_up():  # why? its own words, or its name, say more
                    link.receive()
            raise

    def _broadcast(self, push: "_Push", message: Message) -> None:
        for link in push.links:
            link.channel.send(message)

    def _gather_answers(self, push: "_Push", kind: str, value: Any) -> None:
        """Wait until every worker said ``kind`` with ``value``; the first error from any of them ends the wait."""
        with selectors.DefaultSelector() as selector:
            for link in push.links:
                selector.register(link.channel, selectors.EVENT_READ, link)
            while selector.get_map():
                events = selector.select(self._config.timeout_s)
                if not events:
                    raise ChannelError(f"no worker said {kind!r} within {self._config.timeout_s} s")
                for key, _ in events:
                    message = key.data.receive()
                    if message.get("type") != kind or message.get("value") != value:
                        raise ChannelError(f"{key.data.where}: expected {kind} {value}, got {message}")
                    selector.unregister(key.fileobj)

    def _publish(self, version: int) -> None:
        """Every worker has everything: name the version everywhere, then let the servers answer again."""
        started = time.perf_counter()
        dropping = [spawn(control.drop_caches) for control in self._controls]
        self._each(lambda control: control.finish(version))
        for future in dropping:
            future.result()
        adapter = self._adapter
        if adapter is not None:
            self._each(lambda control: control.register_adapter(adapter.name, adapter.path))
        self._each(lambda control: control.resume())
        self.timings.finish_s = time.perf_counter() - started

    def _abort(self, push: "_Push", error: Exception) -> None:
        """End the update on every server that began one, leaving it paused and ready for another start."""
        push.cancelled = True
        self._sender.reset()
        for link in push.links:
            with contextlib.suppress(ChannelError):
                link.channel.send({"type": "abort", "reason": str(error)})
            link.channel.close()
        wait_futures(push.futures, timeout=_ABORT_WAIT_S)
        for index, control in enumerate(self._controls):
            if push.started[index] and push.futures[index].done() and push.futures[index].exception() is None:
                with contextlib.suppress(ServerError):
                    control.update({"trainer": self._identity["trainer"], "abort": str(error)}, _ABORT_WAIT_S)

    def _each(self, call: Callable[[ServerControl], T]) -> list[T]:
        """Run one call on all servers at the same time; the first error once all have answered."""
        futures = [spawn(call, control) for control in self._controls]
        wait_futures(futures)
        return [future.result() for future in futures]


class _Push:
    """What one attempt has opened so far."""

    def __init__(self, session: str, num_servers: int) -> None:
        self.session = session
        self.links: list[Link] = []
        self.futures: list[Future[None]] = []
        self.pause_s = [0.0] * num_servers
        self.started = [False] * num_servers
        self.cancelled = False

    def check(self) -> None:
        """Stop a server's thread whose push has already failed elsewhere."""
        if self.cancelled:
            raise WeightSyncError("given up: another server failed")


class _Filler:
    """Fills the buckets in order, each exactly once a pass."""

    def __init__(self, source: WeightSource, plan: BucketPlan, sender: Sender, timings: Timings, passes: int) -> None:
        self._source = source
        self._sender = sender
        self._timings = timings
        self._left: Iterator[Bucket] = iter(plan.buckets * passes)

    def fill_next(self) -> torch.Tensor:
        """The next bucket's bytes, filled."""
        bucket = next(self._left)
        start = time.perf_counter()
        out = self._sender.buffer(bucket)
        self._source.fill(bucket, out)
        if out.device.type == "cuda":
            torch.cuda.current_stream(out.device).synchronize()
        self._timings.gather_s += time.perf_counter() - start
        return out[: bucket.nbytes]

    def drain(self) -> None:
        """Take part in the collectives of the buckets that nobody will get."""
        for bucket in self._left:
            self._source.fill(bucket, None)


def spawn(call: Callable[..., T], *args: Any) -> Future[T]:
    """Run in a daemon thread: a server that never answers must not keep the trainer's process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight_sync", daemon=True).start()
    return future


def _starts_with_url(place: str, url: str) -> bool:
    return place.startswith(url) and not place[len(url) : len(url) + 1].isdigit()


def num_passes(config: SyncConfig) -> int:
    """How often a push sends everything: once to load it, and once more to compare."""
    return 2 if config.verify else 1


def choose_transport(config: SyncConfig, device: torch.device) -> str:
    """What ``auto`` means for a trainer on this device."""
    if config.transport != "auto":
        return config.transport
    return "ipc" if device.type == "cuda" else "shm"


def make_sender(transport: str, config: SyncConfig, device: torch.device, host: str) -> Sender:
    """The pusher's end of a transport. Raises SyncConfigError when it cannot work on this device."""
    if transport == "ipc":
        from .transports.ipc import IpcSender

        return IpcSender(device)
    if transport == "nccl":
        from .transports.nccl import NcclSender

        return NcclSender(device, host, config.timeout_s)
    return TcpSender() if transport == "tcp" else ShmSender()


def _route_to(urls: Sequence[str]) -> str:
    """This machine's address on the way to the servers; one that is not the loopback, if any server is elsewhere."""
    address = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError):
            kind, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                found = str(probe.getsockname()[0])
            if not found.startswith("127.") and found != "::1":
                return found
            address = found
    return address
