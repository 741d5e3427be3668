"""An agent that compacts its history: it plays the stone game with a tool, and forgets all but the latest result.

PYTHONPATH=examples/harnesses plinth grpo preset=game episode.environment=null episode.agent=compacting:solve
"""

from typing import Any

from openai import BadRequestError, OpenAI

from apps.grpo.stones import StoneGame

MAX_MESSAGES = 3


def solve(base_url: str, api_key: str, prompt: Any) -> float:
    """1 for a game that the policy wins."""
    client, tool = OpenAI(base_url=base_url, api_key=api_key), StoneGame()
    tool.reset(prompt)
    messages: list[Any] = [{"role": "user", "content": prompt.messages[-1]["content"]}]
    while True:
        try:
            answer = client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError:  # a full context
            return 0.0
        text = answer.choices[0].message.content or ""
        result, score, is_over, _ = tool.step(text)
        if is_over:
            return score
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result.strip()}]
        if len(messages) > MAX_MESSAGES:
            messages = messages[-1:]
