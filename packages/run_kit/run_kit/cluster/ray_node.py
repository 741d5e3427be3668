"""Ray on the nodes of one job: `python -m run_kit.cluster.ray_node ACTION ...`, called by the batch files of SLURM.

    address HOST               prints an address of this node at which HOST reaches it, with a free port
    head ADDRESS FOLDER        runs the head of a Ray cluster until SIGTERM
    worker ADDRESS FOLDER      runs a node of the cluster at ADDRESS until SIGTERM
    wait ADDRESS NODES TIMEOUT PID ...
                               waits until the cluster has NODES nodes, while the processes PID live

All ports are free ones, and FOLDER (which is created, and removed at the end) belongs to this node of this job, so that
several jobs share a node. The variables NUM_CPUS, NUM_GPUS and OBJECT_STORE_BYTES say what Ray may use.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..tracking.run_state import process_start

_LOG = "ray_start.log"


def address_towards(host: str) -> str:
    """`address:port`: this node's address on the way to `host`, and a port of it that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, 9))  # sends nothing
        address = route.getsockname()[0]
    return f"{address}:{_free_port(address)}"


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def run_node(address: str, folder: Path, *, head: bool) -> int:
    """Runs Ray in the foreground; returns 0 after SIGTERM, and 1 with the end of its log if it ends otherwise."""
    folder.mkdir(mode=0o700)  # a folder that another user has put there is refused
    asked: list[int] = []
    try:
        with (folder / _LOG).open("wb") as log:
            command = _start_command(address, folder, head=head)
            ray = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

        def end(number: int, _: object) -> None:
            asked.append(number)
            ray.terminate()

        signal.signal(signal.SIGTERM, end)
        code = ray.wait()
        if asked:
            return 0
        said = (folder / _LOG).read_text(errors="replace")[-3000:]
        print(f"error: Ray ended on {socket.gethostname()} with exit code {code}:\n{said}", file=sys.stderr, flush=True)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_command(address: str, folder: Path, *, head: bool) -> list[str]:
    host, _, port = address.rpartition(":")
    own = host if head else address_towards(host).rpartition(":")[0]
    of_head = (f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={_free_port(own)}")
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(("--head", *of_head) if head else (f"--address={address}",)),
        f"--node-ip-address={own}",
        f"--temp-dir={folder}",
        f"--num-cpus={os.environ['NUM_CPUS']}",
        f"--num-gpus={os.environ['NUM_GPUS']}",
        f"--object-store-memory={os.environ['OBJECT_STORE_BYTES']}",
        # 0: free ports, where Ray's own would be the same for all jobs
        *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
    ]


def wait_for_nodes(address: str, num_nodes: int, timeout_s: float, pids: Sequence[int]) -> str:
    """Waits until the cluster at `address` has `num_nodes` nodes; returns why it has not, or an empty text.

    Args:
        pids: the processes that start the nodes.
    """
    deadline = time.monotonic() + timeout_s
    alive: list[str] = []
    while time.monotonic() < deadline:
        if dead := [pid for pid in pids if not process_start(pid)]:
            return f"a process that starts nodes has ended (pid {dead[0]})"
        alive = _nodes(address)
        if len(alive) >= num_nodes:
            print(f"Ray at {address}: {', '.join(alive)}", flush=True)
            return ""
        time.sleep(0.5)
    return f"{len(alive)} of {num_nodes} nodes have joined within {timeout_s:.0f} s: {', '.join(alive) or 'none'}"


def _nodes(address: str) -> list[str]:
    """Addresses of the cluster's nodes; none before its head runs."""
    import ray

    host, _, port = address.rpartition(":")
    try:
        if not ray.is_initialized():
            socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError):  # it is still starting
        return []
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def main(arguments: Sequence[str]) -> int:
    """Runs an action; returns its exit code."""
    match list(arguments):
        case ["address", host]:
            print(address_towards(host))
        case ["head", address, folder]:
            return run_node(address, Path(folder), head=True)
        case ["worker", address, folder]:  # SLURM numbers the tasks; nodes of a simulated cluster share a disk
            return run_node(address, Path(folder + os.environ.get("SLURM_PROCID", "")), head=False)
        case ["wait", address, num_nodes, timeout_s, *pids]:
            if why := wait_for_nodes(address, int(num_nodes), float(timeout_s), [int(pid) for pid in pids]):
                print(f"error: the Ray cluster of this job is not complete: {why}", file=sys.stderr, flush=True)
                return 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
