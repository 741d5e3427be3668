"""Advantages by name. Standard library only: a configuration knows them before torch is imported.

To add an advantage, write its function in a module of this folder and its entry here; the tests over all names then
cover it. Responses that it needs beyond the sampled ones are an `extra_rollout` of the entry.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExtraRollout:
    """Further responses to each prompt of a step, which are scored and not trained on.

    Their mean score is the `baseline_scores` of the prompt's samples.
    """

    num_samples: int = 1
    temperature: float = 0.0
    """0 for greedy responses."""


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """An estimator of advantages: where its function is, and what it needs."""

    function: str
    """`module:name` in this folder. Its parameters say what it gets:

    scores_N, group_ids_N, response_lens_N    score, prompt and number of tokens of each sample
    baseline_scores_N                         with an extra rollout
    rewards_K, response_lens_S                with `discounts`: rewards of tokens, and lengths
    turn_rewards_U, turn_counts_N, state_ids_U with `per_turn`: rewards of turns, and what `find_turns` knows of them
    values_K                                  of the critic
    gamma, lam                                discount, and lambda of GAE

    It returns advantages, [N], with `per_token` [K], or with `per_turn` [U]; with a critic the pair (advantages [K],
    returns [K])."""
    compares_group: bool = False
    """Compares the samples of a prompt, and needs two of them."""
    per_token: bool = False
    """Tokens of a sample have advantages of their own."""
    per_turn: bool = False
    """Turns of a sample have rewards and advantages of their own."""
    discounts: bool = False
    """Gets a reward for each token or turn; otherwise a sample has one score, and nothing to discount."""
    needs_critic: bool = False
    extra_rollout: ExtraRollout | None = None

    def estimate(self, inputs: Mapping[str, Any]) -> Any:
        """Calls the function with those of the inputs that it has parameters for.

        Raises:
            KeyError: an input without a default is missing.
        """
        module, _, name = self.function.partition(":")
        function = getattr(import_module(f"{__package__}.{module}"), name)
        parameters = inspect.signature(function).parameters
        required = {key for key, parameter in parameters.items() if parameter.default is parameter.empty}
        if missing := required - inputs.keys():
            raise KeyError(f"{self.function} needs {', '.join(sorted(missing))}")
        return function(**{key: value for key, value in inputs.items() if key in parameters})


ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage(function="group:group_advantages", compares_group=True),
    "dr_grpo": Advantage(function="group:dr_grpo_advantages", compares_group=True),
    "rloo": Advantage(function="group:rloo_advantages", compares_group=True),
    "reinforce_pp": Advantage(function="reinforce_pp:reinforce_pp_advantages", per_token=True, discounts=True),
    "reinforce_pp_baseline": Advantage(
        function="reinforce_pp:reinforce_pp_baseline_advantages", compares_group=True, per_token=True
    ),
    "turn_grpo": Advantage(function="turns:turn_grpo_advantages", compares_group=True, per_turn=True, discounts=True),
    "turn_rloo": Advantage(function="turns:turn_rloo_advantages", compares_group=True, per_turn=True, discounts=True),
    "gigpo": Advantage(function="turns:gigpo_advantages", compares_group=True, per_turn=True, discounts=True),
    "remax": Advantage(function="group:remax_advantages", extra_rollout=ExtraRollout()),
    "gae": Advantage(function="gae:gae", per_token=True, discounts=True, needs_critic=True),
}
"""Name -> advantage; `algorithm.advantage` of an app names one."""
