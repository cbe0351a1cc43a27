"""The ledger of a run's data across kills, layouts and lengths, and its answer to a wrong one."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.earlier import EARLIER
from tests.reliability.trials import at_call, play, ranks_of, recipe
from tests.runs import rows
from tests.token_shards import drawn_documents, write_shards
from torchtitan.metrics.data_ledger import LEDGER_FILE, chained, ledger_rows
from torchtitan.tools import ledger as run_ledger
from torchtitan.tools.cli import main
from torchtitan.tools.ledger import read_consumption

KILL = at_call("torchtitan.optim.optimizer_group:Optimizers.step", 6)
"""In step 6, two steps after a checkpoint."""
METRICS = {"log_freq": 1}


def trained(folder, layout, kill=False, **sections):
    job = recipe(folder, layout, metrics=METRICS, **sections)
    played = play(job, ranks_of(layout), {0: KILL} if kill else None)
    assert played.was_killed if kill else played.status == 0, played.log


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run on one rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    trained(folder, "one rank")
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The same run on two ranks, killed, and resumed on one."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    trained(folder, "FSDP 2", kill=True)
    trained(folder, "one rank")
    return folder


def test_every_report_has_the_hash_of_all_samples_on_any_layout(straight, killed):
    expected = {row["step"]: row["data_hash"] for row in rows(straight) if "data_hash" in row}
    found = {row["step"]: row["data_hash"] for row in rows(killed) if "data_hash" in row}
    assert found == expected
    assert list(expected) == list(range(1, 9))
    assert len(set(expected.values())) == 8


def test_a_killed_and_resumed_run_is_complete(straight, killed, says):
    found = json.loads(says("data", "ledger", killed, "--json", "--verify"))
    assert found["is_complete"]
    assert found["hash"] == read_consumption(straight).end["hash"]
    first, second = found["sessions"]
    assert (first["ranks"], second["ranks"]) == (2, 1)
    assert (first["samples_of_run"], first["samples_trained_again"]) == (32, 8)
    assert (second["samples"], second["samples_of_run"]) == (32, 32)
    assert found["verified_hashes"] > 8
    [(_, source)] = found["sources"].items()
    assert (source["samples"], source["tokens"]) == (64, found["tokens"])
    text = says("data", "ledger", killed)
    assert "8 more samples, until step 5, were lost and trained again" in text
    assert "complete: each sample was read once, in order" in text


def changed(folder, to, change, rechain):
    """Copy a run with another ledger; `rechain`: its chain does not show it."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("checkpoint"))
    chain, lines = "", []
    for row in change(list(ledger_rows(to / LEDGER_FILE))):
        if rechain:
            own = {key: value for key, value in row.items() if key != "chain"}
            chain = chained(own, chain)
            row = own | {"chain": chain}
        lines.append(json.dumps(row) + "\n")
    (to / LEDGER_FILE).write_text("".join(lines))
    return to


def without(position, event):
    def change(found):
        del found[[n for n, row in enumerate(found) if row["event"] == event][position]]
        return found

    return change


def with_values(position, event, **values):
    def change(found):
        [row for row in found if row["event"] == event][position].update(values)
        return found

    return change


def without_step_4(found):
    return [row for row in found if row["step"] != 4 or row["event"] == "start"]


ZERO, OTHER_REPORT = {"hash": "0" * 16}, "metrics.jsonl has the hash"
OTHER_DATA = "they read different samples"
OTHER_HASHES = "sessions 1 and 2 have different hashes at sample 40"
TAMPERED = {
    "a row is removed": (without(2, "steps"), False, "a row before it is missing"),
    "the last row is removed": (lambda found: found[:-3], False, "its last rows are missing"),
    "a hash is changed": (with_values(1, "steps", hash="0" * 16), False, "was changed"),
    "the checkpoint is removed": (without_step_4, True, "a part of the ledger is missing"),
    "a start is removed": (without(1, "start"), True, "the start of a session is missing"),
    "a session skips": (with_values(1, "start", samples=40), True, "8 samples were skipped"),
    "a session repeats": (with_values(1, "start", samples=24), True, "8 samples were repeated"),
    "a session has other data": (with_values(1, "start", **ZERO), True, OTHER_DATA),
    "a lost step had other data": (with_values(4, "steps", **ZERO), True, OTHER_HASHES),
    "a report had other data": (with_values(-2, "steps", **ZERO), True, OTHER_REPORT),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_changed_ledger_is_found(what, killed, tmp_path, says):
    change, rechain, message = TAMPERED[what]
    folder = changed(killed, tmp_path / "run", change, rechain)
    assert message in says("data", "ledger", folder, status=1)


def test_verify_finds_hashes_that_agree_with_each_other_but_not_with_the_recipe(
    straight, tmp_path, capsys
):
    def change(found):
        return [row | ({"hash": "0" * 16} if row["samples"] == 32 else {}) for row in found]

    folder = changed(straight, tmp_path / "run", change, rechain=True)
    metrics = folder / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] != 4]
    metrics.write_text("\n".join(kept) + "\n")
    assert main(["data", "ledger", str(folder)]) == 0
    assert main(["data", "ledger", str(folder), "--verify"]) == 1
    assert "samples 24 to 32 are not those that were recorded" in capsys.readouterr().out


def test_an_incomplete_last_line_is_ignored_and_a_resumed_run_goes_on_after_it(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    with (folder / LEDGER_FILE).open("a") as file:
        file.write('{"step": 9, "eve')
    assert main(["data", "ledger", str(folder)]) == 0
    trained(folder, "one rank", training={"steps": 9}, lr_scheduler={"total_steps": 8})
    assert main(["data", "ledger", str(folder)]) == 0
    assert len(read_consumption(folder).sessions) == 2


@pytest.mark.gate
def test_a_run_that_changes_batch_and_length_is_verified(killed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    batch = {"seq_len": 24, "global_batch_size": 4, "local_batch_size": 1, "steps": 12}
    sections = {"training": batch, "lr_scheduler": {"total_steps": 8}}
    trained(folder, "FSDP 2", **sections, checkpoint={"resume": "must"})
    assert main(["data", "ledger", str(folder), "--verify"]) == 0
    found = read_consumption(folder)
    assert [part.samples for part in found.parts] == [32, 32, 16]
    assert found.parts[-1].start["seq_len"] == 24


@pytest.mark.gate
def test_a_rollback_is_no_gap(tmp_path):
    """Samples that are skipped by it are read, and counted."""
    folder = tmp_path / "run"
    spikes = {"sigma": 0.001, "window": 3, "max_rollbacks": 1}
    job = recipe(folder, metrics=METRICS, spikes=spikes, training={"max_skipped_steps": 2})
    played = play(job)
    assert "rolled back" in played.log, played.log
    assert main(["data", "ledger", str(folder), "--verify"]) == 0
    assert "rollback" in [row["event"] for row in ledger_rows(folder / LEDGER_FILE)]


def test_a_run_without_a_ledger_is_refused(straight, tmp_path, says):
    shutil.copy(straight / "metrics.jsonl", tmp_path)
    assert f"has no {LEDGER_FILE}" in says("data", "ledger", tmp_path, status=2)


@pytest.mark.parametrize("packing", ["join", pytest.param("best_fit", marks=pytest.mark.gate)])
def test_sources_of_a_mixture_are_counted_across_kills_and_stages(packing, tmp_path, says):
    sources = [
        {"path": str(write_shards(tmp_path / name, drawn_documents(90, seed)))} | amount
        for seed, (name, amount) in enumerate(
            {"web": {"weight": 3, "repeat": True}, "code": {"weight": 1, "repeat": True}}.items()
        )
    ]
    folder, data = tmp_path / "run", {"sources": sources, "packing": packing}
    trained(folder, "FSDP 2", kill=True, data=data)
    # The recipe of the resumed run has a stage that begins after the checkpoint.
    data["stages"] = [{"from_step": 5, "weights": [1, 1]}]
    trained(folder, "one rank", data=data, checkpoint={"resume": "must"})
    found = json.loads(says("data", "ledger", folder, "--json", "--verify"))
    assert {name: counts["samples"] for name, counts in found["sources"].items()} == {
        "web": 30 + 12,
        "code": 10 + 12,
    }
    assert found["sources"]["web"]["tokens"] == 42 * 32
    assert found["sessions"][1]["sources"]["code"]["samples"] == 2 + 12


@pytest.mark.gate
@pytest.mark.parametrize("layout", ["DDP 2", "PP 2", "FSDP 2 x TP 2"])
def test_the_hash_is_that_of_one_rank_on_other_layouts(layout, straight, tmp_path):
    trained(tmp_path / "run", layout)
    assert main(["data", "ledger", str(tmp_path / "run")]) == 0
    one, other = read_consumption(straight), read_consumption(tmp_path / "run")
    assert [row["hash"] for row in one.parts[0].rows] == [r["hash"] for r in other.parts[0].rows]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("place", "number", "resumed_at"),
    [("torchtitan.checkpoint.store:Disk.commit", 2, 2), ("os:fsync", 12, 4)],
    ids=["before the checkpoint is there", "when it is there"],
)
def test_a_kill_during_a_save_leaves_no_gap(place, number, resumed_at, tmp_path):
    folder, job = tmp_path / "run", recipe(tmp_path / "run", metrics=METRICS)
    assert play(job, 1, {0: at_call(place, number)}).was_killed
    trained(folder, "one rank")
    assert main(["data", "ledger", str(folder), "--verify"]) == 0
    assert read_consumption(folder).parts[1].start["step"] == resumed_at


@pytest.mark.gate
def test_sources_of_a_run_that_was_killed_are_known_until_its_last_checkpoint(tmp_path, says):
    trained(tmp_path / "run", "one rank", kill=True)
    text = says("data", "ledger", tmp_path / "run")
    assert "40 samples" in text
    assert "sources are recorded until sample 32, the last checkpoint" in text


@pytest.mark.parametrize(
    ("hash", "call"), [("0" * 16, "skip"), (None, "load_state_dict"), ("1a", "load_state_dict")]
)
def test_a_run_that_continues_another_is_told_from_one_that_skips(hash, call):
    stream = Mock()
    job = SimpleNamespace(
        checkpoint=SimpleNamespace(initial_load_path=str(EARLIER / "38f6c66/checkpoint/step-3"))
    )
    run_ledger._start_later(stream, job, {"hash": hash, "samples": 24, "step": 0})
    assert [name for name, _, _ in stream.mock_calls] == [call]
