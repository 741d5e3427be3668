"""Server processes that import vLLM while this process imports its libraries and checks the configuration."""

from contextlib import AbstractContextManager, nullcontext

from rollout_vllm import RolloutConfig
from rollout_vllm.servers.device import Device
from rollout_vllm.servers.spawn import prepare_servers
from weight_sync import server_env

from ..ranks.environment import listed_gpus


def servers_ahead(
    rollout: RolloutConfig, *, pushes: bool = True, device: str = "auto", ray_address: str | None = None
) -> AbstractContextManager[None]:
    """Starts the processes of the servers on this host; none for existing servers, and for those of a Ray cluster.

    The devices are a guess, since no library has been imported: a process that turns out to be needless ends.

    Args:
        pushes: the servers get weights.
        device: "auto", "cpu" or "cuda", of the ranks.
    """
    if rollout.urls or ray_address is not None:
        return nullcontext()
    num_gpus = 0 if "cpu" in (device, rollout.device) else listed_gpus()
    guess: Device = "cuda" if num_gpus else "cpu"
    number = rollout.num_servers or max(1, num_gpus // rollout.tensor_parallel_size)
    return prepare_servers(rollout, device=guess, number=number, env=server_env(guess) if pushes else None)
