"""The learning rate that is chosen for a policy."""

from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.resolve.engines import policy_learning_rate
from rl_runtime.resolve.job import resolve_job_for
from rl_runtime.rules import value_of

SIZES = st.integers(1, 10**12)


@given(SIZES, SIZES, st.booleans())
def test_a_larger_model_never_learns_at_a_larger_rate(small, large, lora):
    small, large = sorted((small, large))
    assert policy_learning_rate(small, lora=lora)[0] >= policy_learning_rate(large, lora=lora)[0]


@given(st.none() | SIZES)
def test_lora_never_learns_at_a_smaller_rate_than_all_weights(num_weights):
    full, lora = (policy_learning_rate(num_weights, lora=lora)[0] for lora in (False, True))
    assert lora == (full if num_weights is None else 10 * full)


def test_a_rate_that_is_given_stays_and_an_open_one_is_chosen_with_its_reason():
    from rl_runtime.job_config import JobConfig
    from run_kit import load_config

    given_rate = load_config(JobConfig, overrides=["actor.optim.lr=3e-6"])
    assert value_of(resolve_job_for(given_rate, gpus=(), shape=None, num_weights=7).config, "actor.optim.lr") == 3e-6
    resolved = resolve_job_for(load_config(JobConfig, overrides=[]), gpus=(), shape=None, num_weights=135_000_000)
    assert value_of(resolved.config, "actor.optim.lr") == 1e-5
    assert "135M" in resolved.reasons["actor.optim.lr"]
