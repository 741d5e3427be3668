"""What runs inside vLLM, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weight_sync.vllm_plugin.apply import ModelLoader


def test_a_compared_bucket_is_no_longer_read_when_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    loader = ModelLoader(nn.Module(), None, torch.device("cpu"))
    compare = SimpleNamespace(verify=lambda bucket, bytes_N: events.append(f"read {bucket}"))
    monkeypatch.setattr(loader, "_verifier", compare)
    monkeypatch.setattr(loader, "_synchronize", lambda: events.append("waited"))
    bucket: Any = 0
    loader.verify(bucket, torch.empty(0))
    assert events == ["read 0", "waited"]
