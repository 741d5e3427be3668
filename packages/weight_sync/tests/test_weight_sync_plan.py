"""Properties of manifests and bucket plans."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_base.dtypes import DTYPE_BYTES
from plinth_testing import raises
from plinth_testing.strategies import json_values, shapes
from weight_sync import SyncConfig, SyncConfigError, TensorEntry, WeightManifest, WeightManifestError, plan_buckets
from weight_sync import plan as plan_module
from weight_sync.plan import ALIGN_BYTES, BucketPlan

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def manifests(draw: st.DrawFn) -> WeightManifest:
    unique = draw(st.lists(names, unique=True, max_size=30))
    return WeightManifest.of(
        TensorEntry(name=name, shape=draw(shapes(max_side=40)), dtype=draw(dtypes), padding=draw(st.integers(0, 7)))
        for name in unique
    )


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_every_tensor_once_in_order_within_bounds(manifest: WeightManifest, bound: int) -> None:
    plan = plan_buckets(manifest, bound)
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert [(s.name, s.shape, s.dtype, s.nbytes) for s in slots] == [
        (e.name, e.shape, e.dtype, e.num_bytes) for e in manifest.entries
    ]
    assert plan.num_bytes == sum(entry.num_bytes for entry in manifest.entries)
    assert plan.num_tensors == len(manifest.entries)
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.slots
        assert bucket.nbytes <= bound or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end
            assert slot.offset % ALIGN_BYTES == 0
            end = slot.offset + slot.reserved_bytes
        assert end == bucket.nbytes
    room = {e.name: e.padded_bytes for e in manifest.entries}
    assert all(room[s.name] <= s.reserved_bytes < room[s.name] + ALIGN_BYTES for s in slots)


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_no_two_neighboring_buckets_fit_into_one(manifest: WeightManifest, bound: int) -> None:
    buckets = plan_buckets(manifest, bound).buckets
    for left, right in itertools.pairwise(buckets):
        assert left.nbytes + right.slots[0].reserved_bytes > bound


@settings(deadline=None, derandomize=True)
@given(manifests(), st.integers(1, 200_000))
def test_wire_round_trip_and_two_buffers_suffice(manifest: WeightManifest, bound: int) -> None:
    plan = plan_buckets(manifest, bound)
    assert BucketPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan_buckets(WeightManifest.of(reversed(tuple(reversed(manifest.entries)))), bound).digest == plan.digest
    sizes = plan.buffer_bytes()
    assert len(sizes) == min(2, len(plan.buckets))
    assert all(bucket.nbytes <= sizes[bucket.index % 2] for bucket in plan.buckets)


@settings(deadline=None, derandomize=True)
@given(manifests().filter(lambda m: len(m.entries) > 0), st.data())
def test_digest_depends_on_names_shapes_and_dtypes(manifest: WeightManifest, data: st.DataObject) -> None:
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
    changed = WeightManifest.of((*manifest.entries[:index], other, *manifest.entries[index + 1 :]))
    assert plan_buckets(changed, 4096).digest != plan_buckets(manifest, 4096).digest


def test_bad_manifests_and_plans_are_rejected() -> None:
    entry = TensorEntry(name="w", shape=(4, 4), dtype="float32")
    with raises(WeightManifestError, field="name", value="w"):
        WeightManifest.of([entry, entry])
    with raises(WeightManifestError, field="dtype", value="complex64"):
        TensorEntry(name="w", shape=(1,), dtype="complex64")
    with raises(WeightManifestError, field="bucket_bytes", value=0):
        plan_buckets(WeightManifest.of([entry]), 0)
    data = plan_buckets(WeightManifest.of([entry]), 1024).to_json()
    data["buckets"][0][1][0][1] = [4, 5]
    with raises(WeightManifestError, field="digest"):
        BucketPlan.from_json(data)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(manifests().filter(lambda m: sum(e.num_bytes > 0 for e in m.entries) > 1), st.data())
def test_slots_that_overlap_or_leave_their_bucket_are_rejected(manifest: WeightManifest, data: st.DataObject) -> None:
    """With the digest of their own content, so that only their places tell."""
    (bucket,) = plan_buckets(WeightManifest.of(e for e in manifest.entries if e.num_bytes), 1 << 40).buckets
    index = data.draw(st.integers(1, len(bucket.slots) - 1))
    slots, moved = list(bucket.slots), bucket.slots[index]
    overlapping = dataclasses.replace(moved, offset=slots[index - 1].offset)
    outside = dataclasses.replace(moved, offset=bucket.nbytes)
    for wrong in (overlapping, outside):
        buckets = (dataclasses.replace(bucket, slots=(*slots[:index], wrong, *slots[index + 1 :])),)
        with raises(WeightManifestError, field=moved.name):
            BucketPlan.from_json(BucketPlan(buckets, plan_module._digest(buckets)).to_json())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 4.0, True])
@pytest.mark.parametrize("place", ["shape", "offset", "nbytes", "reserved_bytes", "bucket"])
def test_sizes_that_are_no_whole_numbers_are_rejected(place: str, number: float) -> None:
    """Python's JSON has NaN, which no comparison finds too large."""
    (bucket,) = plan_buckets(WeightManifest.of([TensorEntry(name="w", shape=(4,), dtype="int8")]), 1024).buckets
    wrong: Any = (number,) if place == "shape" else number
    if place == "bucket":
        bucket = dataclasses.replace(bucket, nbytes=wrong)
    else:
        bucket = dataclasses.replace(bucket, slots=(dataclasses.replace(bucket.slots[0], **{place: wrong}),))
    with raises(WeightManifestError, field="buckets.0"):
        BucketPlan.from_json(BucketPlan((bucket,), plan_module._digest((bucket,))).to_json())


@settings(deadline=None, derandomize=True, max_examples=60)
@given(json_values())
def test_what_is_no_plan_is_rejected(junk: object) -> None:
    digest = "0" * 64
    odd: list[Any] = [junk, {"buckets": junk}, {"buckets": [[8, junk]]}, {"buckets": [[junk, []]], "digest": digest}]
    odd += [{"buckets": [[256, [["a", junk, "int8", 0, 1, 256]]]], "digest": digest}]
    for data in odd:
        with pytest.raises(WeightManifestError):
            BucketPlan.from_json(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bucket_mib", value) for value in (0, "64", True, 1.5)),
        *(("timeout_s", value) for value in (0.0, "2", float("inf"), float("nan"))),
        ("pause_timeout_s", None),
        *(("transport", value) for value in (["shm"], "smoke")),
        ("running_requests", "freeze"),
    ],
)
def test_bad_settings_are_named(key: str, value: Any) -> None:
    with raises(SyncConfigError, field=key, value=value):
        SyncConfig(**{key: value})
