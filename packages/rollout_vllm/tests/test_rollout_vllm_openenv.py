"""OpenEnv environments, against a real server; skipped without the extra `openenv`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs openenv-core 0.3")

from rollout_vllm import EnvironmentFailedError, EnvironmentSpec
from rollout_vllm.episodes.environment_process import EnvironmentProcess

PATH = "rollout_vllm.episodes.openenv:OpenEnvEnvironment"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("rollout_vllm_openenv_server.py")
    with subprocess.Popen([sys.executable, str(script), str(port)]) as server:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def spec(url: str, **options: Any) -> EnvironmentSpec:
    fields = {"action_field": "text", "observation_field": "hint", "reset_columns": {"number": "secret"}}
    options = {"url": url} | fields | options
    return EnvironmentSpec(path=PATH, options=options, start_timeout_s=600.0)  # the first process imports the library


def prompt(secret: int) -> Any:
    return SimpleNamespace(extra={"secret": secret})


async def play(url: str, secret: int) -> list[tuple[Any, Any, bool]]:
    async with EnvironmentProcess(spec(url), prompt(secret)) as environment:
        assert await environment.reset() == "Guess."
        steps = [await environment.step(guess) for guess in ("5", "9", "7")]
        return [(step.observation, step.reward, step.done) for step in steps]


def test_concurrent_sessions_have_states_of_their_own(url: str) -> None:
    async def all_of_them() -> list[list[tuple[Any, Any, bool]]]:
        return await asyncio.gather(play(url, 7), play(url, 7))

    for played in asyncio.run(all_of_them()):
        assert played == [("higher", -0.25, False), ("lower", -0.25, False), ("Yes.", 1.0, True)]


def test_errors_of_the_server_and_of_the_fields_are_named(url: str) -> None:
    async def one_step(action: str, address: str = url, **options: Any) -> None:
        async with EnvironmentProcess(spec(address, **options), prompt(7)) as environment:
            await environment.reset()
            await environment.step(action)

    def fails(action: str, **options: Any) -> str:
        with pytest.raises(EnvironmentFailedError) as caught:
            asyncio.run(one_step(action, **options))
        return str(caught.value)

    assert "invalid literal for int()" in fails("seven")
    assert "observation_field: got 'text'; it is no text in the observation; allowed: hint (str)" in fails(
        "5", observation_field="text"
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "Failed to connect" in fails("5", address=nowhere)
