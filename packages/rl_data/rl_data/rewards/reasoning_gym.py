"""The verifier of a task of reasoning-gym, on problems that `data.train=reasoning_gym:TASK` makes."""

import ast
import inspect
import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from ..package_index import import_reasoning_gym
from .base import PromptFields, Reward, require_number
from .sandbox import Limits, run_program

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\s*\(")
_PROGRAM = """
import ast, json, os, sys
sys.path[:], task, answer, entry, token = json.loads(open(0).read())
import reasoning_gym
score = reasoning_gym.get_score_answer_fn(task)(answer, ast.literal_eval(entry))
os.write(1, f"{token}{float(score)!r}".encode())
"""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward(Reward):
    """The score that the task's own verifier gives an answer: 1 for a right one, for others 0 or a part.

    The answer is the text in the last `<answer>…</answer>`, else the text after the last `####`, else the whole
    response; one that the verifier cannot read scores 0. Verifiers that evaluate the answer as Python (countdown,
    puzzle24, integrals, some on matrices) run in the sandbox, which takes a second of CPU time for each. Needs the
    columns `task` and `entry`, and the package reasoning-gym, installed or in the cache folder.
    """

    needs_ground_truth: ClassVar[bool] = False  # some tasks have many right answers, and write none
    timeout_s: float = 10.0
    """Wall-clock seconds of a verifier in the sandbox."""

    def __post_init__(self) -> None:
        require_number("timeout_s", self.timeout_s, above=0)

    @property
    def max_duration_s(self) -> float:
        return self.timeout_s

    def prepare(self) -> str:
        import_reasoning_gym()
        return ""

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        missing = [name for name in ("task", "entry") if not isinstance(extra.get(name), str)]
        return f"there is no text in {missing[0]}, which data.train=reasoning_gym:TASK writes" if missing else ""

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        task, entry, answer = prompt.extra["task"], prompt.extra["entry"], answer_of(response_text)
        score, evaluates = _verifier(task)
        if evaluates:
            return self._in_sandbox(task, answer, entry)
        try:
            return float(score(answer, ast.literal_eval(entry)))
        except Exception:  # many verifiers raise if the answer has no such form
            return 0.0

    def _in_sandbox(self, task: str, answer: str, entry: str) -> float:
        token = secrets.token_hex(16)
        limits = Limits(timeout_s=self.timeout_s, memory_bytes=4 << 30)
        finished = run_program(_PROGRAM, json.dumps([sys.path, task, answer, entry, token]), limits)
        _, _, score = finished.stdout.rpartition(token.encode())
        try:
            return float(score)
        except ValueError:
            return 0.0


def answer_of(response_text: str) -> str:
    """The answer in a response."""
    if tagged := _ANSWER.findall(response_text):
        return str(tagged[-1]).strip()
    return response_text.rpartition("####")[2].strip()


@cache
def _verifier(task: str) -> tuple[Callable[[str, Any], float], bool]:
    """The function that scores answers, and True if its module evaluates text."""
    score = import_reasoning_gym().get_score_answer_fn(task)
    return score, bool(_EVALUATES.search(inspect.getsource(sys.modules[score.__func__.__module__])))
