"""Environments for tests, named as `rollout_vllm_environments:…`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Counter:
    """Counts turns; the reward of a turn is its number. Ends after `num_turns`. Writes a line when it is closed."""

    def __init__(self, num_turns: int = 3, log: str = "") -> None:
        self.num_turns, self.log, self.count = num_turns, log, 0

    def reset(self, prompt: Any) -> None:
        self.prompt = prompt

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.count += 1
        return f"{action}!", float(self.count), self.count == self.num_turns, {"count": self.count}

    def close(self) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"closed {self.prompt} after {self.count}\n")


class AsyncCounter(Counter):
    """With coroutine functions, gymnasium's five values, and a prompt of its own."""

    async def reset(self, prompt: Any) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        super().reset(prompt)
        await asyncio.sleep(0.01)
        return "again", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0.01)
        observation, reward, done, info = super().step(action)
        return observation, reward, False, done, info


class Painter:
    """Shows an image with each observation: bytes, then one of PIL."""

    def reset(self, prompt: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", "image": b"first"}, {"type": "text", "text": "a"}]}]

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool, dict[str, Any]]:
        from PIL import Image

        image = {"type": "image", "image": Image.new("RGB", (2, 3), "red")}
        return [{"role": "user", "content": [image]}], 1.0, False, {}


class Silent(Counter):
    """Does not score."""

    def step(self, action: str) -> tuple[str, None, bool, dict[str, Any]]:  # type: ignore[override]
        observation, _, done, info = super().step(action)
        return observation, None, done, info


class Moody(Counter):
    """Everything that can go wrong in the second step, by the prompt; a prompt `reset raises` fails earlier."""

    def reset(self, prompt: Any) -> Any:
        super().reset(prompt)
        if prompt == "reset raises":
            raise RuntimeError("no board")
        return b"board" if prompt == "reset returns bytes" else None

    def step(self, action: str) -> Any:
        result = super().step(action)
        if self.count < 2:
            return result
        observation, _, done, info = result
        wrong: dict[str, Any] = {
            "nan": (observation, float("nan"), done, info),
            "string": (observation, "1.0", done, info),
            "nothing": None,
            "three values": result[:3],
            "number as text": (7, 1.0, done, info),
            "megabytes": ("x" * (17 * 2**20), 1.0, done, info),
        }
        if self.prompt in wrong:
            return wrong[self.prompt]
        if self.prompt == "raises":
            raise RuntimeError("no idea")
        if self.prompt == "exits":
            sys.exit(3)
        if self.prompt == "dies":
            os._exit(3)
        if self.prompt == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.prompt == "hangs":
            time.sleep(600)
        if self.prompt == "ignores signals":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if self.prompt == "prints":
            for _ in range(8):
                print("x" * 2**20)
                os.write(2, b"y" * 2**20)
        if self.prompt == "forks":
            os.fork()
        if self.prompt == "leaves a process":
            subprocess.Popen(
                [sys.executable, "-c", f"import time; time.sleep(600)  # {self.log}"], start_new_session=True
            )
        return result


class Endless(Counter):
    """Never ends by itself."""

    def __init__(self) -> None:
        super().__init__(num_turns=-1)


class CutCounter(Endless):
    """Gives a last reward when it is cut: 10, or a wrong one."""

    async def cut(self) -> float:
        return float("nan") if self.prompt == "nan" else 10.0


class SlowStart:
    def __init__(self) -> None:
        time.sleep(600)


class NeedsAnOption(Counter):
    def __init__(self, size: int) -> None:
        super().__init__(size)


def add(x: int, y: int) -> int:
    """Adds two numbers.

    Args:
        x: the first number.
        y: the second number.
    """
    return x + y


async def shout(text: str) -> str:
    """Writes in capitals.

    Args:
        text: the text.
    """
    return text.upper()


def fails() -> str:
    """Always fails."""
    raise RuntimeError("out of order")


def without_hints(x):  # type: ignore[no-untyped-def]
    return x
