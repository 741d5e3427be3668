"""Ray on the nodes of one SLURM job: `python -m run_kit.cluster.ray_nodes ACTION ...`, called by `slurm.sh`.

    address HOST                      prints this node's address towards HOST and two free ports
    wait ADDRESS NODES TIMEOUT PID …  waits until the cluster has NODES nodes, while the processes PID live

`ray symmetric-run` (2.60) does not serve here: it refuses a host on which another job runs Ray, its `ray stop` ends the
Ray of that job as well, SIGUSR1 kills it, and it exits with 0 if Ray cannot start.
"""

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ..tracking.run_state import process_start


def address_towards(host: str) -> tuple[str, int, int]:
    """This node's address on the way to `host`, and two of its ports that were free a moment ago."""
    with socket.socket(type=socket.SOCK_DGRAM) as route, socket.socket() as first, socket.socket() as second:
        route.connect((host, 9))  # sends nothing
        address = route.getsockname()[0]
        first.bind((address, 0))
        second.bind((address, 0))
        return address, first.getsockname()[1], second.getsockname()[1]


def wait_for_nodes(address: str, num_nodes: int, timeout_s: float, pids: Sequence[int]) -> str:
    """Waits until the cluster at `address` has `num_nodes` nodes; returns the reason if it has not, else an empty text.

    Args:
        pids: the processes that start the nodes.
    """
    import ray

    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    alive: list[str] = []
    while time.monotonic() < deadline:
        if dead := [pid for pid in pids if not process_start(pid)]:
            return f"a process that starts nodes has ended (pid {dead[0]})"
        with suppress(OSError, RuntimeError, ValueError):  # the head is still starting
            if not ray.is_initialized():
                socket.create_connection((host, int(port)), timeout=5).close()
                ray.init(address, log_to_driver=False, logging_level="ERROR")
            alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        if len(alive) >= num_nodes:
            print(f"Ray at {address}: {', '.join(alive)}", flush=True)
            return ""
        time.sleep(0.5)
    return f"{len(alive)} of {num_nodes} nodes have joined within {timeout_s:.0f} s: {', '.join(alive) or 'none'}"


def main(arguments: Sequence[str]) -> int:
    """Runs an action; returns its exit code."""
    match list(arguments):
        case ["address", host]:
            print(*address_towards(host))
        case ["wait", address, num_nodes, timeout_s, *pids]:
            if problem := wait_for_nodes(address, int(num_nodes), float(timeout_s), [int(pid) for pid in pids]):
                print(f"error: the Ray cluster of this job is not complete: {problem}", file=sys.stderr, flush=True)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
