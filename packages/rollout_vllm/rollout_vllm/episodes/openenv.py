"""OpenEnv environments: a client of an environment server (openenv-core) as an environment with `reset` and `step`."""

from collections.abc import Mapping
from typing import Any

from ..errors import RolloutConfigError
from .environment_process import Observation


class OpenEnvEnvironment:
    """An episode is a session of an OpenEnv server: a turn of the policy is one text field of an action.

    Needs the extra `openenv` of this package. url: of the server. action_field: the field of the action that gets the
    text of a turn; action: its other fields. observation_field: the text field of an observation that the policy reads;
    at `reset` it is the prompt, unless it is empty or reset_is_prompt is False. reset_options: arguments of `reset`;
    those that name a column of the data in `reset_columns` get its value from `prompt.extra`.

    Rewards are those of the server; a step without one adds nothing.
    """

    preload = ("openenv.core.generic_client",)  # imported once, before processes are forked

    def __init__(
        self,
        url: str,
        *,
        action_field: str,
        observation_field: str,
        action: Mapping[str, Any] | None = None,
        reset_options: Mapping[str, Any] | None = None,
        reset_columns: Mapping[str, str] | None = None,
        reset_is_prompt: bool = True,
    ) -> None:
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ImportError(f"{error}: pip install 'openenv-core>=0.3,<0.4'") from error

        self._client = GenericEnvClient(base_url=url)
        self._action_field, self._action = action_field, dict(action or {})
        self._observation_field, self._reset_is_prompt = observation_field, reset_is_prompt
        self._reset_options, self._reset_columns = dict(reset_options or {}), dict(reset_columns or {})

    async def reset(self, prompt: Any) -> Observation:
        """Opens a session on the server."""
        columns = {name: prompt.extra[column] for name, column in self._reset_columns.items()}
        result = await self._client.reset(**self._reset_options, **columns)
        text = self._text(result.observation)
        return text if text and self._reset_is_prompt else None

    async def step(self, action: str) -> tuple[Observation, float | None, bool, dict[str, Any]]:
        """Sends a turn to the server."""
        result = await self._client.step({**self._action, self._action_field: action})
        return self._text(result.observation), result.reward, bool(result.done), {}

    async def close(self) -> None:
        """Ends the session."""
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        text = observation.get(self._observation_field)
        if not isinstance(text, str):
            raise RolloutConfigError(
                "it is no text in the observation",
                field="observation_field",
                value=self._observation_field,
                allowed=", ".join(f"{name} ({type(value).__name__})" for name, value in observation.items()),
            )
        return text
