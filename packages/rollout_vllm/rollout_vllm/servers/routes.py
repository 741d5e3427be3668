"""Routed experts of CPU servers: recorded by vLLM's own hooks in the routers, and returned with each token.

vLLM's engine core returns them on GPUs only (`--enable-return-routed-experts`); from there on their way is the same:
`EngineCoreOutput.routed_experts`, then base64 of a .npy file in `routed_experts` of a choice. The rows are those of all
computed tokens: prompt and response without the last token. Without prefix caching every token is computed.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy

from plinth_base.fence import Replace

Step = dict[str, tuple[int, numpy.ndarray]]
"""By request: place of the first token that a step computed, and [tokens, layers, experts] of these tokens."""


@dataclass
class _Unsent:
    """Rows of a request that no output has taken yet; `num_rows`: with those that were taken."""

    num_rows: int = 0
    rows: list[numpy.ndarray] = field(default_factory=list)


class RouteBuffer:
    """Rows of the requests of an engine core."""

    def __init__(self) -> None:
        self._unsent: dict[str, _Unsent] = {}

    def add(self, step: Step, requests: Container[str]) -> None:
        """Keep a step's rows of these requests; others are forgotten.

        Tokens that are computed again, after their request was preempted, keep their first rows.
        """
        self._unsent = {name: unsent for name, unsent in self._unsent.items() if name in requests}
        for name, (start, rows) in step.items():
            if name in requests:
                unsent = self._unsent.setdefault(name, _Unsent())
                new = rows[max(0, unsent.num_rows - start) :]
                unsent.num_rows += len(new)
                unsent.rows.append(new)

    def take(self, name: str) -> numpy.ndarray | None:
        """The rows of a request that were not taken yet."""
        unsent = self._unsent.get(name)
        if unsent is None or not unsent.rows:
            return None
        rows: numpy.ndarray = numpy.concatenate(unsent.rows)
        unsent.rows = []
        return rows


def record_routes(replace: Replace) -> None:
    """Record in this process's workers, and return with the outputs of its engine core."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturing
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load, execute, sample = CPUModelRunner.load_model, CPUModelRunner.execute_model, CPUModelRunner.sample_tokens
    update, buffer = Scheduler.update_from_output, RouteBuffer()

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.plinth_capturer = capturing.RoutedExpertsCapturer(most, self.vllm_config)
        capturing.bind_routed_experts_capturer(self.model, self.plinth_capturer)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduler_output, *args, **kwargs)
        rows = self.plinth_capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
        self.plinth_step, end = Step(), 0
        for name, computed in zip(self.input_batch.req_ids, self.input_batch.num_computed_tokens_cpu, strict=False):
            begin, end = end, end + scheduler_output.num_scheduled_tokens.get(name, 0)
            self.plinth_step[name] = int(computed), rows[begin:end].copy()
        return result

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        output.routed_experts = self.plinth_step
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        buffer.add(getattr(model_runner_output, "routed_experts", None) or Step(), self.requests)
        per_client = update(self, scheduler_output, model_runner_output)
        for outputs in per_client.values():
            for output in outputs.outputs:
                if output.new_token_ids:
                    output.routed_experts = buffer.take(output.request_id)
        return per_client

    replace(CPUModelRunner, load_model=load_model, execute_model=execute_model, sample_tokens=sample_tokens)
    replace(Scheduler, update_from_output=update_from_output)
