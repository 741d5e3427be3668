"""A rollout of several turns, as a user writes one: the model may call a calculator before it answers.

`episode.function=apps.grpo.calculator:with_calculator`; the preset `calculator` trains with it.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_runtime import PromptLike
    from rollout_vllm import Episode

MAX_CALLS = 4


async def with_calculator(episode: "Episode", prompt: "PromptLike", tokenizer: Any) -> None:
    """Samples a turn, answers the call that it ends with, and so on until a turn ends without one.

    The tool's answer is context: the policy reads it and is not trained on it.
    """
    end_of_call = tokenizer.convert_tokens_to_ids("<result>")
    for _ in range(MAX_CALLS):
        turn = await episode.generate(stop_token_ids=(end_of_call,))
        if turn.response_ids[-1] != end_of_call:
            return
        answer = tokenizer(calculate(tokenizer.decode(turn.response_ids)), add_special_tokens=False)["input_ids"]
        if len(answer) >= episode.num_tokens_left:
            return
        episode.add_context(answer)


def calculate(turn: str) -> str:
    """What the calculator says to a turn that ends in `<call> x + y <result>`; `?` where it finds no sum."""
    call = re.search(r"<call> (\d+) \+ (\d+) <result>$", turn)
    return f"{int(call[1]) + int(call[2])}\n" if call else "?\n"
