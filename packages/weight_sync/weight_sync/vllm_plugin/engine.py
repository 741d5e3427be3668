"""The weight-transfer engine vLLM creates in every worker. Works with vLLM 0.26 to 0.32.

vLLM calls ``init_transfer_engine`` (a pusher claims this worker), ``start_weight_update``, ``update_weights`` (one call
for a whole sync: the worker connects to the pusher and stays until it has everything) and ``finish_weight_update``.
"""

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from ..channel import Channel, Message, connect
from ..checksum import checksum
from ..errors import ChannelError, ManifestError, ReceiverError, WeightSyncError
from ..plan import Bucket, BucketPlan
from ..session import PROTOCOL
from ..transports.base import Receiver
from ..transports.shm import ShmReceiver
from ..transports.tcp import TcpReceiver
from .adapters import AdapterLoader
from .apply import ModelLoader
from .layout import Layout

logger = init_logger(__name__)

#: Plans kept, with what their check against the model found; newest last.
_MAX_PLANS = 4


@dataclass
class PusherInfo(WeightTransferInitInfo):
    """Who claims this worker."""

    trainer: str
    pid: int
    host: str
    protocol: int
    address: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where to fetch one sync from."""

    trainer: str
    address: str = ""
    token: str = ""
    session: str = ""
    server: int = 0
    timeout_s: float = 120.0
    wait_s: float = 1920.0
    """Until the first message: the pusher may still wait for other servers' running requests."""
    abort: str = ""


class PlinthEngine(WeightTransferEngine[PusherInfo, UpdateInfo]):
    """Receives bucketed weights from a WeightPusher and loads them into this worker's model."""

    init_info_cls = PusherInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._owner: PusherInfo | None = None
        self._plans: dict[str, BucketPlan] = {}
        self._layouts: dict[str, Layout] = {}
        self._receivers: dict[str, Receiver] = {}
        self._loader = ModelLoader(model, self.model_config, device)
        self._adapters = AdapterLoader(model)
        self._complete = False
        self._process = secrets.token_hex(8)

    def init_transfer_engine(self, init_info: PusherInfo) -> None:
        """Accept a pusher unless another one lives. Raises ReceiverError."""
        if init_info.protocol != PROTOCOL:
            raise ReceiverError("protocol", "", f"the pusher speaks {init_info.protocol}, this server {PROTOCOL}")
        owner = self._owner
        if owner is not None and owner.trainer != init_info.trainer and _is_alive(owner):
            raise ReceiverError(
                "owner", "", f"owned by the live pusher {owner.trainer} (process {owner.pid} on {owner.host})"
            )
        self._owner = init_info

    def start_weight_update(self) -> None:
        """Nothing has arrived yet."""
        self._complete = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch one whole sync. Replaces the base method, whose accelerator synchronisation fails without one."""
        info = self.parse_update_info(update_info)
        if self._owner is None or info.trainer != self._owner.trainer:
            raise ReceiverError("owner", "", "this pusher has not claimed the server, or lost it to another one")
        if info.abort:
            raise WeightSyncError(f"the pusher ended this update: {info.abort}")
        with set_current_vllm_config(self.vllm_config):
            self.receive_weights(info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Connect to the pusher, check its plan, load every bucket, count. Errors go to the pusher, then to vLLM."""
        channel = connect(update_info.address, update_info.timeout_s)
        try:
            channel.send(self._hello(update_info))
            channel.set_timeout(update_info.wait_s)
            self._run(channel, update_info.timeout_s)
            self._complete = True
        except ReceiverError as error:
            self._report(channel, error)
            raise
        except ChannelError:
            raise
        except Exception as error:
            logger.exception("weight sync failed")
            self._report(channel, ReceiverError("internal", "", f"{type(error).__name__}: {error}"))
            raise
        finally:
            if not self._complete:
                self._loader.abort()
                self._adapters.abort()
            channel.close()

    def finish_weight_update(self) -> None:
        """Publish. Raises when the update is incomplete."""
        if not self._complete:
            raise WeightSyncError("finish without a complete update")
        self._adapters.publish()
        self._complete = False

    def shutdown(self) -> None:
        """Release buffers and the owner."""
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._owner = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.26; the trainer's side is WeightPusher."""
        raise NotImplementedError("use weight_sync.WeightPusher")

    def _hello(self, info: UpdateInfo) -> Message:
        parallel = self.parallel_config
        shm = self._receivers.get("shm")
        return {
            "type": "hello",
            "token": info.token,
            "session": info.session,
            "server": info.server,
            "worker": f"{getattr(parallel, 'data_parallel_index', 0)}.{parallel.rank}",
            "process": self._process,
            "device": self.device.type,
            "plans": list(self._plans),
            "segments": shm.id if isinstance(shm, ShmReceiver) else "",
        }

    def _run(self, channel: Channel, timeout_s: float) -> None:
        message = channel.receive()
        if message["type"] != "plan":
            raise _unexpected(message)
        channel.set_timeout(timeout_s)
        plan = self._learn(message)
        loader: ModelLoader | AdapterLoader = self._adapters
        if "adapter" in message:
            self._adapters.check(plan, message["adapter"])
            begin = self._adapters.begin
        else:
            loader = self._loader
            layerwise = message.get("apply") == "layerwise"
            begin = partial(self._loader.begin, self._layout_of(plan), layerwise=layerwise)
        receiver = self._receiver(message["transport"], timeout_s)
        receiver.attach(message["greeting"], channel.take_fds(), plan)
        channel.send({"type": "ready", "value": plan.digest})
        started = time.perf_counter()
        begin()
        num_tensors = self._stream(channel, plan, receiver, loader.load, loader.finish)
        logger.info("weight sync: %d tensors in %.3f s", num_tensors, time.perf_counter() - started)
        if message.get("verify"):
            loader.begin_verify()
            self._stream(channel, plan, receiver, loader.verify, loader.finish_verify)
            logger.info("weight sync: verified after %.3f s", time.perf_counter() - started)

    def _stream(
        self,
        channel: Channel,
        plan: BucketPlan,
        receiver: Receiver,
        take: Callable[[Bucket, torch.Tensor], None],
        finish: Callable[[], int],
    ) -> int:
        """Receive, check and take every bucket once; the number of tensors, acknowledged to the pusher."""
        for bucket in plan.buckets:
            message = channel.receive()
            if message["type"] != "bucket" or message["index"] != bucket.index:
                raise _unexpected(message)
            bytes_N = receiver.receive(bucket, channel)
            expected = message.get("checksum")
            if expected is not None and f"{checksum(bytes_N):016x}" != expected:
                first, last = bucket.slots[0].name, bucket.slots[-1].name
                raise ReceiverError("checksum", first, f"bucket {bucket.index} ({first} to {last}) arrived damaged")
            take(bucket, bytes_N)
            channel.send({"type": "taken", "value": bucket.index})
        message = channel.receive()
        if message["type"] != "end":
            raise _unexpected(message)
        num_tensors = finish()
        if num_tensors != message["num_tensors"]:
            raise ReceiverError("count", "", f"{num_tensors} tensors loaded, {message['num_tensors']} were sent")
        channel.send({"type": "done", "value": num_tensors})
        return num_tensors

    def _learn(self, message: Message) -> BucketPlan:
        """The plan the pusher means: known, or read and digested now."""
        digest = message["digest"]
        if digest in self._plans:
            return self._plans[digest]
        try:
            plan = BucketPlan.from_json(message["plan"])
        except ManifestError as error:
            raise ReceiverError("plan", "", str(error)) from error
        if plan.digest != digest:
            raise ReceiverError("plan", "", f"the pusher announced plan {digest} and sent {plan.digest}")
        self._plans[digest] = plan
        while len(self._plans) > _MAX_PLANS:
            forgotten = next(iter(self._plans))
            del self._plans[forgotten]
            self._layouts.pop(forgotten, None)
        return plan

    def _layout_of(self, plan: BucketPlan) -> Layout:
        """How the plan lands in the model, checked the first time."""
        if plan.digest not in self._layouts:
            self._layouts[plan.digest] = self._loader.check(plan)
        return self._layouts[plan.digest]

    def _receiver(self, transport: str, timeout_s: float) -> Receiver:
        if transport not in self._receivers:
            self._receivers[transport] = make_receiver(transport, self.device, timeout_s)
        return self._receivers[transport]

    def _report(self, channel: Channel, error: ReceiverError) -> None:
        try:
            channel.send({"type": "error", "kind": error.kind, "tensor": error.tensor, "detail": error.detail})
            channel.linger()
        except ChannelError:
            logger.warning("the pusher is gone and did not hear: %s", error)


def make_receiver(transport: str, device: torch.device, timeout_s: float) -> Receiver:
    """The worker's end of a transport. Raises ReceiverError for one this release does not know."""
    if transport == "shm":
        return ShmReceiver(device)
    if transport == "tcp":
        return TcpReceiver(device)
    if transport == "ipc":
        from ..transports.ipc import IpcReceiver

        return IpcReceiver(device)
    if transport == "nccl":
        from ..transports.nccl import NcclReceiver

        return NcclReceiver(device, timeout_s)
    raise ReceiverError("protocol", "", f"unknown transport {transport!r}")


def _unexpected(message: Message) -> WeightSyncError:
    if message.get("type") == "abort":
        return ChannelError(f"the pusher ended this update: {message.get('reason')}")
    return ReceiverError("protocol", "", f"unexpected message {str(message)[:200]}")


def _is_alive(owner: PusherInfo) -> bool:
    """Whether the pusher still listens. On another host a Unix address cannot be probed: it counts as alive."""
    if owner.address.startswith("unix:") and owner.host != socket.gethostname():
        return True
    try:
        connect(owner.address, 2.0).close()
    except ChannelError:
        return False
    return True
