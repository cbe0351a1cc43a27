"""The example for Ray: two nodes of a cluster on this machine, one of which is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import losses
from tests.test_elastic import FLAGS, undisturbed
from tests.test_launch import RECIPE, ROOT, environment, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray", reason="needs ray: pip install ray")


@pytest.fixture
def cluster(monkeypatch):
    """The address of a cluster of two nodes, with one CPU each."""
    from ray.cluster_utils import Cluster

    # Actors have the environment of their node.
    for name, value in {"FAULT": "slow 0 0", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1, object_store_memory=100_000_000)
        yield nodes.address
    finally:
        nodes.shutdown()


def job(cluster, folder, *flags, log):
    words = [sys.executable, "scripts/ray_job.py", "--nodes=2", "--devices-per-node=1"]
    words += ["--device=cpu", "--max-failures=1", RECIPE, *FLAGS, f"--job.dump_folder={folder}"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*words, *flags],
            cwd=ROOT,
            env=environment(RAY_ADDRESS=cluster),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def launchers(folder):
    """Processes of the launchers of this run, with the actors of Ray that started them."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_text().split("\0")
            parent = (each / "stat").read_text().rpartition(")")[2].split()[1]
            is_actor = Path(f"/proc/{parent}/cmdline").read_text().startswith("ray::Node")
        except OSError:
            continue  # it has ended
        if is_actor and f"--job.dump_folder={folder}" in words:
            found[int(each.name)] = int(parent)
    return found


def test_a_lost_node_and_a_stopped_one_start_again_and_the_run_stays_the_same(cluster, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    steps = "--training.steps=150"
    process = job(cluster, folder, steps, log=log)
    try:
        wait_for_step(folder, 4, process)
        first = launchers(folder)
        assert len(first) == 2
        os.kill(list(first.values())[1], signal.SIGKILL)
        while "starting again" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        wait_for_step(folder, max(losses(folder)) + 4, process)
        second = launchers(folder)
        assert len(second) == 2
        assert not set(second) & set(first)
        os.kill(max(second), signal.SIGTERM)
        while log.read_text().count("starting again") < 2:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        (folder / "hurry").touch()
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
    assert "ended with status 1; starting again (1 failures)" in log.read_text()
    assert "ended with status 75; starting again (1 failures)" in log.read_text()
    assert losses(folder) == pytest.approx(undisturbed(tmp_path / "whole", steps), rel=1e-5)


def test_a_mistake_ends_the_job(cluster, tmp_path):
    log = tmp_path / "log"
    process = job(cluster, tmp_path / "run", "--training.stps=2", log=log)
    assert process.wait(timeout=200) == 2, log.read_text()
    assert "starting again" not in log.read_text()
