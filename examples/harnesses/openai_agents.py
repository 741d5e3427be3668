"""The OpenAI Agents SDK, unmodified, as the agent of an episode. It speaks the responses API.

pip install openai-agents
PYTHONPATH=examples/harnesses plinth grpo model.path=MODEL data.train=train.jsonl episode.agent=openai_agents:solve
"""

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI, BadRequestError

set_tracing_disabled(True)  # it would send every run to OpenAI


@function_tool
def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y


async def solve(base_url: str, api_key: str, prompt: Any) -> float:
    """1 if the ground truth of the row is in the final answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent: Agent[Any] = Agent(
            name="calculator",
            instructions="Add with the tool. Then answer with the number.",
            tools=[add],
            model=OpenAIResponsesModel(model="policy", openai_client=client),
        )
        try:
            result = await Runner.run(agent, prompt.messages[-1]["content"], max_turns=4)
        except (AgentsException, BadRequestError):  # no such tool, too many turns, a full context
            return 0.0
    return float(prompt.ground_truth in str(result.final_output))
