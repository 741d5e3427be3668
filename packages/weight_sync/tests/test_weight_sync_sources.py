"""The tensors that are sent: of modules, ZeRO shards and folders, and their checksums."""

import json
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plinth_testing import raises, run_script
from plinth_testing.strategies import json_values
from weight_sync import (
    HfFolderSource,
    ModuleSource,
    SourceError,
    TensorSource,
    ZeroSource,
    plan_buckets,
)
from weight_sync.tensors import checksum, slot_view


def collect(source: TensorSource, bucket_bytes: int = 20_000) -> dict[str, torch.Tensor]:
    """All tensors of a source, by name."""
    tensors = {}
    for bucket in plan_buckets(source.manifest(), bucket_bytes).buckets:
        out = torch.empty(bucket.nbytes, dtype=torch.uint8)
        source.fill(bucket, out)
        source.fill(bucket, None)
        tensors.update({slot.name: slot_view(out, slot).clone() for slot in bucket.slots})
    return tensors


@pytest.mark.parametrize("kind", [ModuleSource, ZeroSource])
def test_source_sends_every_full_parameter_once(kind: Any, new_model: Any) -> None:
    got = collect(kind(new_model))
    assert "model.embed_tokens.weight" in got
    assert "lm_head.weight" not in got  # tied
    for name, param in new_model.named_parameters():
        assert torch.equal(got.pop(name), param.detach())
    assert not got
    cast = collect(kind(new_model, torch.bfloat16))
    for name, param in new_model.named_parameters():
        assert torch.equal(cast[name], param.detach().bfloat16())


@pytest.mark.parametrize("kind", [ModuleSource, ZeroSource])
def test_persistent_buffers_are_sent_in_their_own_dtype(kind: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[1].register_buffer("router_bias", torch.rand(3))
    module[1].register_buffer("positions", torch.rand(3), persistent=False)
    got = collect(kind(module, torch.bfloat16))
    assert got.keys() == module.state_dict().keys()
    assert torch.equal(got["1.router_bias"], module[1].router_bias)
    assert got["1.weight"].dtype == torch.bfloat16


def test_integer_parameters_are_not_cast() -> None:
    module = nn.Module()
    module.register_parameter("scale", nn.Parameter(torch.arange(5), requires_grad=False))
    assert collect(ModuleSource(module, torch.bfloat16))["scale"].tolist() == [0, 1, 2, 3, 4]


def test_folder_source_sends_the_saved_tensors(new_model: Any, tmp_path: Path) -> None:
    helpers.save_model(new_model, tmp_path)
    got = collect(HfFolderSource(tmp_path))
    for name, param in new_model.named_parameters():
        assert torch.equal(got.pop(name), param.detach())
    assert not got


@settings(deadline=None, derandomize=True, max_examples=60)
@given(json_values())
def test_odd_safetensors_headers_are_refused_by_file(junk: object) -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    odd = [{"a": good | {key: junk}} for key in good if junk != good[key]]
    odd += [{"a": good | {"data_offsets": [4, 12]}}, {"a": good | {"shape": [3]}}, {"a": junk}, [junk]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        for header in odd:
            text = json.dumps(header).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
            with raises(SourceError, value=str(file)):
                HfFolderSource(folder)
        file.write_bytes(struct.pack("<Q", 60_000) + b"[" * 60_000)
        with raises(SourceError, value=str(file)):
            HfFolderSource(folder)


def test_bad_folders_and_changed_modules_raise(tmp_path: Path) -> None:
    with raises(SourceError, value=str(tmp_path)):
        HfFolderSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"hello")
    with raises(SourceError, value=str(tmp_path / "model.safetensors")):
        HfFolderSource(tmp_path)
    module = nn.Linear(4, 4)
    source = ModuleSource(module)
    plan = plan_buckets(source.manifest(), 1024)
    module.weight = nn.Parameter(torch.zeros(2, 4))
    with raises(SourceError, field="weight", value=(2, 4)):
        source.fill(plan.buckets[0], torch.empty(1024, dtype=torch.uint8))


@pytest.mark.slow
@pytest.mark.long
def test_fsdp2_shards_are_gathered() -> None:
    run_script(Path(__file__).with_name("weight_sync_fsdp_worker.py"), timeout_s=90)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3000))
def test_shards_are_put_together_in_the_order_of_the_ranks(sizes: list[int], num_ranks: int, bound: int) -> None:
    """The root's part of the gather over gloo, with the other ranks' messages as they send them."""
    full = {f"w{index}": torch.randn(size) for index, size in enumerate(sizes)}
    shards: dict[str, list[torch.Tensor]] = {}
    for name, tensor in full.items():
        each = -(-len(tensor) // num_ranks)
        padded = nn.functional.pad(tensor, (0, each * num_ranks - len(tensor)), value=77.0)
        shards[name] = list(padded.view(num_ranks, each).clone())
        for shard in shards[name]:
            shard.ds_numel = each  # type: ignore[attr-defined]

    def parameter(name: str) -> Any:
        sharded = {"ds_tensor": shards[name][0], "ds_shape": full[name].shape, "ds_numel": full[name].numel()}
        return SimpleNamespace(**sharded, ds_process_group="group", dtype=torch.float32, shape=(0,))

    def gather(mine: torch.Tensor, parts: list[torch.Tensor], **_: Any) -> None:
        for rank, part in enumerate(parts):
            part.copy_(torch.cat([shards[slot.name][rank] for slot in bucket.slots]).view(torch.uint8))
        assert torch.equal(mine, parts[0])

    named: Any = [SimpleNamespace(name=name, parameter=parameter(name), low_rank=None, packed=None) for name in full]
    ranks = {"get_rank": 0, "get_world_size": num_ranks, "get_global_rank": 0, "get_backend": "gloo"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "gather", gather)
        for name, value in ranks.items():
            patch.setattr(torch.distributed, name, lambda *_, value=value: value)
        source = ZeroSource(named)
        for bucket in plan_buckets(source.manifest(), bound).buckets:
            out = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            source.fill(bucket, out)
            for slot in bucket.slots:
                assert torch.equal(slot_view(out, slot), full[slot.name])


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(1, 40), st.data())
def test_checksum_detects_a_changed_byte_and_moved_blocks(num_blocks: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    bytes_N = torch.randint(0, 256, (num_blocks * 256,), dtype=torch.uint8, generator=generator)
    before = checksum(bytes_N)
    assert 0 <= before < 2**64
    assert checksum(bytes_N.clone()) == before
    position = data.draw(st.integers(0, len(bytes_N) - 1))
    changed = bytes_N.clone()
    changed[position] += data.draw(st.integers(1, 255))
    assert checksum(changed) != before
    if num_blocks > 1:
        rolled = bytes_N.roll(256 * data.draw(st.integers(1, num_blocks - 1)))
        assert checksum(rolled) != before


def test_checksum_of_an_empty_tensor() -> None:
    assert checksum(torch.empty(0, dtype=torch.uint8)) == 0
