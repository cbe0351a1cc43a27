"""What is said of a run, whatever it left, and what is advised, only where numbers hold."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plans import no_plan  # noqa: F401  (a fixture)
from tests.unit.explain.folders import log, note, row, steps, write_run
from tests.unit.explain.test_trace import event, step
from torchtitan.checks import load_job
from torchtitan.config import ConfigError
from torchtitan.estimate.hardware import find_hardware
from torchtitan.estimate.plan import plan
from torchtitan.job import JobConfig
from torchtitan.tools import cli
from torchtitan.tools.explain import predicted as predictions
from torchtitan.tools.explain.advice import MEASURING, RULES, Advice, advise
from torchtitan.tools.explain.facts import Facts, Traces, read_facts
from torchtitan.tools.explain.page import page
from torchtitan.tools.explain.predicted import Prediction
from torchtitan.tools.explain.slowest_ranks import Slowest, slowest_by_phase
from torchtitan.tools.history import RunHistory

RECIPE = """
[model]
name = "llama3"
flavor = "8B"
[training]
steps = 40
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[checkpoint]
async_mode = "disabled"
interval = 5

[[auxiliary_losses]]
name = "z_loss"
weight = 0.0001
"""
PHASES = {"time/data": 0.1, "time/forward": 0.6, "time/optimizer": 0.3}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run that left everything."""
    rows = [
        row(1, **{"time/forward": 50.0}, tokens=100, tps=5.0),
        row(10, **PHASES, tokens=1000, tps=90.0, checkpoint_s=2.0),
        {"step": 10, "time": 1.0, "event": "rollback"},
        row(20, **PHASES, tokens=2000, tps=110.0, mfu=0.5, skipped=1, memory_pct=40.0),
    ]
    environment = {"ranks": 8, "device": "NVIDIA H200", "device_type": "cuda"}
    folder = write_run(tmp_path / "run", rows, RECIPE, environment)
    start = {"before_first_step_s": 20.0, "first_step_s": 10.0, "compile_s": 6.0}
    for rank in range(2):
        note(folder, rank, "finished", 20)
        log(
            folder,
            rank,
            {"step": 1, "event": "start", **start},
            {"step": 2, "event": "traffic", "sent/dp_shard": 3_000_000, "sent/all": 200},
        )
        traces = folder / "profile_traces/iteration_10"
        traces.mkdir(parents=True, exist_ok=True)
        events = [
            step(9, 0, 100),
            event("gemm", 0, 60 + rank, "kernel", 7),
            event("ncclDevKernel", 50, 80, "kernel", 8),
        ]
        (traces / f"rank{rank}_trace.json").write_text(json.dumps({"traceEvents": events}))
    return folder


def test_facts_are_those_of_the_steps_after_the_first(whole: Path) -> None:
    facts = read_facts(RunHistory.open(whole))
    assert facts.layout == {"dp_shard": 4, "tp": 2}
    assert (facts.step, facts.units, facts.units_a_step) == (20, 2000, 100)
    assert (facts.rate, facts.unit) == (100.0, "tokens")
    assert facts.mfu == 0.5
    assert facts.phases == pytest.approx({"data": 0.1, "forward": 0.6, "optimizer": 0.3})
    assert facts.pauses == {"checkpoint": 2.0}
    assert facts.reported_s == pytest.approx(19 + 2)
    assert facts.startup_s == 30.0
    assert facts.sent == {"dp_shard": 3e6, "all": 200.0}
    assert (facts.skipped, facts.events) == (1, {"rollback": 1})
    assert facts.memory_pct == 40.0
    assert facts.traces == Traces(
        folder="profile_traces/iteration_10",
        steps=1,
        compute_s=pytest.approx({0: 0.060, 1: 0.061}),
        exposed=pytest.approx({0: 0.20, 1: 0.19}),
        idle=pytest.approx({0: 0.20, 1: 0.20}),
        left_out=0,
    )


def test_validations_after_the_last_report_count(tmp_path: Path) -> None:
    rows = [row(1), {"step": 10, "validation_loss": 2.0}, row(10), row(20, validation_s=1.0)]
    folder = write_run(tmp_path / "run", [*rows, {"step": 20, "validation_loss": 1.9}])
    pauses = {"validation": 1.5, "checkpoint": 0.5}
    log(folder, 0, {"step": 20, "event": "end", "stopped_by": None, "pauses": pauses})
    facts = read_facts(RunHistory.open(folder))
    assert facts.validations == 2
    assert facts.pauses == {"validation": 2.5, "checkpoint": 0.5}
    assert "validation 2.5 s (2 times, " in page(facts, [], Prediction())


def test_logs_of_ranks_that_are_no_more_do_not_count(whole: Path) -> None:
    start = {"step": 1, "event": "start", "first_step_s": 99.0}
    log(whole, 8, start)
    assert read_facts(RunHistory.open(whole)).first_step_s == 10.0
    log(whole, 1, {**start, "first_step_s": 99.0}, {**start, "first_step_s": 30.0})
    assert read_facts(RunHistory.open(whole)).first_step_s == 30.0


@pytest.mark.usefixtures("no_plan")
def test_the_page_tells_it_all(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(whole)]) == 0
    told = capsys.readouterr().out
    for words in (
        "llama3 8B; 8 x NVIDIA H200; dp_shard 4, tp 2",
        "finished at step 20",
        "loss that of the task + 0.0001 x z_loss",
        "step 20 of 40, 100 tokens each; 2,000 tokens",
        "100 tokens/s/device, 1 s per step, MFU 50.0%",
        "startup 20.0 s, first step 10.0 s; 6.0 s of it all compiling",
        "1 step skipped, 1 rollback",
        "forward         600.0 ms  60.0%  ##############################  with its collectives",
        "checkpoint 2.0 s (9.5% of the time)",
        "Rank 0 sends per step: 3 MB over dp_shard, 200 B over all.",
        "rank 1    computes 61.0 ms per step; exposed communication 19.0%, idle 20.0%",
        "Waiting for data takes 10% of a step",
        'checkpoint.async_mode = "async"',
    ):
        assert " ".join(words.split()) in " ".join(told.split()), words
    assert max(map(len, told.splitlines())) <= 100
    assert len(told.splitlines()) <= 60


@pytest.mark.usefixtures("no_plan")
def test_the_numbers_as_json(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(whole), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rate"], found["unit"]) == (100.0, "tokens")
    assert found["state"]["words"] == "finished at step 20"
    assert found["traces"]["exposed"]["0"] == pytest.approx(0.2)
    assert "data.num_workers" in found["advice"][0]["keys"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(1)],
        [{"step": 1, "tps": 1.0, "tokens": 5, "memory_gib": 1.0, "memory_pct": 2.0}],
        [row(1), row(1)],
        [{"step": 3, "event": "restart"}],
    ],
)
def test_a_run_that_left_little_gets_what_can_be_said(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    facts = read_facts(RunHistory.open(write_run(tmp_path, rows)))
    told = page(facts, advise(facts), Prediction())
    assert "unknown" in told
    assert "There are no numbers to give advice from." in told


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError):
        read_facts(RunHistory.open(tmp_path))
    assert cli.main(["explain", str(tmp_path / "nothing")]) == 2
    assert "nothing: is not a folder\n  wanted the job.dump_folder" in capsys.readouterr().err


def calm(**changes: Any) -> Facts:
    """A run in which nothing stands out, with changes."""
    facts = Facts(
        folder=Path("run"),
        recipe=JobConfig().flat(),
        ranks=4,
        device="NVIDIA H200",
        on_cuda=True,
        layout={"dp_shard": 4},
        step=1000,
        state=None,  # type: ignore[arg-type]
        unit="tokens",
        units=10**6,
        units_a_step=1000,
        rate=100.0,
        mfu=0.5,
        step_s=1.0,
        phases={"data": 0.01, "forward": 0.33, "backward": 0.62, "sync": 0.02, "optimizer": 0.02},
        pauses={"checkpoint": 10.0, "validation": 20.0},
        validations=3,
        reported_s=1000.0,
        first_step_s=20.0,
        before_first_step_s=10.0,
        compile_s=0.0,
        sent={},
        slowest=[Slowest("forward", 1, 3.0, 0.4)],
        memory_gib=100.0,
        memory_pct=80.0,
        skipped=2,
        events={},
        traces=Traces("t", 1, {0: 0.5, 1: 0.51}, {0: 0.05, 1: 0.1}, {0: 0.1, 1: 0.2}, 0),
    )
    return dataclasses.replace(facts, **changes)


def recipe(**changes: Any) -> dict[str, Any]:
    return JobConfig().flat() | {key.replace("__", "."): v for key, v in changes.items()}


def traces(**changes: Any) -> Traces:
    found = calm().traces
    assert found is not None
    return dataclasses.replace(found, **changes)


def test_nothing_stands_out() -> None:
    assert advise(calm()) == []
    assert advise(calm(on_cuda=False, traces=None, mfu=None)) == []


@pytest.mark.parametrize(
    ("facts", "key", "because"),
    [
        (calm(phases={"data": 0.2, "forward": 0.8}), "data.num_workers", "20% of a step"),
        (
            calm(layout={"pp": 2}, phases={"pipeline": 0.1, "sync": 0.2, "forward": 0.7}),
            "parallelism.pipeline_parallel_schedule",
            "30% of a step",
        ),
        (
            calm(traces=traces(exposed={0: 0.3, 1: 0.4})),
            "parallelism.fsdp_reshard_after_forward",
            "30% of the time",
        ),
        (
            calm(traces=traces(exposed={0: 0.3}), layout={"tp": 4}),
            "parallelism.tensor_parallel_degree",
            "30% of the time",
        ),
        (calm(traces=traces(idle={0: 0.4, 1: 0.5})), "compile.enable", "40% of the time"),
        (calm(phases={"sync": 0.3, "forward": 0.7}), "data.num_workers", "30% of a step"),
        (
            calm(
                phases={"optimizer": 0.4, "forward": 0.6},
                recipe=recipe(optimizer__offload_states=True),
            ),
            "optimizer.offload_states",
            "40% of a step",
        ),
        (calm(pauses={"checkpoint": 100.0}), "checkpoint.async_mode", "10% of the time"),
        (calm(pauses={"validation": 200.0}), "validation.freq", "20% of the time"),
        (calm(pauses={"statistics": 200.0}), "metrics.statistics_freq", "20% of the time"),
        (
            calm(compile_s=500.0, first_step_s=510.0, reported_s=500.0),
            "compile.cache_folder",
            "49% of the time",
        ),
        (calm(memory_pct=30.0), "activation_checkpoint.mode", "30% of the device"),
        (calm(memory_pct=97.0), "training.local_batch_size", "97% of the device"),
        (calm(mfu=0.2), "compile.enable", "MFU is 20.0%"),
        (calm(skipped=50), "optimizer.lr", "50 of 1000 steps"),
    ],
)
def test_each_rule_speaks_where_its_number_holds(facts: Facts, key: str, because: str) -> None:
    [advice] = advise(facts)
    assert key in advice.keys
    assert because in advice.because


def test_a_straggler_is_named() -> None:
    [advice] = advise(calm(slowest=[Slowest("backward", 3, 22.0, 0.9)]))
    assert "rank 3 is the slowest in backward in 90% of the reports" in advice.because
    assert advise(calm(slowest=[Slowest("backward", 3, 22.0, 0.4)])) == []
    [advice] = advise(calm(traces=traces(compute_s={0: 0.5, 1: 0.5, 2: 0.7})))
    assert "rank 2 computes 1.40 times as long as the fastest rank" in advice.because


def test_advice_names_settings_that_exist() -> None:
    known = JobConfig().flat().keys()
    every = [
        calm(
            phases={"data": 0.2, "pipeline": 0.2, "sync": 0.2, "optimizer": 0.4},
            layout={"pp": stages, "dp_shard": 2, "tp": 2},
            pauses=dict.fromkeys(("checkpoint", *MEASURING), 200.0),
            traces=traces(exposed={0: 0.5}, idle={0: 0.5}),
            compile_s=900.0,
            first_step_s=900.0,
            memory_pct=percent,
            mfu=0.1,
            skipped=500,
        )
        for stages, percent in ((1, 10.0), (2, 99.0))
    ]
    found: list[Advice] = [advice for facts in every for advice in advise(facts)]
    keys = {key for advice in found for key in advice.keys}
    assert len(found) >= len(RULES)
    assert keys <= known, keys - known


def test_the_slowest_rank_is_that_of_most_reports() -> None:
    even, late = {"forward": 1.0, "backward": 2.0}, {"forward": 1.6, "backward": 2.0}
    waiting = {**even, "data": 0.1}, {**even, "data": 0.7}
    events = {
        0: [steps(1, late), *(steps(n, even, waiting[0]) for n in range(2, 7))],
        1: [steps(1, even), *(steps(n, late if n < 6 else even, waiting[1]) for n in range(2, 7))],
    }
    found = {one.phase: one for one in slowest_by_phase(events)}
    assert found["forward"].rank == 1
    assert found["forward"].often == 0.8
    assert found["forward"].percent == pytest.approx(100 * 0.6 / 3.4)
    assert found["data"].rank == 1
    assert found["data"].percent == pytest.approx(100 * 0.6 / 3.4)


def test_reports_of_an_earlier_launch_do_not_count() -> None:
    late, even = {"forward": 9.0}, {"forward": 1.0}
    start = {"step": 5, "event": "start"}
    events = {
        rank: [steps(n, late if rank else even) for n in (1, 2, 3)]
        + [steps(5, even), start]
        + [steps(n, even if rank else late) for n in (6, 7)]
        for rank in range(2)
    }
    [forward] = [one for one in slowest_by_phase(events) if one.phase == "forward"]
    assert (forward.rank, forward.often) == (0, 1.0)


def test_one_rank_has_no_slowest() -> None:
    assert slowest_by_phase({0: [steps(n, {"forward": 1.0}) for n in range(5)]}) == []


CPU = """
[job]
hardware = "cpu"
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 64
local_batch_size = 2
"""


def predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The JSON of a run's prediction, and the page, of one plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "plan_on", functools.cache(predictions.plan_on))
        assert cli.main(["explain", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["prediction"]
        assert cli.main(["explain", str(folder)]) == 0
    return found, " ".join(capsys.readouterr().out.split())


@pytest.mark.gate
@pytest.mark.costs("two plans")
def test_predicted_is_next_to_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(1), row(2, **{"time/backward": 2.0, "time/clip": 0.2, "time/optimizer": 0.3})]
    device = {"ranks": 2, "device": "some CPU", "device_type": "cpu"}
    found, told = predicted(write_run(tmp_path / "run", rows, CPU, device), capsys)
    by_name = {each["quantity"].strip(): each for each in found["rows"]}
    assert found["hardware"] == "cpu"
    job = load_job(tmp_path / "run/recipe.toml", (), 2, "cpu").config
    planned = plan(job, 2, find_hardware("cpu"))
    assert planned.time is not None
    peak = by_name["process at the peak"]
    assert peak["predicted"] == planned.reserved_gib.value + 0.3
    assert peak["low"] < peak["predicted"] < peak["high"]
    assert peak["measured"] == 1.0
    assert by_name["speed"]["measured"] == 100.0
    assert by_name["step"]["predicted"] == planned.time.seconds
    parts = [each for each in found["rows"] if each["quantity"].startswith("  ")]
    assert sum(each["predicted"] or 0 for each in parts) == pytest.approx(planned.time.seconds)
    assert by_name["forwards and backwards"]["measured"] == 3.0
    assert by_name["gradient norm and update"]["measured"] == 0.5
    assert by_name["agreement of ranks"]["measured"] is None
    assert "Prediction by the plan of its recipe on cpu, with limits, and measurement:" in told
    assert re.search(r"step [\d.]+ \([\d.]+ to [\d.]+\) 1 s ", told)


def test_of_unknown_hardware_only_memory_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {"ranks": 1, "device": "NVIDIA Unknown", "device_type": "cuda"}
    recipe = CPU.replace('"cpu"', '"h100"')
    found, told = predicted(write_run(tmp_path / "run", [row(1), row(2)], recipe, device), capsys)
    names = ["tensors at the peak", "reserved at the peak"]
    assert [each["quantity"] for each in found["rows"]] == names
    assert found["hardware"] is None
    assert "note: the hardware is unknown (the recipe states h100), so neither time" in told


def test_a_run_without_a_plan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, told = predicted(write_run(tmp_path / "run", [row(1), row(2)]), capsys)
    assert not found["rows"]
    assert "note: there is no prediction, as its recipe or ranks are unknown" in told
    device = {"ranks": 3, "device": "some CPU", "device_type": "cpu"}
    recipe = CPU + "[parallelism]\ntensor_parallel_degree = 2\n"
    _, told = predicted(write_run(tmp_path / "run", [row(1), row(2)], recipe, device), capsys)
    assert "note: there is no prediction: " in told
