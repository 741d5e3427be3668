"""verifiers environments (verifiers 0.4) as agents of episodes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RolloutConfigError


class VerifiersAgent:
    """An episode is one episode of a verifiers environment, and its score is the reward of the agent's trace.

    Needs the extra `verifiers` of this package. env: configuration of the environment, as under `[env]` of verifiers'
    own configuration, e.g. `{taskset: {id: my_taskset}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`.
    task_column: the column of the data with the task, as `write_tasks` writes it.

    One agent of the environment is the policy; others (judges, modeled users) need a `client` of their own in `env`.
    """

    preload = ("verifiers.v1", "mcp.server.mcpserver")  # imported once, before processes are forked

    def __init__(self, env: Mapping[str, Any], *, task_column: str = "task") -> None:
        self._vf = _import_verifiers()
        self._env = self._vf.load_environment(self._vf.resolve_env_config(dict(env)))
        self._task_column = task_column

    def reset(self, prompt: Any) -> None:
        """Reads the task of a row."""
        column = prompt.extra[self._task_column]
        task_type, config = type(self._env.taskset).task_type(), self._env.config.taskset.task
        data = task_type.data_type().model_validate(json.loads(column) if isinstance(column, str) else column)
        self._task = task_type(data, config)

    async def __call__(self, base_url: str, api_key: str, prompt: Any) -> float:
        """Plays the task. Raises RuntimeError if the episode fails."""
        client = self._vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        (slot,) = self._env.slots(self._task)
        async with self._env.serving():
            episode = await self._env.run_slot(slot, self._vf.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"the episode failed: {'; '.join(f'{e.type}: {e.message}' for e in errors[-2:])}")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise RuntimeError(f"{len(traces)} agents of the episode are trainable; allowed: 1")
        return float(traces[0].reward)


def write_tasks(env: Mapping[str, Any], path: str | Path, *, num_tasks: int | None = None) -> int:
    """Writes the tasks of a taskset as JSON lines for `data.train` and `data.val`, and returns their number.

    env: as for `VerifiersAgent`. num_tasks: the first so many; None: all. A row has the column `task` and, for
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
