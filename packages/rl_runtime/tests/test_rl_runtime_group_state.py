"""Groups in a checkpoint: prompts, tokens, scores and failures survive JSON; texts of their responses."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rl_data import Prompt
from rl_runtime.rollout.groups import _decodes_batches, decoded, from_state, to_state
from rl_runtime.rollout.phase import RolloutPhase
from rollout_vllm import Failure, Group, Request, Sample, VersionSpan

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=3).map(tuple)
PROMPTS = st.builds(
    Prompt,
    id=st.text(),
    text=st.text(),
    token_ids=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ground_truth=st.text(),
    data_source=st.text(),
    extra=st.dictionaries(st.text(), JSON, max_size=4),
    messages=OBJECTS,
    tools=OBJECTS,
)


@st.composite
def samples(draw: st.DrawFn, request: Request, index: int) -> Sample:
    length = draw(st.integers(0, 5))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    own_prompt = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3))
    return Sample(
        prompt_id=request.prompt_id,
        sample_index=index,
        prompt=request.prompt,
        prompt_ids=np.array(request.prompt_ids if own_prompt is None else own_prompt, np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        log_probs=draw(st.none() | st.just(-np.arange(length, dtype=np.float32) / 7)),
        response_mask=None if mask is None else np.array(mask, np.bool_),
        version_spans=(VersionSpan(2, length),) if length else (),
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        score=draw(st.none() | st.floats(-1, 1)),
        reward_terms={"a": 0.5},
        text=draw(st.text()),
    )


@given(prompt=PROMPTS, data=st.data())
def test_a_group_goes_through_json(prompt: Prompt, data: st.DataObject) -> None:
    request = Request(prompt_id="1/0:a", prompt_ids=prompt.token_ids, seed=3, prompt=prompt)
    failure = Failure(prompt_id="1/0:a", sample_index=2, kind="timeout", message="late", num_attempts=3)
    group = Group(
        request=request, samples=tuple(data.draw(samples(request, index)) for index in range(2)), failures=(failure,)
    )
    state = json.loads(json.dumps(to_state(group)))
    restored = from_state(state)
    assert repr(restored.request.prompt) == repr(prompt), "types too"
    assert restored.request.prompt == prompt
    assert restored.failures == group.failures
    assert json.loads(json.dumps(to_state(restored))) == state
    for before, after in zip(group.samples, restored.samples, strict=True):
        own = replace(prompt, token_ids=tuple(before.prompt_ids.tolist()))
        assert after.prompt == own
        for name in ("response_ids", "log_probs", "prompt_ids", "response_mask"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
            assert getattr(getattr(after, name), "dtype", None) == getattr(getattr(before, name), "dtype", None)
        assert (after.score, after.text, after.finish_reason) == (before.score, before.text, before.finish_reason)


def test_a_restored_group_has_the_files_of_its_images_in_this_run() -> None:
    """An environment has shown one more image than the prompt; both files were in the folder of the run that saved."""
    prompt = Prompt(id="a", text="", token_ids=(1,), ground_truth="", data_source="", images=("/x.png",))
    request = Request(prompt_id="1/0:a", prompt_ids=(1,), prompt=prompt, images="/old/x")
    sample = Sample(sample_index=0, prompt=prompt, images="/old/xy", data={"images": ["/x.png", "/y.png"]})
    state = json.loads(json.dumps(to_state(Group(request=request, samples=(sample,)))))
    parts: Any = SimpleNamespace()
    phase = RolloutPhase(parts, None, scorer=parts, seed=0, images=lambda images: f"/new/{len(images)}")  # type: ignore[arg-type]
    phase.load_state_dict({"partial_rollouts": [state]})
    (group,) = phase._partial
    assert (group.request.images, group.samples[0].images) == ("/new/1", "/new/2")


class Shouting(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer with decoding of its own."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


WORDS = {"<end>": 0, "yes": 1, ".": 2, "no": 3}
FORCED = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
@pytest.mark.parametrize(
    ("model", "settings", "cleaned", "in_batches"),
    [
        (models.WordLevel(WORDS, unk_token="no"), {"clean_up_tokenization_spaces": False}, False, True),
        (models.WordLevel(WORDS, unk_token="no"), {"clean_up_tokenization_spaces": True}, True, False),
        (models.BPE(WORDS, []), {"clean_up_tokenization_spaces": True}, False, True),
        (models.BPE(WORDS, []), {"clean_up_tokenization_spaces": True, **FORCED}, True, False),
    ],
)
def test_texts_are_those_of_the_tokenizers_own_decode(
    kind: type[PreTrainedTokenizerFast], model: Any, settings: dict[str, bool], cleaned: bool, in_batches: bool
) -> None:
    tokenizer = kind(tokenizer_object=Tokenizer(model), eos_token="<end>", **settings)
    assert _decodes_batches(tokenizer) is (in_batches and kind is PreTrainedTokenizerFast)
    prompt = Prompt(id="a", text="?", token_ids=(3,), ground_truth="", data_source="")
    group = Group.fresh(Request(prompt_id="a", prompt_ids=prompt.token_ids, prompt=prompt), 3)
    rows = [np.array(ids, np.int32) for ids in ([1, 2, 0], [], [3, 3, 2])]
    group = replace(group, samples=tuple(s.changed(response_ids=r) for s, r in zip(group.samples, rows, strict=True)))

    texts = [sample.text for sample in decoded(group, tokenizer).samples]
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts[0].lower() == ("yes." if cleaned else "yes .")
