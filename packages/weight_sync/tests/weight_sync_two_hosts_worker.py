"""One of two ranks on two hosts, which push together. Run by test_weight_sync_two_hosts.py."""

import json
import sys
from types import SimpleNamespace

import torch.distributed as dist

from weight_sync import HfFolderSource, SyncConfig, SyncConfigError, WeightPusher


class Config(SyncConfig):
    """The bucket size tells which transport a rank has planned for."""

    def bucket_bytes(self, transport: str, default_mib: int) -> int:
        """Bytes, by transport."""
        return {"shm": 40_000, "tcp": 60_000}[transport]


class CollectiveSource(HfFolderSource):
    """Every fill is a collective, as with sharded weights: a rank that fills once more or less than the other hangs."""

    def fill(self, bucket: object, out: object) -> None:
        """Fill on rank 0, after all ranks have met."""
        dist.barrier()
        if out is not None:
            super().fill(bucket, out)  # type: ignore[arg-type]


folder, *servers = sys.argv[1:]
endpoints = [SimpleNamespace(**json.loads(server)) for server in servers]
dist.init_process_group("gloo")
rank = dist.get_rank()
for given in (endpoints[:1], endpoints[1:], endpoints):
    with WeightPusher(CollectiveSource(folder), given, Config(), rank=rank) as pusher:
        report = pusher.push(9)
        assert pusher._plan is not None
        print(json.dumps([dict(report.transports), report.num_attempts, len(pusher._plan.buckets)]))
try:
    WeightPusher(CollectiveSource(folder), endpoints, Config(transport="shm"), rank=rank)
    print("accepted")
except SyncConfigError:
    print("refused")
dist.destroy_process_group()
