import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rl_data import Prompt
from rl_runtime.rollout.partial_rollouts import PartialRollout
from rollout_vllm import PartialGroup, Request, VersionSpan
from rollout_vllm.samples import PartialSample

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
GROUP = PartialGroup(
    request=Request(prompt_id="1/0:a", prompt_ids=[1, 2], seed=3),
    samples=(PartialSample(sample_index=0, response_ids=[4], log_probs=[-0.5], version_spans=(VersionSpan(0, 1),)),),
)


@given(prompt=PROMPTS)
def test_a_partial_rollout_goes_through_json(prompt: Prompt) -> None:
    partial = PartialRollout(prompt=prompt, group=GROUP)
    restored = PartialRollout.from_state(json.loads(json.dumps(partial.to_state())))
    assert restored == partial
    assert repr(restored.prompt) == repr(prompt), "types too"


def test_a_checkpoint_from_before_the_extra_columns_is_read() -> None:
    state = PartialRollout(prompt=Prompt("a", "b", (1,), "2", "c"), group=GROUP).to_state()
    for name in ("extra", "messages", "tools"):
        del state["prompt"][name]
    assert PartialRollout.from_state(state).prompt == Prompt("a", "b", (1,), "2", "c")
