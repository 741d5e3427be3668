"""Quantization on the stream on which a server loads weights."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_vllm.servers.quantizing import load_on_one_stream, on_default_stream

LOADER = "vllm.model_executor.model_loader.bitsandbytes_loader"


class Streams:
    """The streams of torch.cuda as a journal."""

    def __init__(self, current: str) -> None:
        self.journal: list[str] = []
        self._streams = {name: self._stream(name) for name in ("default", "own")}
        self._current = current

    def _stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.journal.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def current_stream(self) -> Any:
        return self._streams[self._current]

    def default_stream(self) -> Any:
        return self._streams["default"]

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    def load(self, model: str) -> str:
        self.journal.append(f"loaded on {self._current}")
        return model


def test_a_worker_with_a_stream_of_its_own_loads_between_its_work() -> None:
    streams = Streams("own")
    assert on_default_stream(streams.load, streams)("model") == "model"
    assert streams.journal == ["default waits for own", "loaded on default", "own waits for default"]
    assert streams.current_stream().name == "own"


def test_the_default_stream_is_not_entered_twice() -> None:
    streams = Streams("default")
    on_default_stream(streams.load, streams)("model")
    assert streams.journal == ["loaded on default"]


def test_vllms_loader_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class BitsAndBytesModelLoader:
        def load_weights(self, model: Any, model_config: Any) -> None: ...

    module: Any = ModuleType(LOADER)
    module.BitsAndBytesModelLoader = BitsAndBytesModelLoader
    monkeypatch.setitem(sys.modules, LOADER, module)
    stock = BitsAndBytesModelLoader.load_weights
    load_on_one_stream()
    assert BitsAndBytesModelLoader.load_weights.__wrapped__ is stock  # type: ignore[attr-defined]
    assert "bitsandbytes" not in sys.modules, "it initializes CUDA, before servers fork"


def test_a_vllm_without_the_loader_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, LOADER, None)
    load_on_one_stream()
    assert "was not checked" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_that_are_still_being_copied_are_quantized_afterwards_on_a_gpu() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)

    def rounded(source: torch.Tensor) -> torch.Tensor:
        late = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)  # cycles
        late.copy_(source)
        packed, state = functional.quantize_4bit(late, compress_statistics=True, quant_type="nf4")
        weights: torch.Tensor = functional.dequantize_4bit(packed, state)
        return weights

    expected = rounded(weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        weights = on_default_stream(rounded, torch.cuda)(weight)
    torch.cuda.synchronize()
    assert torch.equal(weights, expected)
