"""`torchtitan preflight`: healthy ranks pass, and each planted fault is found and placed."""

import json
import os
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import launched
from tests.launched import OURS
from tests.ranks import free_port, run_ranks
from tests.test_elastic import started
from tests.test_launch import RECIPE, ROOT, environment
from torchtitan.checks import load_job
from torchtitan.cluster import measurements, preflight
from torchtitan.cluster.preflight import RankReport, judge
from torchtitan.device import pick
from torchtitan.tools.cli import main

LOOSE = 0.001
"""Least rate at which a rank that is slow only by chance is not a fault."""


def a_second(act, device):
    """In the place of the time that something takes, which is not for a test to judge."""
    act()
    return 1.0


def checked(world, folder, plant=lambda patch: None, at=1, problem=""):
    """The verdict on some ranks, at one of which something is planted; all have the same."""
    words = [f"--job.dump_folder={folder}", f"--training.global_batch_size={world}"]
    words += ["--training.local_batch_size=1"]
    job = load_job(ROOT / RECIPE, words, world, "cpu").config

    def rank():
        device = pick()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measurements, "SECONDS", {"cpu": 0.01})
            patch.setattr(measurements, "_seconds", a_second)
            for name in ("COPIED", "SENT", "WRITTEN"):
                patch.setattr(measurements, name, {"cpu": 2**16})
            patch.setattr(measurements, "SEEN_SECONDS", 0.3)
            is_there = int(os.environ["RANK"]) == at
            if is_there:
                plant(patch)
            return preflight.check_rank(job, device, problem if is_there else "")

    first, *others = run_ranks(rank, world)
    assert all(other == first for other in others)
    return first


def found(verdict):
    return [(fault.what, fault.ranks) for fault in verdict.faults]


def test_healthy_ranks_pass_and_leave_nothing(tmp_path):
    verdict = checked(3, tmp_path / "run")
    assert verdict.faults == []
    assert verdict.status == 0
    assert verdict.ranks == 3
    lowest = {name: rate["lowest"] for name, rate in verdict.rates.items()}
    assert lowest.pop("free memory") > 0
    rates = {"products": 2 * 512 * (512 / 1e6) ** 2, "writing": 2**16 / 1e6, "reading": 2**16 / 1e6}
    for name, times in {"memory": 2, "pairs inside a node": 1, "sum": 4 / 3}.items():
        rates[name] = times * 2**16 / 1e9
    assert lowest == pytest.approx(rates)
    assert not (tmp_path / "run").exists()


def test_one_rank_has_none_to_compare_with(tmp_path):
    verdict = checked(1, tmp_path)
    assert verdict.status == 0
    assert "  one rank: there is none to compare it with" in verdict.lines()


def slowed(name):
    """Make what a function of `torch` or `torch.distributed` does take 2.5 times as long."""

    def plant(patch):
        owner, calls = (torch if hasattr(torch, name) else measurements.dist), [0]
        function = getattr(owner, name)

        def counted(*words, **more):
            calls[0] += 1
            return function(*words, **more)

        def seconds(act, device):
            before = calls[0]
            act()
            return 1.0 + (calls[0] > before) * 1.5

        patch.setattr(owner, name, counted)
        patch.setattr(measurements, "_seconds", seconds)

    return plant


def wrong_products(patch):
    multiply = torch.mm

    def wrong(a, b, *, out):
        multiply(a, b, out=out)
        out[7, 9] += 1.0

    patch.setattr(torch, "mm", wrong)


def other_torch(patch):
    version = preflight.version
    patch.setattr(preflight, "version", lambda name: "2.0" if name == "torch" else version(name))


def other_code(patch):
    patch.setattr(preflight, "code", lambda: "0123")


def other_variable(patch):
    patch.setenv("NCCL_ALGO", "Ring")


def slow_clock(patch):
    now = time.time
    patch.setattr(measurements.time, "time", lambda: now() - 60)


def wrong_messages(patch):
    full = torch.full
    patch.setattr(torch, "full", lambda shape, value, **more: full(shape, value + 8, **more))


@pytest.mark.parametrize(
    ("plant", "what", "message"),
    [
        (slowed("mm"), "products", "of the median; wanted"),
        (wrong_products, "broken", "the product of two matrices is wrong"),
        (other_torch, "torch", "torch is 2.0; that of most ranks is 2."),
        (other_code, "torchtitan", "code 0123; that of most ranks is"),
        (other_variable, "NCCL_ALGO", "NCCL_ALGO is Ring; that of most ranks is none"),
        (slow_clock, "clock", "s behind the others"),
    ],
)
def test_planted_fault_is_found_on_its_rank(plant, what, message, tmp_path):
    verdict = checked(3, tmp_path, plant)
    assert found(verdict) == [(what, (1,))]
    (fault,) = verdict.faults
    assert fault.message.startswith("rank 1 (")
    assert message in fault.message
    assert verdict.status == 1


def test_slow_link_is_not_held_against_partners(tmp_path):
    verdict = checked(4, tmp_path, slowed("batch_isend_irecv"), at=3)
    assert found(verdict) == [("pairs inside a node", (3,))]


def test_message_that_does_not_arrive_whole_is_found_by_its_partners(tmp_path):
    verdict = checked(2, tmp_path, wrong_messages)
    (fault,) = verdict.faults
    assert fault.message.endswith("what rank 1 sent is not what arrived")
    assert fault.ranks == (0,)


def test_folder_that_is_not_shared(tmp_path):
    def plant(patch):
        patch.setattr(preflight, "local_path", lambda name: tmp_path / "another")

    verdict = checked(2, tmp_path / "run", plant)
    assert found(verdict) == []  # the second process of a node has nothing to see

    def of_another_node(patch):
        plant(patch)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("GROUP_RANK", "1")

    verdict = checked(2, tmp_path / "run", of_another_node)
    (fault,) = verdict.faults
    assert fault.message.startswith("rank 1 (")
    assert "is not the folder that rank 0 sees; use one that all share" in fault.message
    assert verdict.nodes == 2
    assert [*tmp_path.iterdir()] == []


def test_locks_and_renames_that_other_nodes_do_not_see(tmp_path):
    def without_locks(patch):
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(measurements.fcntl, "flock", lambda file, how: None)

    (fault,) = checked(2, tmp_path / "run", without_locks).faults
    assert "a lock of rank 0" in fault.message

    def with_old_names(patch):
        patch.setenv("LOCAL_RANK", "0")
        exists = Path.exists
        patch.setattr(Path, "exists", lambda path: path.name == "made" or exists(path))

    (fault,) = checked(2, tmp_path / "run", with_old_names).faults
    assert "has its old name here" in fault.message


def test_mistake_that_one_node_finds_is_a_fault_of_that_node(tmp_path):
    verdict = checked(2, tmp_path, problem="data.dataset_path: there is no such folder")
    (fault,) = verdict.faults
    assert (fault.what, fault.ranks, verdict.status) == ("recipe", (1,), 1)
    assert fault.message.endswith(": data.dataset_path: there is no such folder")


def test_recipe_that_no_rank_accepts_ends_with_2():
    reports = [RankReport(rank, 0, "a", "cpu:0", problem="model.flavor: no") for rank in range(4)]
    verdict = judge(reports, 1.0)
    assert verdict.status == 2
    assert [fault.ranks for fault in verdict.faults] == [(0, 1, 2, 3)]
    reports[0].problem = ""
    assert judge(reports, 1.0).status == 1


def test_rates_are_compared_with_the_median():
    rates = [100.0, 101.0, 99.0, 79.0]
    reports = [
        RankReport(n, 0, "a", f"cuda:{n}", rates={"products": r}) for n, r in enumerate(rates)
    ]
    (fault,) = judge(reports, 1.0).faults
    assert fault.message == (
        "rank 3 (a, cuda:3): products 79 TFLOP/s, 0.79 of the median; wanted 79.6 or more"
    )
    assert judge(reports, 1.0, least=0.5).faults == []
    of_links = [RankReport(n, 0, "a", "cuda", rates={"sum": rate}) for n, rate in enumerate(rates)]
    assert judge(of_links, 1.0).faults == []


def command(folder, *flags):
    words = [*OURS, "preflight", RECIPE]
    return [*words, f"--least-rate={LOOSE}", f"--job.dump_folder={folder}", *flags]


@pytest.mark.gate
def test_command_prints_what_it_found(tmp_path):
    words = command(tmp_path / "run", "--json", "--processes=2")
    done = launched.start(words, environment(), tmp_path / "out", tmp_path / "log")
    assert done.wait() == 0, (tmp_path / "log").read_text()
    verdict = json.loads((tmp_path / "out").read_text())
    assert (verdict["ranks"], verdict["faults"]) == (2, [])
    assert verdict["rates"]["products"]["median"] > 0


def test_wrong_recipe_is_refused_at_once(capsys):
    assert main(["preflight", RECIPE, "--training.stps=2"]) == 2
    assert "did you mean training.steps?" in capsys.readouterr().err
    assert main(["preflight", RECIPE, "--least-rate=2"]) == 2
    assert "--least-rate: got 2\n  wanted a number > 0 and <= 1" in capsys.readouterr().err


def two_nodes():
    """Variables of both nodes of a job, with a port of its own."""
    nodes = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    return nodes | {"PET_MASTER_PORT": str(free_port())}


@pytest.mark.gate
def test_node_without_the_shared_folder_ends_the_job_on_both(tmp_path):
    if os.getuid():
        pytest.skip("needs root")
    (tmp_path / "run").mkdir()
    apart = partial(launched.mount, "-t", "tmpfs", "none", tmp_path / "run")
    words, variables = command(tmp_path / "run"), two_nodes()
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                started(words, tmp_path / f"log{rank}", each, **variables, PET_NODE_RANK=str(rank))
            )
            for rank, each in enumerate((lambda: None, apart))
        ]
        statuses = [each.wait(timeout=100) for each in both]
    logs = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert statuses == [1, 1], logs
    for log in logs:
        assert "fault: rank 1 (" in log
        assert "use one that all share" in log
        assert "\n1 fault\n" in log


def wait_for_rendezvous(port):
    """Until the first node answers."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)


@pytest.mark.gate
@pytest.mark.parametrize("first", ["preflight", "train"])
def test_node_that_comes_back_is_not_checked_without_the_others(first, tmp_path):
    """The others train or wait for it; the command of each node is the preflight, then the run."""
    folder, variables = tmp_path / "run", two_nodes()
    words = {"preflight": command(folder)}
    words["train"] = [*words["preflight"][:3], "train", RECIPE, f"--job.dump_folder={folder}"]
    order = [first, *({"preflight", "train"} - {first})]
    with ExitStack() as stack:
        nodes = {}
        for rank, verb in enumerate(order):
            log = tmp_path / verb
            nodes[verb] = stack.enter_context(
                started(words[verb], log, **variables, PET_NODE_RANK=str(rank))
            )
            wait_for_rendezvous(int(variables["PET_MASTER_PORT"]))
        assert nodes["preflight"].wait(timeout=100) == 0
        assert nodes["train"].poll() is None
    log_of_it = (tmp_path / "preflight").read_text()
    assert "the run has begun on other nodes, so this one is not checked" in log_of_it
