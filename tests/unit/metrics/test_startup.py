"""What the second step of a process sends is counted where the Flight Recorder keeps all of it."""

from dataclasses import replace
from types import SimpleNamespace

from torchtitan.device import Device
from torchtitan.flight_recorder import Collective, Group
from torchtitan.flight_recorder.records import _shapes
from torchtitan.metrics import startup
from torchtitan.parallel import CommConfig
from torchtitan.parallel.world import Degrees
from torchtitan.timeline import Timeline

ENTRIES = 4
OF_SUM = {key: _shapes([[5]], ["Float"]) for key in ("inputs", "outputs")}
OF_SUM |= {"operation": "all_reduce", "carried_out": "all_reduce", "is_p2p": False}
OF_SUM |= {"group": Group("0", "all", (0, 1)), "finished": True, "created": 0.0, "caller": ""}
SUM = Collective(number=0, sequence=1, **OF_SUM)


def traffic(monkeypatch, ranks, before, during):
    """The event of a run with collectives before and during its second step."""
    return events(monkeypatch, ranks, before, during)["traffic"]


def events(monkeypatch, ranks, before, during):
    """All events of such a run, by kind."""
    told = {}
    world = SimpleNamespace(
        comm=CommConfig(trace_buf_size=ENTRIES),
        size=ranks,
        device=Device("cpu"),
        degrees=Degrees(dp_shard=ranks),
    )
    log = SimpleNamespace(write=lambda step, kind, **values: told.update({kind: values}))
    watch = startup.Startup(log, Timeline(world.device), world)
    watch.before_step()
    watch.after_step(1)
    watch.before_step()
    times = [watch.began - 1] * before + [watch.began + 1] * during
    ring = [replace(SUM, created=time) for time in times][-ENTRIES:]
    monkeypatch.setattr(startup, "recorded", lambda device_type: ring)
    watch.after_step(2)
    return told


def test_what_an_earlier_run_compiled_is_not_counted(monkeypatch):
    seconds = iter((3.0, 5.0))
    monkeypatch.setattr(startup, "compile_seconds", lambda: next(seconds))
    assert events(monkeypatch, 1, 0, 0)["start"]["compile_s"] == 2.0


def test_a_step_that_fits_is_counted_whatever_came_before(monkeypatch):
    found = traffic(monkeypatch, ranks=2, before=20, during=ENTRIES - 1)
    kind = {"axis": "dp_shard", "operation": "all_reduce", "count": 3, "bytes": 3 * 20}
    assert found == {"sent/dp_shard": 3 * 20, "messages": 0, "collectives": [kind]}


def test_a_step_that_does_not_fit_is_left_out(monkeypatch):
    found = traffic(monkeypatch, ranks=2, before=20, during=ENTRIES)
    assert "comm.trace_buf_size = 4" in found["left_out"]


def test_a_rank_by_itself_sends_nothing(monkeypatch):
    assert traffic(monkeypatch, ranks=1, before=0, during=ENTRIES) == {
        "messages": 0,
        "collectives": [],
    }
