"""The batch: packing without padding, targets, masks, columns, selections."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.strategies import seeds
from rl_core import Batch, RLCoreError, flatten_padded, pack, pad_flat

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
TENSORS = ("input_ids_T", "position_ids_T", "cu_seqlens_S1", "target_index_K", "target_ids_K", "response_lens_S")


@dataclass(frozen=True)
class Row:
    """A sequence before it is packed."""

    prompt: list[int]
    response: list[int]
    mask: list[bool] | None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def targets(self) -> list[int]:
        mask = self.mask or [True] * len(self.response)
        return [token for token, keep in zip(self.response, mask, strict=True) if keep]


@st.composite
def row(draw: st.DrawFn) -> Row:
    ids = st.integers(0, 50_000)
    response = draw(st.lists(ids, max_size=6))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
    return Row(draw(st.lists(ids, min_size=1, max_size=6)), response, mask)


rows_of_a_batch = st.lists(row(), max_size=6)


def batch_of(rows: list[Row]) -> Batch:
    """The rows with a column and a value that tell where they come from: the target's id, and the row's number."""
    targets_K = torch.tensor([token for one in rows for token in one.targets], dtype=torch.float32)
    return pack(
        [one.prompt for one in rows],
        [np.array(one.response, np.int32) for one in rows],
        masks=[one.mask for one in rows],
        columns={"ids": targets_K},
        per_sequence={"number": torch.arange(len(rows))},
        images=[f"{one.prompt}" for one in rows],
        per_token={
            "twice": torch.tensor([[token, token] for one in rows for token in one.prompt + one.response]).view(-1, 2)
        },
    )


def same(a: Batch, b: Batch) -> bool:
    mappings = [(getattr(a, name), getattr(b, name)) for name in ("columns", "per_sequence", "per_token")]
    tensors = all(torch.equal(getattr(a, name), getattr(b, name)) for name in TENSORS)
    return (
        tensors
        and a.images == b.images
        and all(x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in mappings)
    )


@PROPERTY
@given(rows_of_a_batch)
def test_nothing_is_padded(rows: list[Row]) -> None:
    batch, lengths = batch_of(rows), [one.length for one in rows]
    assert batch.input_ids_T.tolist() == [token for one in rows for token in one.prompt + one.response]
    assert batch.num_tokens == sum(lengths)
    assert batch.num_sequences == len(rows)
    assert batch.seq_lens_S.tolist() == lengths
    assert batch.position_ids_T.tolist() == [t for length in lengths for t in range(length)]
    assert batch.response_lens_S.tolist() == [len(one.targets) for one in rows]
    assert {getattr(batch, name).dtype for name in TENSORS} == {torch.int64, torch.int32}


@PROPERTY
@given(rows_of_a_batch)
def test_targets_are_the_unmasked_response_tokens_and_follow_the_position_that_predicts_them(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert batch.target_ids_K.tolist() == batch.columns["ids"].long().tolist()
    assert torch.equal(batch.input_ids_T[batch.target_index_K + 1], batch.target_ids_K)
    owner_T = torch.repeat_interleave(torch.arange(len(rows)), batch.seq_lens_S)
    owner_K = torch.repeat_interleave(torch.arange(len(rows)), batch.response_lens_S)
    assert torch.equal(owner_T[batch.target_index_K], owner_K)
    assert torch.equal(owner_T[batch.target_index_K + 1], owner_K)
    assert [part.tolist() for part in batch.split(batch.target_ids_K)] == [one.targets for one in rows]


@PROPERTY
@given(rows_of_a_batch, st.data())
def test_a_selection_is_the_batch_of_the_selected_rows(rows: list[Row], data: st.DataObject) -> None:
    places = st.sampled_from(range(len(rows))) if rows else st.nothing()
    chosen = data.draw(st.lists(places, unique=True, max_size=len(rows)))
    batch = batch_of(rows)
    selected, expected = batch.select(chosen), batch_of([rows[i] for i in chosen])
    assert selected.per_sequence["number"].tolist() == chosen
    assert same(selected, Batch(**{**vars(expected), "per_sequence": selected.per_sequence}))
    assert torch.equal(batch.target_ids_K[batch.target_places(chosen)], expected.target_ids_K)


@PROPERTY
@given(rows_of_a_batch)
def test_batches_pickle_and_move(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert same(pickle.loads(pickle.dumps(batch)), batch)
    copy = batch.to("cpu")
    assert same(copy, batch)
    copy.add_columns(more=torch.zeros(batch.num_targets))
    assert list(batch.columns) == ["ids"]
    assert not batch.without_columns().columns


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


def test_columns_are_added_once_with_one_value_per_target() -> None:
    batch = pack([[1]], [[2, 3]])
    batch.add_columns(a=torch.tensor([0.1, 0.2], dtype=torch.float64), ids=torch.tensor([[1, 2], [3, 4]]))
    assert (batch.columns["a"].dtype, batch.columns["ids"].dtype) == (torch.float32, torch.int64)
    for refused in ({"a": torch.zeros(2)}, {"b": torch.zeros(3)}):
        with pytest.raises(RLCoreError):
            batch.add_columns(**refused)
    assert sorted(batch.columns) == ["a", "ids"]
