"""A real OpenEnv server for tests: guess a number; `python rollout_vllm_openenv_server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str


class GuessServer(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._number = options["number"]
        return Hint(hint="Guess.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        guess = int(action.text)
        if guess == self._number:
            return Hint(hint="Yes.", done=True, reward=1.0)
        return Hint(hint="higher" if guess < self._number else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(GuessServer, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
