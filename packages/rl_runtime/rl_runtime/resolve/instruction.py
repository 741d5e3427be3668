"""The instruction of questions whose reward reads nothing but a marked answer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

from plinth_base.errors import PlinthError
from rl_data import reward_for
from rl_data.prompts import GSM8K_INSTRUCTION, first_row
from rl_data.tokenizer import has_chat_template

from ..rollout.scoring import rewards_of_rows
from .resolved import ResolvedConfig

ConfigT = TypeVar("ConfigT")


def resolve_instruction(resolved: ResolvedConfig[ConfigT]) -> ResolvedConfig[ConfigT]:
    """`data.instruction=null` decided: by the first row, its reward, and the model's chat template."""
    if _needs_instruction(resolved.config):
        why = 'a response without "####" scores 0'
        return resolved.with_default("data.instruction", GSM8K_INSTRUCTION, why)
    return resolved.with_default("data.instruction", "", "the reward or the model needs none", listed=False)


def _needs_instruction(config: Any) -> bool:
    data = config.data
    is_open = data.instruction is None and data.system_prompt is None and data.question_template == "{question}"
    if not is_open or data.chat_template == "never" or not (data.train or data.val):
        return False
    with suppress(PlinthError):  # of a file or a row, which the checks of the run refuse with their keys
        row = first_row((data.train or data.val)[0], data)
        is_asked = "####" in row.messages[0]["content"]
        if row.is_question and not is_asked and has_chat_template(config.model.path):
            of_rows = rewards_of_rows(config.reward, config.episode)
            rewards = [reward_for(row.data_source, config.reward)] if of_rows is None else of_rows
            return any("####" in reward.markers for reward in rewards)
    return False
