"""Properties of manifests and bucket plans."""

import dataclasses
import itertools
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync import Manifest, ManifestError, ReceiverError, ServerError, SyncConfig, TensorEntry, plan_buckets
from weight_sync.manifest import DTYPE_BYTES
from weight_sync.plan import ALIGN_BYTES, BucketPlan

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    unique = draw(st.lists(names, unique=True, max_size=30))
    return Manifest.of(
        TensorEntry(name=name, shape=draw(shapes), dtype=draw(dtypes), padding=draw(st.integers(0, 7)))
        for name in unique
    )


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_every_tensor_once_in_order_within_bounds(manifest: Manifest, bound: int) -> None:
    plan = plan_buckets(manifest, bound)
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert [(s.name, s.shape, s.dtype, s.nbytes) for s in slots] == [
        (e.name, e.shape, e.dtype, e.num_bytes) for e in manifest.entries
    ]
    assert plan.num_bytes == manifest.num_bytes
    assert plan.num_tensors == len(manifest.entries)
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.slots
        assert bucket.nbytes <= bound or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end
            assert slot.offset % ALIGN_BYTES == 0
            end = slot.offset + slot.room
        assert end == bucket.nbytes
    room = {e.name: e.room_bytes for e in manifest.entries}
    assert all(room[s.name] <= s.room < room[s.name] + ALIGN_BYTES for s in slots)


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_no_two_neighbouring_buckets_fit_into_one(manifest: Manifest, bound: int) -> None:
    buckets = plan_buckets(manifest, bound).buckets
    for left, right in itertools.pairwise(buckets):
        assert left.nbytes + right.slots[0].room > bound


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_wire_round_trip_and_two_segments_suffice(manifest: Manifest, bound: int) -> None:
    plan = plan_buckets(manifest, bound)
    assert BucketPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan_buckets(Manifest.of(reversed(tuple(reversed(manifest.entries)))), bound).digest == plan.digest
    sizes = plan.slot_bytes(2)
    assert all(bucket.nbytes <= sizes[bucket.index % 2] for bucket in plan.buckets)


@settings(deadline=None, derandomize=True)
@given(manifests().filter(lambda m: len(m.entries) > 0), st.data())
def test_any_change_changes_the_digest(manifest: Manifest, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(manifest.entries) - 1))
    entry = manifest.entries[index]
    other = data.draw(
        st.sampled_from(
            [
                dataclasses.replace(entry, name=entry.name + "'" * 13),
                dataclasses.replace(entry, shape=(*entry.shape, 2)),
                dataclasses.replace(entry, dtype="int8" if entry.dtype != "int8" else "uint8"),
            ]
        )
    )
    changed = Manifest.of((*manifest.entries[:index], other, *manifest.entries[index + 1 :]))
    assert plan_buckets(changed, 4096).digest != plan_buckets(manifest, 4096).digest


def test_bad_manifests_and_plans_are_refused() -> None:
    entry = TensorEntry(name="w", shape=(4, 4), dtype="float32")
    with pytest.raises(ManifestError, match="w appears twice"):
        Manifest.of([entry, entry])
    with pytest.raises(ManifestError, match="complex64"):
        TensorEntry(name="w", shape=(1,), dtype="complex64")
    with pytest.raises(ManifestError, match="bucket_bytes: 0"):
        plan_buckets(Manifest.of([entry]), 0)
    data = plan_buckets(Manifest.of([entry]), 1024).to_json()
    data["buckets"][0][1][0][1] = [4, 5]
    with pytest.raises(ManifestError, match="digest"):
        BucketPlan.from_json(data)


def test_config_names_the_field_and_the_value() -> None:
    for field, value in (("transport", "smoke"), ("bucket_mib", 0), ("timeout_s", 0.0)):
        with pytest.raises(ValueError, match=f"{field}: .*{value}"):
            SyncConfig(**{field: value})


def test_bucket_sizes_follow_the_transport() -> None:
    usual = {name: SyncConfig().bucket_bytes(name) >> 20 for name in ("ipc", "nccl", "shm", "tcp")}
    assert usual == {"ipc": 256, "nccl": 256, "shm": 64, "tcp": 64}
    assert SyncConfig(bucket_mib=3).bucket_bytes("ipc") == SyncConfig(bucket_mib=3).bucket_bytes("shm") == 3 << 20


def test_errors_cross_process_borders() -> None:
    for error in (ServerError("http://a", "POST /x", 500, "no"), ReceiverError("plan", "w", "wrong", "here")):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert type(again) is type(error)


def test_importing_the_package_is_cheap() -> None:
    import subprocess
    import sys

    code = "import sys, weight_sync, weight_sync.config; print('torch' in sys.modules, 'vllm' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.split() == ["False", "False"]
