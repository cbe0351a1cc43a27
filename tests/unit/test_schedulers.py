"""Nodes of a job from the variables that schedulers set, as they set them."""

from functools import partial

import pytest

from tests.network import network
from tests.ranks import free_port
from tests.runs import losses
from tests.tables import data, table
from tests.test_launch import ROOT, TINY, TRAIN, finish, start
from torchtitan.cluster.schedulers import fill, local_address
from torchtitan.config import ConfigError

KUBEFLOW, SKYPILOT, SLURM, STEP = data(__file__).values()
SCHEDULERS = {"KUBEFLOW": KUBEFLOW, "SLURM": SLURM}


def filled(environment, **given):
    return fill(given, environment, lambda: 6)


@pytest.mark.parametrize(
    ("environment", "given", "wanted"),
    [
        (KUBEFLOW, {}, (2, 8, "job-node-0-0.job:29500", "is_host=false")),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, {}, (2, 6, "job-node-0-0.job:29500", None)),
        (KUBEFLOW | {"PET_RDZV_ENDPOINT": "a:7"}, {}, (2, 8, "a:7", None)),
        (KUBEFLOW, {"processes": 1, "nnodes": range(1, 3)}, (1, 1, "job-node-0-0.job:29500", None)),
        (KUBEFLOW, {"rdzv_endpoint": "b:1"}, (2, 8, "b:1", "")),
        (
            KUBEFLOW | {"SKYPILOT_NUM_NODES": "3"},
            {"nnodes": range(5, 6)},
            (5, 8, "job-node-0-0.job:29500", "is_host=false"),
        ),
        (SKYPILOT, {}, (4, 8, "10.0.0.3:29500", "is_host=true")),
        (SLURM, {}, (3, 4, "gpu07.cluster:21234", "is_host=false")),
        (SLURM | {"SLURM_GPUS_PER_TASK": "a100:2"}, {}, (3, 2, "gpu07.cluster:21234", None)),
        (SLURM | {"SLURM_GPUS_ON_NODE": ""}, {}, (3, 6, "gpu07.cluster:21234", None)),
        (SLURM | STEP, {}, (2, 4, "gpu08.cluster:21234", "is_host=false")),
        (STEP, {}, (2, 6, "gpu08.cluster:29500", "is_host=false")),
        ({"TORCHX_RANK0_HOST": "r0"}, {"nnodes": range(2, 3)}, (2, 6, "r0:29500", None)),
        ({"VC_TRAIN_0_HOSTS": "v0,v1"}, {"nnodes": range(2, 3)}, (2, 6, "v0:29500", None)),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}, {}, None),
        ({"TORCHX_RANK0_HOST": "localhost"}, {}, None),
        (KUBEFLOW | {"RANK": "3", "WORLD_SIZE": "8"}, {}, None),  # started by torchrun
        ({}, {}, None),
    ],
)
def test_a_scheduler_is_read(environment, given, wanted):
    options, origins = filled(environment, **given)
    if wanted is None:
        assert "processes" not in options
        assert origins == ""
        return
    least, processes, endpoint, host = wanted
    assert options["nnodes"][0] == least
    assert options["processes"] == processes
    assert options["rdzv_endpoint"] == endpoint
    assert host is None or options.get("rdzv_conf", "") == host
    assert options.get("rdzv_id") == environment.get("SLURM_JOB_ID")


def test_it_is_told_what_was_taken_from_where():
    assert filled(KUBEFLOW)[1] == (
        "nodes: 2 (PET_NNODES); processes: 8 (PET_NPROC_PER_NODE); "
        "rendezvous: job-node-0-0.job:29500 (PET_MASTER_ADDR)"
    )


@pytest.mark.parametrize(("words", "told"), table(__file__, "bad_schedulers.txt"))
def test_what_cannot_be_is_refused(words, told):
    environment = {}
    for word in words.split():
        name, _, value = word.partition("=")
        environment |= {name: value} if value else SCHEDULERS[name]
    with pytest.raises(ConfigError) as error:
        filled(environment)
    assert str(error.value) == told


def test_a_command_is_refused_before_it_starts(monkeypatch, says):
    for name, value in (KUBEFLOW | {"SKYPILOT_NUM_NODES": "3"}).items():
        monkeypatch.setenv(name, value)
    printed = says("train", ROOT / "train_configs/debug_model.toml", status=2)
    assert "SKYPILOT_NUM_NODES: got 3, but PET_NNODES is 2" in printed
    assert "Traceback" not in printed


def test_the_address_for_the_others_is_that_of_the_route():
    assert local_address("127.0.0.1", 1) == "127.0.0.1"
    assert local_address("localhost", 1) in ("127.0.0.1", "::1")
    assert local_address("no-such-host.invalid", 1) is None


def variables_of(rank, nodes, address, port):
    """The environment of a node with one rank, as Kubeflow sets it."""
    own = {"NNODES": nodes, "NPROC_PER_NODE": 1, "NODE_RANK": rank}
    own |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    return {f"PET_{name}": str(value) for name, value in own.items()}


@pytest.mark.gate
def test_nodes_whose_names_do_not_resolve_meet(tmp_path):
    flags = ["--rdzv-conf", "last_call_timeout=1", "--training.steps", "2"]
    with network(named=False) as net:
        nodes = []
        for rank in (1, 0):
            variables = variables_of(rank, 2, net.addresses[0], 29500)
            enter = partial(net.enter, rank)
            nodes.append(start([*TRAIN, *TINY], tmp_path, *flags, before=enter, **variables))
        for node in nodes:
            finish(node)
    assert list(losses(tmp_path)) == [1, 2]


@pytest.mark.gate
def test_two_nodes_of_kubeflow_meet_without_flags(tmp_path):
    """Two launchers on this machine as two nodes; the same command again resumes on one."""
    port = free_port()
    flags = ["--checkpoint.interval", "2", "--rdzv-conf", "last_call_timeout=1"]
    flags += [*TINY, "--training.global_batch_size", "4"]

    def node(rank, nodes, steps):
        variables = variables_of(rank, nodes, "127.0.0.1", port)
        return start(TRAIN, tmp_path, *flags, "--training.steps", str(steps), **variables)

    first, second = node(0, 2, 2), node(1, 2, 2)
    assert "nodes: 2 (PET_NNODES)" in finish(first)
    assert "only used for static" not in finish(second)
    assert "step-2" in finish(node(0, 1, 4))
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
