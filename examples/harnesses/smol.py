"""A CodeAgent of smolagents, unmodified, as the agent of an episode: its interpreter runs the policy's Python.

pip install smolagents
PYTHONPATH=examples/harnesses plinth grpo model.path=MODEL data.train=train.jsonl episode.agent=smol:solve
"""

from typing import Any

from smolagents import AgentError, CodeAgent, LogLevel, OpenAIServerModel


def solve(base_url: str, api_key: str, prompt: Any) -> float:
    """1 if the ground truth of the row is in the final answer."""
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
    try:
        answer = agent.run(prompt.messages[-1]["content"])
    except AgentError:  # a full context
        return 0.0
    return float(prompt.ground_truth in str(answer))
