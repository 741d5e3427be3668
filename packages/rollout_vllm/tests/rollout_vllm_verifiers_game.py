"""A verifiers environment for tests: find a number, with hints, or with a tool; the agent runs in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["FinderHarness", "GuessEnv", "NumberTaskset"]

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at the number.",
        "parameters": {"type": "object", "properties": {"digit": {"type": "integer"}}},
    },
}


class FinderConfig(vf.HarnessConfig):
    tool: bool = False
    forgets: bool = False  # a new conversation with every request
    temperature: float | None = None


class FinderHarness(vf.Harness[FinderConfig]):
    """Sends the conversation until there is no call, as agents do."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        )
        messages = [{"role": "system", "content": system}, *messages] if system else messages
        messages = messages[-1:] if self.config.forgets else messages
        options = {"tools": [LOOK]} if self.config.tool else {}
        if self.config.temperature is not None:
            options["temperature"] = self.config.temperature
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                except BadRequestError as error:
                    if "maximum context length" not in str(error):
                        raise
                    break
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    digit = json.loads(call.function.arguments)["digit"]
                    result = str(data.number)[digit]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    """The answer is the last message."""

    @vf.reward(weight=2.0)
    async def is_found(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content.strip() == str(self.data.number))

    @vf.metric
    async def num_turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class NumberConfig(vf.TasksetConfig):
    numbers: tuple[int, ...] = (7, 42)


class NumberTaskset(vf.Taskset[NumberTask, NumberConfig]):
    def load(self) -> Iterator[NumberTask]:
        for number in self.config.numbers:
            yield NumberTask(NumberData(prompt=f"Find a number of {len(str(number))} digits.", number=number))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    raises: bool = False
    num_players: int = 1
    hint: str = ""


class GuessEnv(vf.Env[GuessConfig]):
    """Answers wrong numbers with a hint, if the configuration has one; each costs 0.25."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if self.config.raises:
            raise RuntimeError("the board is broken")
        for _ in range(self.config.num_players):
            async with agents.player.interaction(task) as interaction:
                segment, begin = await interaction.turn(), time.monotonic()
                while self.config.hint and not segment.terminated and segment.last_reply != str(task.data.number):
                    interaction.trace.record_reward(f"try at {time.monotonic() - begin}", -0.25, 1.0)
                    segment = await interaction.turn(self.config.hint)
