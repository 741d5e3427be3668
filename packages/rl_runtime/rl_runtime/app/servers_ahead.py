"""Server processes that import vLLM while this process imports its libraries and checks the configuration."""

from contextlib import AbstractContextManager, nullcontext

from rollout_vllm.servers.device import Device
from rollout_vllm.servers.spawn import prepare_servers
from weight_sync import server_env

from ..job_config import JobConfig
from ..ranks.environment import listed_gpus


def servers_ahead(config: JobConfig) -> AbstractContextManager[None]:
    """Starts the processes of a run's servers on this host; without one on other hosts, and with existing servers.

    The devices are a guess, since no library has been imported: a process that turns out to be needless ends.
    """
    rollout, trainer = config.rollout, config.trainer
    if rollout.urls or trainer.ray_address is not None:
        return nullcontext()
    num_gpus = 0 if "cpu" in (trainer.device, rollout.device) else listed_gpus()
    device: Device = "cuda" if num_gpus else "cpu"
    number = rollout.num_servers or max(1, num_gpus // rollout.tensor_parallel_size)
    return prepare_servers(rollout, device=device, number=number, env=server_env(device))
