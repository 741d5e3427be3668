import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from rl_data import DataConfigError, PromptSampler, SamplerStateError

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
sizes = st.integers(1, 40)
batches = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@PROPERTY
@given(sizes, st.integers(0, 5), st.booleans(), batches)
def test_every_epoch_is_a_permutation(num_prompts: int, seed: int, shuffle: bool, batch_sizes: list[int]) -> None:
    sampler = PromptSampler(num_prompts, seed=seed, shuffle=shuffle)
    drawn: list[int] = []
    for batch_size in batch_sizes:
        batch = sampler.next(batch_size)
        assert len(batch) == batch_size
        drawn += batch
    for start in range(0, len(drawn), num_prompts):
        epoch = drawn[start : start + num_prompts]
        if len(epoch) == num_prompts:
            assert sorted(epoch) == list(range(num_prompts))
        else:
            assert len(set(epoch)) == len(epoch)
    assert sampler.epoch == len(drawn) // num_prompts
    assert sampler.position == len(drawn) % num_prompts


@PROPERTY
@given(sizes, st.integers(0, 5), st.booleans(), batches)
def test_a_batch_repeats_a_prompt_only_if_larger_than_the_data(
    num_prompts: int, seed: int, shuffle: bool, batch_sizes: list[int]
) -> None:
    sampler = PromptSampler(num_prompts, seed=seed, shuffle=shuffle)
    for batch_size in batch_sizes:
        most = max(Counter(sampler.next(batch_size)).values())
        if batch_size <= num_prompts:
            assert most == 1
        else:
            assert most <= batch_size // num_prompts + 2


@PROPERTY
@given(sizes, st.integers(0, 5), st.booleans(), batches, batches)
def test_resume_gives_the_same_prompts(
    num_prompts: int, seed: int, shuffle: bool, before: list[int], after: list[int]
) -> None:
    sampler = PromptSampler(num_prompts, seed=seed, shuffle=shuffle)
    for batch_size in before:
        sampler.next(batch_size)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(num_prompts, seed=seed, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert [resumed.next(size) for size in after] == [sampler.next(size) for size in after]
    assert resumed.state_dict() == sampler.state_dict()


def test_order() -> None:
    assert PromptSampler(5, shuffle=False).next(12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    shuffled = PromptSampler(100, seed=1)
    first, second = shuffled.next(100), shuffled.next(100)
    assert first != second != list(range(100))
    assert PromptSampler(100, seed=2).next(100) != first


def test_bad_input() -> None:
    for field, arguments in (("num_prompts", {"num_prompts": 0}), ("seed", {"num_prompts": 3, "seed": -1})):
        with raises(DataConfigError, field=field):
            PromptSampler(**arguments)
    sampler = PromptSampler(10)
    with raises(DataConfigError, field="batch_size", value=0):
        sampler.next(0)
    sampler.next(3)
    before = sampler.state_dict()
    for change in ({"num_prompts": 11}, {"seed": 5}, {"shuffle": False}, {"version": 9}, {"position": 10}):
        with raises(SamplerStateError, field=next(iter(change))):
            sampler.load_state_dict({**before, **change})
    with raises(SamplerStateError, field="epoch"):
        sampler.load_state_dict({key: value for key, value in before.items() if key != "epoch"})
    assert sampler.state_dict() == before
