"""A pusher that kills itself during a push. Run by test_weight_sync_server.py."""

import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

from weight_sync import HfFolderSource, SyncConfig, WeightPusher


class SelfKillingSource(HfFolderSource):
    """Kills its process at the fourth bucket."""

    def fill(self, bucket: Any, out: Any) -> None:
        if bucket.index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().fill(bucket, out)


SyncConfig.bucket_bytes = lambda *_: 40_000  # type: ignore[method-assign]
WeightPusher(SelfKillingSource(sys.argv[1]), [SimpleNamespace(url=sys.argv[2], api_key=None)]).push(1)
