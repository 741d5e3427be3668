"""The cases of benchmarks/engine_step."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine_step.run import CONTESTANTS, cases

NAMES = st.lists(st.sampled_from(sorted(CONTESTANTS)), unique=True)


@given(st.lists(st.integers(1, 3), min_size=1, unique=True), NAMES)
def test_every_contestant_runs_at_every_stage_and_ddp_once(stages: list[int], names: list[str]) -> None:
    found = cases(stages, names)
    assert len(found) == len(set(found))
    assert {name for _, name in found} == set(names)
    assert [stage for stage, name in found if name == "ddp"] == [0] * ("ddp" in names)
    for name in set(names) - {"ddp"}:
        assert sorted(stage for stage, other in found if other == name) == sorted(stages)
