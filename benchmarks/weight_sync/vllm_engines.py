"""vLLM's own weight-transfer engines, used as in vLLM's examples, for `push.py --vllm`. GPUs only.

They read any `WeightSource`: vLLM's for a plain module, examples/zero3_weight_source.py's for DeepSpeed's ZeRO.

Later releases have trainer classes; in earlier ones the trainer calls static methods and makes the HTTP calls itself.
"""

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.runs import free_port

#: `nccl` sends one broadcast per parameter, the packed engines a few large buffers.
NAMES = ("nccl", "nccl-packed", "ipc", "ipc-packed")


def server_args(name: str) -> list[str]:
    """The server's arguments for an engine of vLLM; empty for an empty name."""
    return ["--weight-transfer-config", json.dumps({"backend": name.partition("-")[0]})] if name else []


@contextlib.contextmanager
def engine(name: str, source: Any, url: str, num_workers: int) -> Iterator[Callable[[], None]]:
    """Yields a function that sends the tensors of a `WeightSource` once, without pause and resume."""
    import vllm.distributed.weight_transfer.ipc_engine as ipc
    import vllm.distributed.weight_transfer.nccl_engine as nccl
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    backend, _, packed = name.partition("-")
    # The engines reject a tensor that is larger than the buffer (default 1 GiB).
    largest = max(math.prod(entry.shape) * entry.dtype.itemsize for entry in source.metadata())
    packing = {"packed": True, "packed_buffer_size_bytes": max(2**30, largest)} if packed else {"packed": False}
    client = HTTPVLLMWeightSyncClient(url)
    rendezvous = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 1 + num_workers}
    if hasattr(nccl, "NCCLTrainerWeightTransferEngine"):
        if backend == "nccl":
            kind, info = nccl.NCCLTrainerWeightTransferEngine, nccl.NCCLTrainerInitInfo
            trainer = kind.trainer_init(info(rank=0, **packing, **rendezvous), client=client, source=source)
        else:
            kind, info = ipc.IPCTrainerWeightTransferEngine, ipc.IPCTrainerInitInfo
            trainer = kind.trainer_init(info(rank=0, **packing), client=client, source=source)
        yield trainer.send_weights
        trainer.shutdown()
        return
    if backend == "nccl":
        join_server = _background(client.init_weight_transfer_engine, {**rendezvous, "rank_offset": 1})
        group = nccl.NCCLWeightTransferEngine.trainer_init(rendezvous)
        join_server()
    else:
        client.init_weight_transfer_engine({})

    def send() -> None:
        client.start_weight_update()
        if backend == "nccl":
            entries = source.metadata()
            update = {
                "names": [entry.name for entry in entries],
                "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in entries],
                "shapes": [list(entry.shape) for entry in entries],
                **packing,
            }
            wait_received = _background(client.update_weights, update)
            nccl.NCCLWeightTransferEngine.trainer_send_weights(iter(source), {"group": group, **packing})
            wait_received()
        else:
            settings = {"send_mode": "http", "url": url, **packing}
            ipc.IPCWeightTransferEngine.trainer_send_weights(iter(source), settings)
        client.finish_weight_update()

    yield send


def _background(call: Callable[..., None], argument: Any) -> Callable[[], None]:
    """Run in a thread; returns a function that waits for its end and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(argument)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> None:
        thread.join()
        if errors:
            raise errors[0]

    return wait
