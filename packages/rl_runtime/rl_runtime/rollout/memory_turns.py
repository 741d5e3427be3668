"""Memory in turns: servers sleep while the trainer works, and engines wait in host memory while the servers generate.

Ranks and servers share GPUs that cannot hold both. A step passes through three turns:

    GENERATION   the servers are awake; with `moves_states`, optimizer states (at ZeRO-1 in bf16 also gradients) are
                 in host memory
      sleep        requests end, the servers free weights (level 1: copied to host memory) and KV cache
      reload       the engines' states return
    TRAINING     log-probs, updates, checkpoint
      offload      the engines' states move to host memory, and torch returns its cached memory
      wake         the servers allocate their weights; at level 2 these hold nothing until the push
    PUSH         the weights of `pushed_role`, which stay on the GPU in every turn, are pushed
      wake         the servers allocate their KV cache and accept requests
    GENERATION

The optimizer leaves before the servers allocate weights, and the KV cache comes last, so that no moment needs more
memory than a turn.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal

from rollout_vllm import ControlError, Endpoint, RolloutClient, RolloutConfig, ServerGroup
from rollout_vllm.servers import control

from ..errors import RlRuntimeError
from ..ranks.trainer_worker import TrainerWorker
from ..ranks.worker_group import WorkerGroup
from ..samples import Phase

SleepLevel = Literal[1, 2]

TURN_TIMEOUT_S = 120.0
"""Seconds in which a server falls asleep or wakes up; a slower one counts as hung."""


class Turn(Enum):
    """The present owner of the GPUs' memory."""

    GENERATION = "the servers generate"
    TRAINING = "the trainer works"
    PUSH = "weights are pushed"


def sleep_level(rollout: RolloutConfig) -> SleepLevel:
    """2, which discards the weights, because each push sends all of them; 1 if pushes send LoRA adapters alone."""
    return 2 if rollout.max_lora_rank is None else 1


def put_to_sleep(servers: ServerGroup, *, level: SleepLevel) -> None:
    """Puts the running servers to sleep before the trainer's first turn, however a lost trainer has left them.

    Raises:
        ControlError: a server did not fall asleep.
    """
    running = [server.endpoint for server in servers.servers if server.alive]
    # A server that was about to wake up has a part of its memory.
    control.wake([endpoint for endpoint in running if control.is_sleeping(endpoint)], timeout_s=TURN_TIMEOUT_S)
    control.sleep(running, level=level, timeout_s=TURN_TIMEOUT_S)


class MemoryTurns:
    """Hands the GPUs' memory from the trainer to the servers and back. It starts in the trainer's turn.

    `on_failure` gets the error of each server that does not sleep or wake up, and has to free the server's memory
    before it returns. By default it raises.

    Args:
        groups: the ranks that share GPUs with servers.
        pushed_role: the role whose weights are pushed to the servers.
        moves_states: the engines' states move to host memory; False: only torch's cached memory is freed.
        report: called with a line of text.
    """

    def __init__(
        self,
        client: RolloutClient,
        groups: Sequence[WorkerGroup],
        *,
        pushed_role: str,
        moves_states: bool,
        level: SleepLevel,
        report: Callable[[str], None],
        timeout_s: float = TURN_TIMEOUT_S,
    ) -> None:
        self._client, self._groups, self._role = client, groups, pushed_role
        self._moves_states, self._level = moves_states, level
        self._report, self._timeout_s = report, timeout_s
        self._moved_bytes = 0
        self.on_failure: Callable[[ControlError], None] = _raise
        self.turn = Turn.TRAINING

    def start_training(self, servers: Sequence[Endpoint], phase: Phase) -> None:
        """Puts `servers` to sleep and brings the engines' states back.

        Raises:
            RlRuntimeError: a server did not fall asleep, and `on_failure` was not set.
            RankError: a rank failed.
        """
        self._go(Turn.GENERATION, Turn.TRAINING)
        with phase("sleep"):
            try:  # holds new requests back; in flight are none, unless a server does not answer
                self._client.run(self._client.pause(timeout_s=self._timeout_s))
            except ControlError as error:
                self._report(f"warning: sleeping servers abort requests: {error}")
            self._try(lambda: control.sleep(servers, level=self._level, timeout_s=self._timeout_s))
        if self._moves_states:
            with phase("reload"):
                self._moved_bytes += sum(sum(group.run(TrainerWorker.claim_memory)) for group in self._groups)

    def start_push(self, servers: Sequence[Endpoint], phase: Phase) -> None:
        """Frees the ranks' memory and wakes the weights of `servers`, which can then be pushed to; raises likewise."""
        self._go(Turn.TRAINING, Turn.PUSH)
        with phase("offload"):
            for group in self._groups:
                self._moved_bytes += sum(group.run(TrainerWorker.free_memory, self._role, self._moves_states))
        with phase("wake"):
            self._try(lambda: control.wake(servers, tags=["weights"], timeout_s=self._timeout_s))

    def start_generation(self, servers: Sequence[Endpoint], phase: Phase) -> None:
        """Wakes the KV cache of `servers`, which hold the pushed weights, and resumes requests; raises likewise."""
        self._go(Turn.PUSH, Turn.GENERATION)
        with phase("wake"):
            self._try(lambda: control.wake(servers, tags=["kv_cache"], timeout_s=self._timeout_s))
            for server in servers:
                self._try(lambda server=server: _check_awake(server, self._timeout_s))  # type: ignore[misc]
        self._client.resume()

    def take_metrics(self) -> dict[str, float]:
        """GB (1e9 bytes) that all ranks moved between GPU and host memory since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return {"turns/moved_gb": moved / 1e9}

    def _go(self, before: Turn, after: Turn) -> None:
        if self.turn is not before:
            raise RlRuntimeError(field="turn", value=self.turn.value, allowed=f"{before.value}, before {after.value}")
        self.turn = after

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except ControlError as error:
            self.on_failure(error)


def _check_awake(server: Endpoint, timeout_s: float) -> None:
    if control.is_sleeping(server, timeout_s=timeout_s):
        problem = "it still sleeps after its KV cache was woken up"
        raise ControlError(f"wake failed: {server.url}: {problem}", {server.url: problem})


def _raise(error: ControlError) -> None:
    remedy = "set trainer.max_server_restarts above 0, which restarts such servers"
    raise RlRuntimeError(str(error), field="trainer.take_turns", remedy=remedy) from error
