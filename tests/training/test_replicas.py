"""Replica groups, as far as it can be told without torchft: a stand-in says what they agree on."""

import io
import json
import os
import pickle
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import losses, rows, train, weights, world_of
from tests.training.test_optimizers import in_memory
from torchtitan.build import Observer, build
from torchtitan.config import ConfigError
from torchtitan.resilience.replica_groups import FaultToleranceConfig, ReplicaGroup
from torchtitan.tools.verify.measure import RowSink
from torchtitan.torch_private.distributed import read_stream
from torchtitan.trainer import Trainer


def nobody(tensor, how):
    """No other group takes part."""


class Manager:
    """Stands in for torchft's; it agrees to the steps that it is told to."""

    def __init__(self, agrees, peer=nobody, groups=1):
        self.agrees, self.peer, self.groups = iter(agrees), peer, groups
        self.step, self.error = 0, None

    def load_state_dict(self, state):
        self.step = state["step"]

    def start_quorum(self):
        self.error = None

    def num_participants(self):
        return self.groups

    def allreduce(self, tensor, reduce_op):
        if self.error is None:
            self.peer(tensor, reduce_op)
        return SimpleNamespace(wait=lambda: None)

    def report_error(self, error):
        self.error = SimpleNamespace(original_exception=error)

    def errored(self):
        return self.error

    def should_commit(self):
        agrees = self.error is None and next(self.agrees)
        self.step += agrees
        return agrees

    def current_step(self):
        return self.step

    def shutdown(self, wait): ...


def job(folder, groups=1, **sections):
    ours = {"enable": groups > 0, "group_size": groups, "replica_id": max(groups - 1, 0)}
    return tiny.job(folder, fault_tolerance=ours, **sections)


def test_a_step_that_is_dropped_is_done_again(tmp_path, monkeypatch):
    agrees = [False, True, True, False, False, True]
    monkeypatch.setattr(ReplicaGroup, "_manager", lambda self: Manager(agrees))
    checkpoint = {"enable": True, "interval": 2}
    validation = {"enable": True, "freq": 2, "steps": 1}
    sections = {"checkpoint": checkpoint, "validation": validation, "data": {"num_workers": 2}}
    sections["spikes"] = {"sigma": 99.0}
    (found,) = run_ranks(train, 1, job(tmp_path / "dropped", **sections))
    (expected,) = run_ranks(train, 1, job(tmp_path / "plain", groups=0, **sections))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert losses(tmp_path / "dropped") == losses(tmp_path / "plain")
    for key in ("tokens", "validation_loss"):
        dropped, plain = (
            [row[key] for row in rows(tmp_path / name) if key in row]
            for name in ("dropped", "plain")
        )
        assert dropped == plain
    state = "checkpoint/step-3/train_state.json"
    counted = [json.loads((tmp_path / n / state).read_text()) for n in ("dropped", "plain")]
    assert counted[0]["train_state"] == counted[1]["train_state"]
    assert [row["groups"] for row in rows(tmp_path / "dropped") if "groups" in row] == [1]


def test_a_group_reads_its_share_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ReplicaGroup, "_manager", lambda self: Manager([True] * 3))
    run_ranks(train, 1, job(tmp_path, groups=2))
    last = [row for row in rows(tmp_path) if "loss" in row][-1]
    assert last["tokens"] == 3 * 8 * 32 // 2


def group(manager, **settings):
    """A group that has met others, on one rank without a model."""
    world = SimpleNamespace(
        rank=0,
        size=1,
        comm=SimpleNamespace(train_timeout_seconds=100, init_timeout_seconds=300),
        max=lambda values: values,
    )
    data = SimpleNamespace(
        state_dict=dict,
        load_peer_state=lambda state: None,
        positions=lambda: torch.ones(2, 3, dtype=torch.int64),
        update_positions=lambda standing: None,
    )
    made = ReplicaGroup(
        FaultToleranceConfig(**{"enable": True, "group_size": 2} | settings),
        world,
        data,
        SimpleNamespace(get=dict, put=lambda state: None, history=lambda: {"step": 3}),
        recipe={"[model]": 1, "[data]": 2},
    )
    made.manager = manager
    made.start_quorum(3)
    return made


def other_digest(place):
    """A group whose digest of one thing is smaller."""

    def peer(tensor, how):
        if how == dist.ReduceOp.MAX and len(tensor) == 6:
            tensor[3 + place] += 1

    return peer


def same_number(tensor, how):
    """A group that says it is group 0 too."""
    if how == dist.ReduceOp.SUM:
        tensor[1] += 1


UNLIKE = [
    (other_digest(1), ConfigError, r"recipes of the replica groups differ in \[data\]"),
    (
        other_digest(2),
        RuntimeError,
        "replica groups are at the same step but were trained separately",
    ),
    (same_number, ConfigError, "replica_id: got 0: another replica group has the same number"),
]


def test_groups_have_the_same_parts_of_the_same_gradients():
    plain, other = job("unused").shared(), {"sharding": {"accumulate_whole": True}}
    other |= {"communication": {"replicas": {"overlap": False}}, "training": {"dtype": "bfloat16"}}
    for name, section in other.items():
        found = job("unused", **{name: section}).shared()
        assert [key for key in plain if plain[key] != found[key]] == [f"[{name}]"]


@pytest.mark.parametrize(("peer", "kind", "message"), UNLIKE)
def test_a_group_that_does_not_fit_ends_when_it_comes(peer, kind, message):
    with pytest.raises(kind, match=message):
        group(Manager([True], peer, groups=2)).count(torch.tensor(5))


@pytest.mark.parametrize(("peer", "kind", "message"), UNLIKE)
def test_the_groups_that_were_there_go_on_without_it(peer, kind, message):
    manager = Manager([True] * 5)
    there = group(manager)
    assert there.count(torch.tensor(5)) == 5
    assert there.should_commit()
    manager.peer = peer
    there.start_quorum(4)
    there.count(torch.tensor(5))
    assert not there.should_commit()
    manager.peer = nobody
    there.start_quorum(4)
    there.count(torch.tensor(5))
    assert there.should_commit()


def test_too_few_groups_wait_but_one_that_cannot_join_gives_up():
    waiting = group(Manager([False] * 9, groups=1), min_replica_size=2)
    assert not any(waiting.should_commit() for _ in range(9))
    failing = group(Manager([False] * 9, groups=2), min_replica_size=2)
    assert not failing.should_commit()
    assert not failing.should_commit()
    with pytest.raises(RuntimeError, match="no step with the other replica groups was committed"):
        failing.should_commit()


def test_a_group_whose_ranks_are_at_different_steps_ends():
    torn = group(Manager([False]))
    torn.world.max = lambda values: values + 1
    with pytest.raises(RuntimeError, match="not all ranks of this replica group could fetch"):
        torn.should_commit()


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.abort, ()


def test_a_state_that_is_fetched_cannot_run_code():
    from torch.distributed._serialization import _streaming_save

    plain = {"user": {"default": {"tensors": {"a": torch.arange(5)}, "data": {"lanes": [1, None]}}}}
    stream = io.BytesIO()
    _streaming_save(plain, stream)
    stream.seek(0)
    read = read_stream(stream)["user"]["default"]
    assert torch.equal(read["tensors"]["a"], torch.arange(5))
    assert read["data"] == {"lanes": [1, None]}

    stream = io.BytesIO()
    _streaming_save({"user": Evil()}, stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="abort"):
        read_stream(stream)


def taken_over(folder):
    """Losses of a run, and of another that took over its state after three steps."""
    found = {}
    made = job(folder, groups=0, training={"steps": 6})
    with world_of(made) as world:
        recorders = [RowSink() for _ in range(2)]
        runs = [build(made, world, Observer(sinks=[recorder])) for recorder in recorders]
        state = {}
        for run, recorder, name in zip(runs, recorders, ("first", "second"), strict=True):
            live = in_memory(run)
            trainer = Trainer(run)
            with closing(run.batches), run.meter:
                if name == "second":
                    live.put(state)
                    assert run.state.step == 3
                for _ in range(6 - run.state.step):
                    trainer.step()
                    if run.state.step == 3:
                        state = copied(live.get())
            found[name] = [row["loss"] for row in recorder.rows if "loss" in row]
        first, second = map(weights, runs)
        assert all(torch.equal(first[name], weight) for name, weight in second.items())
    return found


def copied(value):
    """As it would arrive."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def test_a_state_is_taken_over_from_memory(tmp_path):
    (found,) = run_ranks(taken_over, 1, tmp_path)
    assert found["second"] == found["first"][3:]


def put_into(folder, flavor):
    made = [job(folder, groups=0), job(folder, groups=0, model={"flavor": flavor})]
    with world_of(made[0]) as world:
        first, second = (build(one, world) for one in made)
        try:
            in_memory(second).put(in_memory(first).get())
        except ConfigError as error:
            return str(error)
    return ""


def test_a_state_of_another_model_is_refused(tmp_path):
    (message,) = run_ranks(put_into, 1, tmp_path, "wide")
    assert message.startswith("another replica group's model.")
    assert "this one's" in message
