"""An example of a multi-turn rollout: the model can call a calculator before it answers.

Use it with `episode.function=apps.grpo.calculator:with_calculator`; the preset `calculator` does.
"""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_data import Prompt
    from rollout_vllm import Episode

MAX_CALLS = 4


async def with_calculator(episode: "Episode", prompt: "Prompt", tokenizer: Any) -> None:
    """Samples turns until one ends without a call; answers each call.

    The result of a call is context: the policy reads it and is not trained on it.
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
    """The calculator's result for a turn that ends in `<call> x + y <result>`; `?` if there is no sum."""
    call = re.search(r"<call> (\d+) \+ (\d+) <result>$", turn)
    return f"{int(call[1]) + int(call[2])}\n" if call else "?\n"
