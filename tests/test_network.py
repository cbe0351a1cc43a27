"""Two nodes whose network is cut, lossy or slow: the run heals, and its losses are the same."""

import time
from contextlib import ExitStack

import pytest

from tests.network import network
from tests.runs import losses
from tests.test_elastic import command, kill, notes, started, undisturbed

pytestmark = pytest.mark.slow

# Far apart, so that a cut between two of them interrupts steps.
SAVES = "--checkpoint.interval=10"
TIMEOUTS = ["--comm.train_timeout_seconds=5", "--comm.init_timeout_seconds=30"]
PORT = 29400


class Trial:
    """A run on two nodes, of which node 0 has the address of the rendezvous."""

    def __init__(self, net, folder, stack):
        self.net, self.folder, self.stack = net, folder, stack
        self.nodes = {}
        self.options = {"nnodes": "2", "rejoin_minutes": "15"}
        self.options["rdzv_endpoint"] = f"{net.addresses[0]}:{PORT}"
        self.fault, self.steps = "slow 0 0", 60

    @property
    def run(self):
        return self.folder / "run"

    def start(self, node):
        steps = f"--training.steps={self.steps}"
        words = command(self.run, steps, SAVES, *TIMEOUTS, processes="1", **self.options)
        process = started(self.net.on(node, words), self.log_file(node), FAULT=self.fault)
        self.nodes[node] = self.stack.enter_context(process)

    def log_file(self, node):
        return self.folder / f"{node}.log"

    def log(self, node):
        return self.log_file(node).read_text()

    def wait_for(self, what):
        while not what():
            for number, node in self.nodes.items():
                assert node.poll() is None, self.log(number)
            time.sleep(0.02)

    def wait_for_steps(self, steps, ranks=2):
        """Until so many ranks have done so many more."""
        last = max((note["step"] for note in notes(self.run)), default=0)
        enough = [True] * ranks
        self.wait_for(lambda: [note["step"] > last + steps for note in notes(self.run)] == enough)

    def finish(self):
        (self.run / "hurry").touch()
        for number, node in self.nodes.items():
            assert node.wait(timeout=600) == 0, self.log(number)
        steps = f"--training.steps={self.steps}"
        found, expected = losses(self.run), undisturbed(self.folder / "whole", steps)
        assert list(found) == list(range(1, self.steps + 1))
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def trial(tmp_path):
    with ExitStack() as stack:
        yield Trial(stack.enter_context(network()), tmp_path, stack)


def cut_wire(trial, is_cut):
    trial.net.wire.is_cut = is_cut


def cut_node(node):
    return lambda trial, is_cut: trial.net.set_up(node, not is_cut)


CUTS = {
    "packets are dropped": cut_wire,
    "the interface of the rendezvous' node is down": cut_node(0),
    "the interface of the other node is down": cut_node(1),
}


def start_both(trial, steps):
    trial.start(0)
    trial.start(1)
    trial.wait_for_steps(steps)


def healed(trial, ranks=2):
    trial.wait_for_steps(1, ranks)
    trial.finish()


@pytest.mark.parametrize("seconds", [10, 90, 600])
@pytest.mark.parametrize("how", CUTS)
def test_cut_while_training(how, seconds, trial):
    start_both(trial, 12)
    CUTS[how](trial, True)
    time.sleep(seconds)
    CUTS[how](trial, False)
    healed(trial)
    assert "likely cause: the network between these ranks failed" in trial.log(0)


@pytest.mark.parametrize("seconds", [10, 90, 600])
def test_cut_while_nodes_meet(seconds, trial):
    trial.start(0)
    cut_wire(trial, True)
    trial.start(1)
    trial.wait_for(lambda: "cannot be reached" in trial.log(1))
    time.sleep(seconds)
    cut_wire(trial, False)
    healed(trial)


@pytest.mark.parametrize("seconds", [10, 90, 600])
def test_cut_while_a_checkpoint_is_written(seconds, trial):
    trial.fault = "save 0 0"
    trial.start(0)
    trial.start(1)
    trial.wait_for(lambda: list(trial.run.glob("checkpoint/step-*.saving/rank-0.safetensors")))
    cut_wire(trial, True)
    time.sleep(seconds)
    cut_wire(trial, False)
    healed(trial)


def start_on_one_or_two(trial):
    trial.options |= {"nnodes": "1:2"}
    start_both(trial, 12)
    cut_wire(trial, True)


def test_run_goes_on_with_one_node_until_the_other_is_back(trial):
    trial.steps = 90
    start_on_one_or_two(trial)
    trial.wait_for_steps(10, ranks=1)
    cut_wire(trial, False)
    healed(trial)
    assert "another node joined" in trial.log(0)


def test_run_ends_while_a_node_is_away(trial):
    start_on_one_or_two(trial)
    assert trial.nodes[0].wait(timeout=300) == 0, trial.log(0)
    cut_wire(trial, False)
    trial.finish()
    assert "the other nodes finished the run" in trial.log(1)


def test_node_of_the_rendezvous_is_started_again(trial):
    start_both(trial, 12)
    kill(trial.nodes[0])
    trial.start(0)
    healed(trial)


def test_address_of_the_rendezvous_moves_to_the_other_node(trial):
    moving = "10.97.0.9"
    trial.options["rdzv_endpoint"] = f"{moving}:{PORT}"
    trial.net.address(0, "add", moving)
    start_both(trial, 12)
    kill(trial.nodes[0])
    trial.net.address(0, "del", moving)
    trial.net.address(1, "add", moving)
    trial.start(0)
    healed(trial)


def test_loss_and_delay_change_nothing_but_time(trial):
    trial.net.wire.loss, trial.net.wire.delay = 0.02, 0.02
    start_both(trial, 3)
    healed(trial)
    assert trial.net.wire.dropped > 10
    assert "restart 1 of" not in trial.log(0)
