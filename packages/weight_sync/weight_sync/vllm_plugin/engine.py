"""The weight-transfer engine that vLLM creates in every worker, for vLLM 0.26 to 0.32.

vLLM calls ``init_transfer_engine`` (a pusher claims this worker), ``start_weight_update``, ``update_weights`` (once per
sync: the worker connects to the pusher and returns when it has loaded everything) and ``finish_weight_update``.
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
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from ..channel import PROTOCOL, Channel, Message, connect
from ..errors import ChannelError, ReceiverError, WeightManifestError, WeightSyncError
from ..plan import Bucket, BucketPlan
from ..tensors import checksum
from ..transports.base import Receiver
from ..transports.select import make_receiver
from . import apply, held_requests, layout, processing, stale_replies
from .adapters import AdapterLoader
from .apply import ModelLoader
from .layout import Layout
from .patch import FENCE

PATCH = FENCE.patch(
    name="weight-transfer engine",
    reason="vLLM's interface for engines that receive weights, which changes between releases",
    otherwise="refused",
    reads={
        "vllm.distributed.weight_transfer.base": ("WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
            "init_transfer_engine(init_info, ...)",
            "parse_update_info(update_dict, ...)",
            "update_weights",
            "receive_weights",
            "start_weight_update",
            "finish_weight_update",
            "shutdown",
        ),
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": ("_registry", "register_engine"),
    },
)

logger = init_logger("vllm.weight_sync")  # vLLM shows only its own loggers' lines

#: Plans kept, with their layouts in the model; newest last.
_MAX_PLANS = 4


@dataclass
class PusherInfo(WeightTransferInitInfo):
    """The pusher that claims this worker."""

    trainer: str
    pid: int
    host: str
    protocol: int
    address: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Address and identity of one sync."""

    trainer: str
    address: str = ""
    token: str = ""
    session: str = ""
    server: int = 0
    timeout_s: float = 120.0
    wait_s: float = 1920.0
    """Longest wait for the first message, as other servers may still have running requests."""
    abort: str = ""
    """Reason why the pusher ends this update; empty for a regular sync."""


class PlinthEngine(WeightTransferEngine[PusherInfo, UpdateInfo]):
    """Receives buckets from a WeightPusher and loads them into this worker's model."""

    init_info_cls = PusherInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        for patch in (PATCH, processing.PATCH, stale_replies.PATCH, layout.PATCH, apply.PATCH):
            patch.check()
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
        """Accept a pusher as the owner. Raises ReceiverError while another pusher is alive."""
        if init_info.protocol != PROTOCOL:
            raise ReceiverError("protocol", "", f"the pusher has protocol {init_info.protocol}, this server {PROTOCOL}")
        owner = self._owner
        if owner is not None and owner.trainer != init_info.trainer and _is_alive(owner):
            raise ReceiverError(
                "owner", "", f"owned by the live pusher {owner.trainer} (process {owner.pid} on {owner.host})"
            )
        self._owner = init_info

    def start_weight_update(self) -> None:
        """Start an update that is not complete yet."""
        self._complete = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one sync. Overrides the base method, which synchronizes an accelerator and fails on the CPU."""
        info = self.parse_update_info(update_info)
        if self._owner is None or info.trainer != self._owner.trainer:
            raise ReceiverError(
                "owner", "", "this pusher does not own the server: it has not claimed it, or another one has"
            )
        if info.abort:
            raise WeightSyncError(f"the pusher ended this update: {info.abort}")
        with set_current_vllm_config(self.vllm_config):
            self.receive_weights(info)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Connect to the pusher, check its plan, load and count every tensor. Reports errors to the pusher and vLLM."""
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
        """Publish the update. Raises WeightSyncError when it is incomplete."""
        if not self._complete:
            raise WeightSyncError("finish_weight_update was called before the update was complete")
        self._adapters.publish()
        self._complete = False

    def shutdown(self) -> None:
        """Free the buffers and release the owner."""
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._owner = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not supported: the trainer's side is WeightPusher. Abstract in vLLM 0.26."""
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
            "cannot_keep": held_requests.PATCH.problem() or "",
            "segments": shm.id if shm is not None else "",
        }

    def _run(self, channel: Channel, timeout_s: float) -> None:
        message = channel.receive()
        if message["type"] != "plan":
            raise _unexpected(message)
        channel.set_timeout(timeout_s)
        plan = self._resolve_plan(message)
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
        seconds = time.perf_counter() - started
        logger.info(
            "weight sync: %d tensors in %.3f s; calls of replaced parts: %s", num_tensors, seconds, FENCE.num_calls()
        )
        if message.get("verify"):
            verifier = loader.verifier()
            self._stream(channel, plan, receiver, verifier.verify, verifier.finish)
            logger.info("weight sync: verified after %.3f s", time.perf_counter() - started)

    def _stream(
        self,
        channel: Channel,
        plan: BucketPlan,
        receiver: Receiver,
        take: Callable[[Bucket, torch.Tensor], None],
        finish: Callable[[], int],
    ) -> int:
        """Receive every bucket once, verify its checksum and pass it to ``take``; returns the number of tensors."""
        for bucket in plan.buckets:
            message = channel.receive()
            if message["type"] != "bucket" or message["index"] != bucket.index:
                raise _unexpected(message)
            bytes_N = receiver.receive(bucket, channel)
            expected = message.get("checksum")
            if expected is not None and f"{checksum(bytes_N):016x}" != expected:
                first, last = bucket.slots[0].name, bucket.slots[-1].name
                raise ReceiverError("checksum", first, f"bucket {bucket.index} ({first} to {last}) is corrupted")
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

    def _resolve_plan(self, message: Message) -> BucketPlan:
        """The plan with the announced digest: already known, or read from the message."""
        digest = message["digest"]
        if digest in self._plans:
            return self._plans[digest]
        try:
            plan = BucketPlan.from_json(message["plan"])
        except WeightManifestError as error:
            raise ReceiverError("plan", "", str(error)) from error
        if plan.digest != digest:
            raise ReceiverError("plan", "", f"the pusher announced plan {digest} and sent {plan.digest}")
        self._plans[digest] = plan
        while len(self._plans) > _MAX_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._layouts.pop(oldest, None)
        return plan

    def _layout_of(self, plan: BucketPlan) -> Layout:
        """The plan's layout in the model, from a dry run the first time."""
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
            logger.warning("cannot report to the pusher, which is gone: %s", error)


def _unexpected(message: Message) -> WeightSyncError:
    if message.get("type") == "abort":
        return ChannelError(f"the pusher ended this update: {message.get('reason')}")
    return ReceiverError("protocol", "", f"unexpected message {str(message)[:200]}")


def _is_alive(owner: PusherInfo) -> bool:
    """True if the pusher still listens. A Unix address on another host cannot be probed and counts as alive."""
    if owner.address.startswith("unix:") and owner.host != socket.gethostname():
        return True
    try:
        connect(owner.address, 2.0).close()
    except ChannelError:
        return False
    return True
