"""verifiers environments (verifiers 0.4): the agent that they run talks to the policy of an episode."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ..errors import RolloutConfigError
from .chat_endpoint import ChatEndpoint
from .environment_process import Observation
from .tools import CALL_FORMATS, check_call_format

_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")


class VerifiersEnvironment:
    """An episode is one episode of a verifiers environment, and its reward is that of the agent's trace.

    Needs the extra `verifiers` of this package. env: configuration of the environment, as under `[env]` of verifiers'
    own configuration, e.g. `{taskset: {id: my_taskset}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`.
    task_column: the column of the data with the task, as `write_tasks` writes it. call_format: how tool calls are
    written in a turn, a key of `CALL_FORMATS`.

    verifiers runs the agent, whose model requests reach a `ChatEndpoint` in this process: the messages that are new in
    a request are the observation, and the next turn of the policy is the answer. One agent of the environment is the
    policy; others (judges, modeled users) need a `client` of their own in `env`. When the episode is cut, the agent is
    told that its context is full, and what it did so far is scored.
    """

    preload = ("verifiers.v1", "mcp.server.mcpserver")  # imported once, before processes are forked

    def __init__(self, env: Mapping[str, Any], *, task_column: str = "task", call_format: str = "hermes") -> None:
        check_call_format(call_format)
        self._vf = _import_verifiers()
        config = self._vf.resolve_env_config(dict(env))
        for name, agent in config:
            for limit in _TOKEN_LIMITS if isinstance(agent, self._vf.AgentConfig) else ():
                if value := getattr(agent, limit):
                    raise RolloutConfigError(
                        "tokens are not counted here",
                        field=f"env.{name}.{limit}",
                        value=value,
                        remedy="use sampling.max_tokens",
                    )
        self._env = self._vf.load_environment(config)
        self._endpoint = ChatEndpoint(CALL_FORMATS[call_format])
        self._task_column = task_column
        self._stack = AsyncExitStack()
        self._episode: asyncio.Task[Any] | None = None

    @property
    def tools(self) -> list[Any]:
        """JSON schemas of the tools in the agent's first request."""
        return self._endpoint.tools

    async def reset(self, prompt: Any) -> Observation:
        """Starts the agent, up to its first request."""
        task = self._task(prompt.extra)
        await self._stack.enter_async_context(self._endpoint)
        await self._stack.enter_async_context(self._env.serving())
        self._episode = asyncio.ensure_future(self._play(task))
        opening = await self._next()
        if opening is None:
            self._ended()  # raises the reason, if the episode failed
            raise RuntimeError("the agent ended before its first request")
        return opening

    async def step(self, action: str) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        """Answers the agent's request, and waits for the next one or for the end."""
        self._endpoint.answer(action)
        new = await self._next()
        return self._ended() if new is None else (new, None, False, {})

    async def cut(self) -> float | None:
        """Refuses the agent's request, so that it ends, and returns the reward of what it did."""
        self._endpoint.refuse()
        if await self._next() is not None:
            raise RuntimeError("the agent went on although its context is full")
        return self._ended()[1]

    async def close(self) -> None:
        """Ends the agent."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait([self._episode])
        await self._stack.aclose()

    def _task(self, extra: Mapping[str, Any]) -> Any:
        column = extra[self._task_column]
        task_type, config = type(self._env.taskset).task_type(), self._env.config.taskset.task
        data = task_type.data_type().model_validate(json.loads(column) if isinstance(column, str) else column)
        return task_type(data, config)

    async def _play(self, task: Any) -> Any:
        client = self._vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="PLINTH_NO_API_KEY")
        context = self._vf.ModelContext(model="policy", client=client)
        (slot,) = self._env.slots(task)
        return await self._env.run_slot(slot, context)

    async def _next(self) -> Observation:
        """The new messages of the agent's next request; None: the episode has ended."""
        assert self._episode is not None
        request = asyncio.ensure_future(self._endpoint.request())
        await asyncio.wait([request, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    def _ended(self) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        """The end of the episode, as `step` returns it. Raises RuntimeError if it failed."""
        assert self._episode is not None
        episode = self._episode.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"the episode failed: {'; '.join(f'{e.type}: {e.message}' for e in errors[-2:])}")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise RuntimeError(f"{len(traces)} agents of the episode are trainable; allowed: 1")
        (trace,) = traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return None, trace.reward, True, {"rewards": rewards, "metrics": dict(trace.metrics)}


def write_tasks(env: Mapping[str, Any], path: str | Path, *, num_tasks: int | None = None) -> int:
    """Writes the tasks of a taskset as JSON lines for `data.train` and `data.val`, and returns their number.

    env: as for `VerifiersEnvironment`. num_tasks: the first so many; None: all. A row has the column `task` and, for
    the limit `data.max_prompt_length`, the column `prompt`.
    """
    vf = _import_verifiers()
    taskset = vf.load_taskset(vf.resolve_env_config(dict(env)).taskset)
    if num_tasks is None and not taskset.bounded:
        allowed = "a number of tasks, since this taskset never ends"
        raise RolloutConfigError(field="num_tasks", value=num_tasks, allowed=allowed)
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for count, task in enumerate(taskset if num_tasks is None else taskset.take(num_tasks), 1):
            row = {
                "prompt": task.data.prompt_text or f"task {count}",
                "task": task.data.model_dump_json(exclude_defaults=True),
            }
            file.write(json.dumps(row) + "\n")
    return count


def _import_verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'verifiers>=0.4,<0.5'") from error
    return vf
