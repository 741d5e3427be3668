"""Storages moved to host memory and back, on the CPU: the copies are the same as on a GPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.zero.memory import StorageOffload


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    chunk_bytes=st.sampled_from([1, 7, 64, 4096]),
    data=st.data(),
)
def test_storages_come_back_as_they_were(sizes: list[int], chunk_bytes: int, data: st.DataObject) -> None:
    """Views stay views, each storage is copied once, and host memory is allocated once and in chunks."""
    tensors = [torch.randn(size) for size in sizes]
    views = [tensor[tensor.numel() // 2 :] for tensor in tensors]
    given_tensors = data.draw(st.permutations([*tensors, *views]))
    offload = StorageOffload(chunk_bytes)
    num_bytes = 4 * sum(sizes)
    for _ in range(2):
        before = [tensor.clone() for tensor in tensors]
        assert offload.offload(given_tensors) == num_bytes
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert offload.reload() == num_bytes
        assert offload.reload() == 0
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
        for tensor, view in zip(tensors, views, strict=True):
            tensor += 1
            assert torch.equal(view, tensor[tensor.numel() // 2 :])
        assert len(offload._host._chunks) == -(-num_bytes // chunk_bytes)
