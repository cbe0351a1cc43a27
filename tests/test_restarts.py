"""Restarts by a scheduler: each node runs the same command again, whichever of them was stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests import launched
from tests.ranks import descendants, free_port
from tests.runs import losses
from tests.test_elastic import command, kill, started, undisturbed
from tests.test_launch import wait_for_step
from tests.tiers import tiers
from torchtitan.checkpoint import saved_steps

COUNTS = "PET_NNODES={nodes} PET_NODE_RANK={node} PET_NPROC_PER_NODE=1 "
MASTER = "PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT={port} "
STUBS = {
    "Kubeflow": COUNTS + MASTER,
    "SkyPilot": MASTER  # for a port of its own
    + "SKYPILOT_NUM_NODES={nodes} SKYPILOT_NODE_RANK={node} SKYPILOT_NUM_GPUS_PER_NODE=1 "
    "SKYPILOT_NODE_IPS={addresses}",
    "Slurm": "SLURM_JOB_ID={port} SLURM_STEP_ID=0 SLURM_JOB_NUM_NODES={nodes} SLURM_NODEID={node} "
    "SLURM_GPUS_ON_NODE=1 SLURM_STEP_TASKS_PER_NODE=1(x{nodes}) SLURM_JOB_NODELIST=127.0.0.1",
    "TorchX": COUNTS + MASTER + "TORCHX_RANK0_HOST=127.0.0.1",
}
"""Variables that a scheduler sets for a node of several, with one process each."""


def variables(scheduler, node, nodes, port):
    addresses = "\n".join(["127.0.0.1"] * nodes)
    text = STUBS[scheduler].format(node=node, nodes=nodes, port=port, addresses=addresses)
    return dict(word.split("=") for word in text.strip(" ").split(" "))


def nodes_of(scheduler, nodes, words, folder, stack, fault):
    """Start the same command on each node of a scheduler."""
    port, found = free_port(), []
    for node in range(nodes):
        own = variables(scheduler, node, nodes, port)
        started_one = started(words, folder / f"log{node}", FAULT=fault, **own)
        found.append(stack.enter_context(started_one))
    return found


@pytest.mark.parametrize("scheduler", tiers(STUBS, [], gate=["Kubeflow"]))
def test_same_command_resumes_on_two_nodes_and_on_one(scheduler, tmp_path):
    folder = tmp_path / "run"
    words = command(folder, "--training.steps=8")
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with ExitStack() as stack:
        nodes = nodes_of(scheduler, 2, words, tmp_path, stack, "hold 0 6")
        wait_for_step(folder, 3, nodes[0])
        nodes[1].send_signal(signal.SIGTERM)  # to one node, as an eviction does
        statuses = [node.wait(timeout=100) for node in nodes]
    assert statuses == [75, 75], [log.read_text() for log in logs]
    assert "stopped by another node: start it again to resume (status 75)" in logs[0].read_text()
    assert max(saved_steps(folder / "checkpoint")) < 8

    with ExitStack() as stack:
        (node,) = nodes_of(scheduler, 1, words, tmp_path, stack, "raise 9 9")
        assert node.wait(timeout=100) == 0, logs[0].read_text()
    whole = undisturbed(tmp_path / "whole", "--training.steps=8")
    assert losses(folder) == pytest.approx(whole, rel=1e-5)


@pytest.mark.gate
def test_nodes_resume_from_their_own_disks(tmp_path):
    if os.getuid():
        pytest.skip("needs root")
    folder, shared = tmp_path / "run", tmp_path / "disk"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    shared.mkdir()
    words = command(
        *(folder, "--training.steps=8", "--checkpoint.interval=100"),
        *("--checkpoint.frequent.interval=2", f"--checkpoint.frequent.folder={shared}"),
    )
    port = free_port()

    def nodes(stack, fault):
        """Start both nodes, each of which has another disk at the same path."""
        found = []
        for node in range(2):
            (disk := tmp_path / f"disk{node}").mkdir(exist_ok=True)
            mount = partial(launched.mount, "--bind", disk, shared)
            own = variables("Kubeflow", node, 2, port)
            one = started(words, logs[node], mount, FAULT=fault, **own)
            found.append(stack.enter_context(one))
        return found

    with ExitStack() as stack:
        both = nodes(stack, "hold 0 7")
        wait_for_step(folder, 6, both[0])
        for node in both:
            kill(node)
    with ExitStack() as stack:
        statuses = [node.wait(timeout=300) for node in nodes(stack, "raise 9 9")]
    assert statuses == [0, 0], [log.read_text() for log in logs]
    assert not list(shared.iterdir())
    held = [sorted(tmp_path.glob(f"disk{node}/*/step-*/rank-*")) for node in range(2)]
    assert [{path.name for path in paths} for paths in held] == [
        {f"rank-{node}.safetensors"} for node in range(2)
    ]
    (line,) = (line for line in logs[0].read_text().splitlines() if "resumed from /" in line)
    assert f"resumed from {shared}/run-" in line
    whole = undisturbed(tmp_path / "whole", "--training.steps=8")
    assert losses(folder) == pytest.approx(whole, rel=1e-5)


@pytest.mark.gate
def test_launcher_as_first_process_forwards_signals_and_reaps(tmp_path):
    if os.getuid() or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    folder = tmp_path / "run"
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    words += command(folder, "--training.steps=1000", processes="2")
    with started(words, tmp_path / "log", FAULT="slow 0 0") as outer:
        wait_for_step(folder, 3, outer)
        launcher, *ranks = descendants(outer.pid)
        assert Path(f"/proc/{launcher}/status").read_text().split("NSpid:")[1].split()[1] == "1"
        # Its parent has ended when `run` returns: it is then a child of the first process, which
        # waits for it when it ends too. A process closes its output before it has ended.
        orphan = (
            "import os, time\nparent = os.getpid()\nif not os.fork():\n"
            "    while os.getppid() == parent:\n        time.sleep(0.01)\n    os._exit(0)"
        )
        enter = ["nsenter", "-t", str(launcher), "-p", sys.executable, "-c", orphan]
        subprocess.run(enter, check=True, stdout=subprocess.PIPE)
        until = time.monotonic() + 100
        while (left := {*descendants(launcher)} - {*ranks}) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(launcher, signal.SIGTERM)
        assert outer.wait(timeout=100) == 75, (tmp_path / "log").read_text()
    assert max(saved_steps(folder / "checkpoint")) == max(losses(folder))
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert not left, "a process that has ended stays"
