"""Code rewards: the share of a row's tests that the program in a response passes, run in a sandbox."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from plinth_base.errors import shown

from ..config import require_choice
from ..errors import DataConfigError, DataError
from .base import PromptFields, Reward, require_number
from .sandbox import Limits, describe_isolation, isolation, run_program

_ASSERT_PROGRAM = """
import json, os
program, test, token = json.loads(open(0).read())
space = {"__name__": "solution"}
exec(compile(program, "solution.py", "exec"), space)
exec(compile(test, "test.py", "exec"), space)
os.write(1, token.encode())
"""
"""Prints the token after the test, so that a program which exits early does not pass."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test: Python code after the program (`code`), or the output that the program prints for an input."""

    code: str | None = None
    stdin: str = ""
    stdout: str = ""


def read_tests(value: Any) -> list[Test]:
    """The tests of a row.

    Args:
        value: Python code (one test), a list of such texts (one test each), a list of `{"input": ..., "output": ...}`,
            or `{"inputs": [...], "outputs": [...]}`; or JSON text of one of the last three.

    Raises:
        DataError: another form, or no test.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if isinstance(value, Mapping) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        if value.get("fn_name"):
            raise DataError("tests that call fn_name are not supported; write them as assert statements")
        if len(value["inputs"]) != len(value["outputs"]):
            raise DataError(f"there are {len(value['inputs'])} inputs and {len(value['outputs'])} outputs")
        pairs = zip(value["inputs"], value["outputs"], strict=True)
        value = [{"input": given, "output": expected} for given, expected in pairs]
    if not isinstance(value, list) or not value:
        raise DataError(f"no tests: {shown(value)}")
    return [_read_test(item) for item in value]


def _from_json(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return [text] if text.strip() else None


def _read_test(item: Any) -> Test:
    if isinstance(item, str) and item.strip():
        return Test(code=item)
    if isinstance(item, Mapping) and "input" in item and item.get("output") is not None:
        return Test(stdin=_lines(item["input"]), stdout=_lines(item["output"]))
    raise DataError(f"neither Python code nor an input with its output: {shown(item)}")


def _lines(value: Any) -> str:
    if value is None:  # no input
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def last_code_block(text: str) -> str | None:
    """The content of the last fenced block (```); None if there is none. A block that is not closed does not count."""
    blocks, begin = [], None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if begin is None:
            begin = number + 1
        else:
            blocks.append((begin, number))
            begin = None
    return "\n".join(lines[blocks[-1][0] : blocks[-1][1]]) + "\n" if blocks else None


@dataclass(frozen=True, kw_only=True)
class CodeReward(Reward):
    """The share of the row's tests that the Python program in the last fenced block of the response passes.

    The tests (`read_tests`) are the ground truth, or the column `column` of the row. Each test runs in its own sandbox.
    Outputs are equal if their lines are, without spaces at the end of lines and empty lines at the end. 0 without a
    block; tests that are not run before `timeout_s` count as failed.
    """

    needs_ground_truth: ClassVar[bool] = False  # `problem` checks the tests, wherever they are
    column: str | None = None
    timeout_s: float = 10.0
    """Wall-clock seconds of all tests of a response."""
    test_timeout_s: float = 5.0
    """Wall-clock seconds of one test."""
    memory_mb: int = 1024
    """Address space of the program in MiB."""
    num_processes: int = 1
    """1: the program can start threads, no processes; more: both (`sandbox.Limits`)."""
    isolation: Literal["auto", "required"] = "auto"
    """"required": refuse to start where the kernel does not shut programs in."""

    def __post_init__(self) -> None:
        require_choice("isolation", self.isolation, "auto", "required")
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            allowed = "the name of a column, or null for the ground truth"
            raise DataConfigError(field="column", value=self.column, allowed=allowed)
        for field in ("timeout_s", "test_timeout_s", "memory_mb", "num_processes"):
            require_number(field, getattr(self, field), above=0)
        for field in ("memory_mb", "num_processes"):
            if getattr(self, field) < 1:
                raise DataConfigError(field=field, value=getattr(self, field), allowed="at least 1")

    def __call__(self, response_text: str, prompt: PromptFields, **facts: Any) -> float:
        program = last_code_block(response_text)
        if program is None:
            return 0.0
        tests = read_tests(self._value(prompt.ground_truth, prompt.extra))
        deadline = time.monotonic() + self.timeout_s
        return sum(self._passes(program, test, deadline) for test in tests) / len(tests)

    @property
    def max_duration_s(self) -> float:
        return self.timeout_s

    def prepare(self) -> str:
        if self.isolation == "required" and not all(isolation().values()):
            problem = describe_isolation().removeprefix("warning: ")
            raise DataConfigError(problem, field="isolation", value=self.isolation)
        return f"code reward: {describe_isolation()}"

    def problem(self, ground_truth: str, extra: Mapping[str, Any]) -> str:
        if self.column is not None and self.column not in extra:
            return f"there is no column {self.column!r} with tests"
        try:
            read_tests(self._value(ground_truth, extra))
        except DataError as error:
            return error.problem
        return ""

    def _value(self, ground_truth: str, extra: Mapping[str, Any]) -> Any:
        return ground_truth if self.column is None else extra[self.column]

    def _passes(self, program: str, test: Test, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        limits = Limits(
            timeout_s=min(left_s, self.test_timeout_s),
            memory_bytes=int(self.memory_mb) << 20,
            num_processes=int(self.num_processes),
        )
        if test.code is None:
            finished = run_program(program, test.stdin, limits)
            expected = _output_lines(test.stdout.encode("utf-8", "replace"))
            return finished.exit_code == 0 and _output_lines(finished.stdout) == expected
        token = secrets.token_hex(16)
        finished = run_program(_ASSERT_PROGRAM, json.dumps([program, test.code, token]), limits)
        return finished.stdout.endswith(token.encode())


def _output_lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
