"""Packing: round trips, targets, masks, columns, no padding."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.strategies import seeds
from rl_core import PackedBatch, SequenceData, ShapeError, flatten_padded, pack, pad_flat, unpack, unpack_column

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
TENSORS = ("input_ids_T", "position_ids_T", "cu_seqlens_S1", "target_index_K", "target_ids_K", "response_lens_S")


@st.composite
def sequence(draw: st.DrawFn, masked: bool = True) -> SequenceData:
    ids = st.integers(0, 50_000)
    prompt = draw(st.lists(ids, min_size=1, max_size=6))
    response = draw(st.lists(ids, max_size=6))
    mask = None
    if masked and draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
    values = st.lists(st.floats(-9, 9, width=32), min_size=len(response), max_size=len(response))
    columns = {"advantages": draw(values), "old_log_probs": np.array(draw(values), dtype=np.float32)}
    return SequenceData(prompt_ids=prompt, response_ids=response, columns=columns, response_mask=mask)


packs = st.lists(sequence(), max_size=6)


def mask_of(item: SequenceData) -> list[bool]:
    return [True] * len(item.response_ids) if item.response_mask is None else list(item.response_mask)


def same(a: PackedBatch, b: PackedBatch) -> bool:
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)
        and a.max_seqlen == b.max_seqlen
        and a.columns.keys() == b.columns.keys()
        and all(torch.equal(a.columns[name], b.columns[name]) for name in a.columns)
    )


@PROPERTY
@given(st.lists(sequence(masked=False).filter(lambda s: len(s.response_ids) > 0), max_size=6))
def test_unpack_gives_back_the_sequences(items: list[SequenceData]) -> None:
    back = unpack(pack(items))
    assert len(back) == len(items)
    for got, want in zip(back, items, strict=True):
        assert got.prompt_ids.tolist() == want.prompt_ids
        assert got.response_ids.tolist() == want.response_ids
        for name, column in want.columns.items():
            assert got.columns[name].tolist() == list(column)


@PROPERTY
@given(packs)
def test_pack_of_unpack_is_the_pack(items: list[SequenceData]) -> None:
    batch = pack(items, column_names=("advantages", "old_log_probs"))
    assert same(pack(unpack(batch), column_names=tuple(batch.columns)), batch)


@PROPERTY
@given(packs)
def test_nothing_is_padded(items: list[SequenceData]) -> None:
    batch = pack(items)
    lengths = [len(item.prompt_ids) + len(item.response_ids) for item in items]
    assert batch.num_tokens == sum(lengths)
    assert batch.num_sequences == len(items)
    assert batch.cu_seqlens_S1.diff().tolist() == lengths
    assert batch.max_seqlen == max(lengths, default=0)
    assert batch.position_ids_T.tolist() == [t for length in lengths for t in range(length)]
    assert batch.num_targets == sum(sum(mask_of(item)) for item in items) == int(batch.response_lens_S.sum())


@PROPERTY
@given(packs)
def test_targets_follow_the_position_that_predicts_them(items: list[SequenceData]) -> None:
    batch = pack(items)
    assert torch.equal(batch.input_ids_T[batch.target_index_K + 1], batch.target_ids_K)
    owner_T = torch.repeat_interleave(torch.arange(len(items)), batch.cu_seqlens_S1.diff().long())
    owner_K = torch.repeat_interleave(torch.arange(len(items)), batch.response_lens_S)
    assert torch.equal(owner_T[batch.target_index_K], owner_K)
    assert torch.equal(owner_T[batch.target_index_K + 1], owner_K)


@PROPERTY
@given(packs)
def test_masks_and_columns_pick_the_same_tokens(items: list[SequenceData]) -> None:
    batch = pack(items, column_names=("advantages", "old_log_probs"))
    want_ids = [i for item in items for i, keep in zip(item.response_ids, mask_of(item), strict=True) if keep]
    assert batch.target_ids_K.tolist() == want_ids
    for name, column_K in batch.columns.items():
        want = [float(v) for item in items for v, keep in zip(item.columns[name], mask_of(item), strict=True) if keep]
        assert column_K.dtype == torch.float32
        assert column_K.tolist() == want
        assert [part.numel() for part in unpack_column(batch, column_K)] == batch.response_lens_S.tolist()


@PROPERTY
@given(packs, st.data())
def test_pack_of_a_permutation_is_a_permutation(items: list[SequenceData], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(items))))
    plain = unpack(pack(items))
    shuffled = unpack(pack([items[i] for i in order]))
    for got, index in zip(shuffled, order, strict=True):
        assert torch.equal(got.response_ids, plain[index].response_ids)
        assert torch.equal(got.prompt_ids, plain[index].prompt_ids)


@PROPERTY
@given(packs)
def test_packs_pickle_and_move(items: list[SequenceData]) -> None:
    batch = pack(items)
    assert same(pickle.loads(pickle.dumps(batch)), batch)
    assert same(batch.to("cpu"), batch)


@PROPERTY
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5), seeds())
def test_padded_round_trip(rows: list[list[bool]], seed: int) -> None:
    mask = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(int(mask.sum()), generator=generator, dtype=torch.float64, requires_grad=True)
    padded = pad_flat(flat, mask, fill=-7.0)
    back, lens = flatten_padded(padded, mask)
    assert torch.equal(back, flat)
    assert lens.tolist() == [sum(row) for row in rows]
    assert bool((padded[~mask] == -7.0).all())
    (grad,) = torch.autograd.grad(back.square().sum(), flat)
    assert torch.equal(grad, 2 * flat.detach())


def test_empty_pack_keeps_its_columns() -> None:
    batch = pack([], column_names=("advantages",))
    assert (batch.num_sequences, batch.num_tokens, batch.num_targets, batch.max_seqlen) == (0, 0, 0, 0)
    assert batch.cu_seqlens_S1.tolist() == [0]
    assert batch.columns["advantages"].shape == (0,)
    assert unpack(batch) == []


def test_with_columns_and_dtype() -> None:
    item = SequenceData(prompt_ids=[1], response_ids=[2, 3], columns={"a": [0.1, 0.2]})
    batch = pack([item], column_dtype=torch.float64)
    assert batch.columns["a"].tolist() == [0.1, 0.2]
    assert set(batch.with_columns(b=torch.zeros(2)).columns) == {"a", "b"}
    with pytest.raises(ShapeError, match=r"must be \(2,\)"):
        batch.with_columns(b=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"must be \(2,\)"):
        unpack_column(batch, torch.zeros(1))


def test_errors_name_the_sequence() -> None:
    good = SequenceData(prompt_ids=[1], response_ids=[2], columns={"a": [1.0]})
    cases = {
        "sequence 1 has no tokens": SequenceData(prompt_ids=[], response_ids=[], columns={"a": []}),
        "sequence 1 has no prompt": SequenceData(prompt_ids=[], response_ids=[2], columns={"a": [1.0]}),
        r"sequence 1 has columns \['b'\]": SequenceData(prompt_ids=[1], response_ids=[2], columns={"b": [1.0]}),
        "'a' has 2 values for 1": SequenceData(prompt_ids=[1], response_ids=[2], columns={"a": [1.0, 2.0]}),
        "response_mask has shape": SequenceData(
            prompt_ids=[1], response_ids=[2], columns={"a": [1.0]}, response_mask=[True, False]
        ),
    }
    for message, bad in cases.items():
        with pytest.raises(ShapeError, match=message):
            pack([good, bad])
