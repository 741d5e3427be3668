"""mini-swe-agent, unmodified, as the agent of an episode; its shell commands run in the sandbox of the code reward.

pip install mini-swe-agent
PYTHONPATH=examples/harnesses plinth grpo model.path=MODEL data.train=train.jsonl episode.agent=mini_swe:solve
"""

import json
import os
from typing import Any

os.environ.update(MSWEA_SILENT_STARTUP="1", MSWEA_COST_TRACKING="ignore_errors", LITELLM_LOCAL_MODEL_COST_MAP="true")
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"
from litellm.exceptions import BadRequestError
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from rl_data.rewards.sandbox import Limits, run_program

COMMAND = """
import base64, io, json, os, subprocess, tarfile
command, files = json.loads(open(0).read())
os.mkdir("work"), os.chdir("work")
if files:
    tarfile.open(fileobj=io.BytesIO(base64.b64decode(files))).extractall(filter="data")
done = subprocess.run(command, shell=True, text=True, errors="replace", stdout=-1, stderr=-2, stdin=-3)
with tarfile.open("../files.tar", "w") as files:
    files.add(".")
files = base64.b64encode(open("../files.tar", "rb").read()).decode()
print(json.dumps([done.stdout[-10_000:], done.returncode, files]))
"""
LIMITS = Limits(timeout_s=20.0, num_processes=32, output_bytes=16 << 20)


class Sandbox(LocalEnvironment):  # type: ignore[misc]
    """Commands see no network and none of this machine's files to write; their folder goes from one to the next."""

    files = ""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        finished = run_program(COMMAND, json.dumps([action["command"], self.files]), LIMITS)
        output = {"output": "", "returncode": -1, "exception_info": finished.reason}
        if finished.stdout and not finished.reason:
            output["output"], output["returncode"], self.files = json.loads(finished.stdout)
        self._check_finished(output)  # raises Submitted
        return output


def solve(base_url: str, api_key: str, prompt: Any) -> float:
    """1 if the ground truth of the row is in what the agent submits."""
    model = LitellmModel(model_name="openai/policy", model_kwargs={"api_base": base_url, "api_key": api_key})
    system = "Solve the task with bash. To end, print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and then the answer."
    agent = DefaultAgent(model, Sandbox(), system_template=system, instance_template="{{task}}", step_limit=6)
    try:
        return float(prompt.ground_truth in agent.run(prompt.messages[-1]["content"])["submission"])
    except BadRequestError:  # a full context
        return 0.0
