"""Runs the launcher on each node of a Ray cluster, and starts it again after a failure.

    ray job submit --working-dir . -- python scripts/ray_job.py --nodes 2 --devices-per-node 8 \\
        train_configs/llama3_8b.toml --job.dump_folder /shared/run

Ray places one actor on each node, whose launcher finds the others by PET_* variables. The folder of
the run must be one that all nodes share: the same command resumes from its newest checkpoint.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Exit statuses, see torchtitan/resilience/exit_codes.py.
ENDS = (2, 3)
"""A wrong recipe, and a run that diverged: they would come again."""
REQUEUE = 75
"""Stopped and saved."""
LOST = 1
"""What a node that was lost counts as."""
GRACE = 120.0
"""Seconds in which the other nodes should have saved."""
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@ray.remote(max_concurrency=2)  # `stop` is called while `train` runs
class Node:
    """The launcher of one node."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def endpoint(self) -> tuple[str, int]:
        """Return the address of this node, and a port of it that is free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(self, words: list[str], variables: dict[str, str]) -> int:
        """Run the launcher; return its exit status."""
        command = [sys.executable, "-m", "torchtitan", "train", *words]
        self.process = subprocess.Popen(command, env=os.environ | variables, preexec_fn=end_with_us)
        return self.process.wait()

    def stop(self) -> None:
        """Ask the launcher to save and exit."""
        if self.process is not None:
            self.process.terminate()


def end_with_us() -> None:
    """Let the launcher end with its actor; the ranks then save and exit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def attempt(group: PlacementGroup, options: argparse.Namespace) -> int:
    """Train on all nodes until each has ended; return the status that decides what follows."""
    devices = {"num_cpus": 0, "num_gpus": 0} | {f"num_{options.device}s": options.devices_per_node}
    nodes = [
        Node.options(
            **devices,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote()
        for rank in range(options.nodes)
    ]
    try:
        return train_on(nodes, options)
    except RayActorError:  # one was lost before it trained
        return LOST
    finally:
        for node in nodes:
            ray.kill(node)


def train_on(nodes: list[Any], options: argparse.Namespace) -> int:
    host, port = ray.get(nodes[0].endpoint.remote())
    variables = {
        "PET_NNODES": str(options.nodes),
        "PET_NPROC_PER_NODE": str(options.devices_per_node),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": str(port),
    }
    running = [
        node.train.remote(options.words, variables | {"PET_NODE_RANK": str(rank)})
        for rank, node in enumerate(nodes)
    ]
    statuses: list[int] = []
    while running and not any(statuses):
        [ended], running = ray.wait(running)
        statuses.append(status_of(ended))
    if running:  # without this one they cannot continue
        for node in nodes:
            node.stop.remote()
        ended, running = ray.wait(running, num_returns=len(running), timeout=GRACE)
        statuses += map(status_of, ended)
    return min(
        statuses, key=lambda status: (status not in ENDS, status in (0, REQUEUE), not status)
    )


def status_of(run: ray.ObjectRef) -> int:
    """Return the exit status of a launcher that has ended."""
    try:
        return ray.get(run)
    except RayActorError as error:
        print(f"ray_job: a node was lost: {error}", file=sys.stderr, flush=True)
        return LOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--max-failures", type=int, default=10, help="after which the job ends")
    options, options.words = parser.parse_known_args()  # a recipe and its flags

    ray.init()
    bundle = {options.device.upper(): options.devices_per_node}
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    failures = 0
    while True:
        status = attempt(group, options)
        failures += status not in (0, REQUEUE)
        if status in (0, *ENDS) or failures > options.max_failures:
            return status
        message = f"ray_job: ended with status {status}; starting again ({failures} failures)"
        print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
