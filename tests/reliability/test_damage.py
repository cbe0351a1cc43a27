"""Files that are not what was saved: they are named, and no run goes on from them."""

import os
import pickle
import random
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.reliability.trials import End, checkpoints, play, play_each, ranks_of, recipe

JSONS = ("manifest.json", "train_state.json")
FILES = {
    "one rank": (*JSONS, "rank-0.safetensors"),
    "FSDP 2": (*JSONS, "rank-0.safetensors", "rank-1.safetensors"),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Six steps under a layout, saved at 2, 4 and 6."""

    @cache
    def run(layout):
        folder = tmp_path_factory.mktemp("saved") / "run"
        play(recipe(folder, layout, training={"steps": 6}), ranks_of(layout), status=0)
        assert list(checkpoints(folder)) == [2, 4, 6]
        return folder

    return run


# --- harm ---


def flip(draw, file):
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def append(draw, file):
    with file.open("ab") as opened:
        opened.write(b"\x00" + draw.randbytes(draw.randrange(1000)))


def zeros(draw, file):
    """A block that was never written, as after a power cut."""
    data = bytearray(file.read_bytes())
    begin = draw.randrange(len(data))
    size = min(4096, len(data) - begin)
    while not any(data[begin : begin + size]):
        begin -= 1
    data[begin : begin + size] = bytes(size)
    file.write_bytes(data)


def other(draw, file):
    """The file of the checkpoint before."""
    shutil.copy(file.parents[1] / "step-4" / file.name, file)


def folder(draw, file):
    file.unlink()
    file.mkdir()


HARMS = {
    "cut short": lambda draw, file: os.truncate(file, draw.randrange(file.stat().st_size)),
    "replaced by that of another checkpoint": other,
    "deleted": lambda draw, file: file.unlink(),
    "a bit flipped": flip,
    "bytes appended": append,
    "a block of zeros": zeros,
    "all noise": lambda draw, file: file.write_bytes(draw.randbytes(file.stat().st_size)),
    "replaced by a folder": folder,
}


def harms():
    """Layout, harm, file and seed; the first four kinds of harm for every day."""
    found = []
    for number, harm in enumerate(HARMS):
        for layout, files in FILES.items():
            for name in files:
                every = 25 if harm in ("a bit flipped", "cut short") else 4
                for seed in range(every if layout == "one rank" else 1):
                    daily = number < 4 and (layout, name, seed) == (
                        "one rank",
                        files[min(number, 2)],
                        0,
                    )
                    marks = () if daily else pytest.mark.slow
                    found.append(pytest.param(layout, harm, name, seed, marks=marks))
    return found


@pytest.mark.parametrize(("layout", "harm", "name", "seed"), harms())
def test_a_harmed_file(layout, harm, name, seed, tmp_path, saved, undisturbed):
    run = tmp_path / "run"
    shutil.copytree(saved(layout), run)
    HARMS[harm](random.Random(f"{layout} {harm} {name} {seed}"), run / "checkpoint/step-6" / name)
    harmed = contents(run / "checkpoint/step-6")

    initial = {"initial_load_path": str(run / "checkpoint"), "enable": False}
    must, fresh, auto = play_each(
        [
            recipe(run, layout, checkpoint={"resume": "must"}),
            recipe(tmp_path / "fresh", layout, checkpoint=initial),
            recipe(run, layout),
        ],
        ranks_of(layout),
    )
    for refused in (must, fresh):
        assert refused.status == 2, refused.log
        assert "step-6" in refused.log
        assert name in refused.log
        assert "Traceback" not in refused.log
        assert "step 7/8" not in refused.log
    assert auto.status == 0, auto.log
    assert "; renamed to step-6.damaged\n" in auto.log
    assert name in auto.log
    assert "/step-4 at step 4\n" in auto.log
    assert contents(run / "checkpoint/step-6.damaged") == harmed
    End.of(run).assert_same(undisturbed(layout)[0], to_the_bit=True)


def contents(checkpoint):
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}


# --- more than one ---


def exchange(one, two):
    between = one.with_name("between")
    one.rename(between)
    two.rename(one)
    between.rename(two)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("", "manifest.json") else pytest.mark.slow)
        for name in ("", *FILES["one rank"])
    ],
)
def test_files_exchanged_between_two_checkpoints(name, tmp_path, saved, undisturbed):
    """Both are harmed, even where each is whole and has the other's name (no file is named)."""
    run = tmp_path / "run"
    shutil.copytree(saved("one rank"), run)
    exchange(run / "checkpoint/step-4" / name, run / "checkpoint/step-6" / name)
    must, auto = play_each([recipe(run, checkpoint={"resume": "must"}), recipe(run)])
    assert must.status == 2, must.log
    assert auto.status == 0, auto.log
    for step in (4, 6):
        assert f"; renamed to step-{step}.damaged\n" in auto.log
    assert "/step-2 at step 2\n" in auto.log
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


@pytest.mark.parametrize("harm", [pytest.param(h, marks=pytest.mark.slow) for h in HARMS])
def test_every_checkpoint_harmed(harm, tmp_path, saved):
    run, draw = tmp_path / "run", random.Random(harm)
    shutil.copytree(saved("one rank"), run)
    harmed = dict(zip((2, 4, 6), FILES["one rank"], strict=True))
    for step, name in harmed.items():
        path = run / f"checkpoint/step-{step}" / name
        (flip if harm.startswith("replaced by that") else HARMS[harm])(draw, path)
    before = {path.name: contents(path) for path in checkpoints(run).values()}
    played = play(recipe(run), status=2)
    assert f"all checkpoints in {run}/checkpoint are damaged" in played.log
    assert all(re.search(rf"/step-{step}\b.*{name}", played.log) for step, name in harmed.items())
    assert {path.name: contents(path) for path in checkpoints(run).values()} == before


# --- malice ---


class Malice:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def pickled(mark):
    data = pickle.dumps(Malice(mark))
    pickle.loads(data)
    assert mark.exists(), "it does what it should not be let do"
    mark.unlink()
    return data


MALICE = {
    "in place of a file": [(name,) for name in FILES["one rank"]],
    "next to the files": [(".metadata",), ("__0_0.distcp",), ("data.pkl",)],
    "in place of a checkpoint": [(".metadata", "__0_0.distcp", "train_state.json")],
}


@pytest.mark.parametrize(
    ("where", "names"),
    [
        pytest.param(
            where,
            names,
            marks=() if names[0] in ("manifest.json", ".metadata") else pytest.mark.slow,
        )
        for where, each in MALICE.items()
        for names in each
    ],
)
def test_malicious_pickles_are_not_run(where, names, tmp_path, saved, undisturbed):
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(saved("one rank"), run)
    newest = run / "checkpoint/step-6"
    if where == "in place of a checkpoint":
        shutil.rmtree(newest)
        newest.mkdir()
    for name in names:
        (newest / name).write_bytes(pickled(mark))
    initial = {"initial_load_path": str(run / "checkpoint"), "enable": False}
    jobs = [
        recipe(run, checkpoint={"resume": "must"}, training={"steps": 6}),
        recipe(tmp_path / "fresh", checkpoint=initial, training={"steps": 1}),
        recipe(run),
    ]
    played = play_each(jobs)
    assert not mark.exists()
    statuses = [one.status for one in played]
    if where == "next to the files":  # they are not looked at
        assert statuses == [0, 0, 0], played
    elif where == "in place of a file":
        assert statuses == [2, 2, 0], played
        assert "; renamed to step-6.damaged\n" in played[2].log
    else:
        assert statuses == [2, 2, 2], played
        must, fresh, auto = (one.log for one in played)
        assert f"{newest} was saved by torch's distributed checkpoint, not by a run" in must
        assert must == auto
        assert "/.metadata: refused: it names pathlib.Path.touch" in fresh
    if not any(statuses[2:]):
        End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)


def test_malicious_weights_of_others_are_not_run(tmp_path):
    mark = tmp_path / "mark"
    for name in ("meta", "hf"):
        (tmp_path / name).mkdir()
    params = '{"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 301}'
    (tmp_path / "meta/params.json").write_text(params)
    for name in ("meta/consolidated.00.pth", "hf/pytorch_model.bin", "hf/model.safetensors"):
        (tmp_path / name).write_bytes(pickled(mark))
    for kind in ("meta", "hf"):
        initial = {"initial_load_path": str(tmp_path / kind), "enable": False}
        played = play(recipe(tmp_path / "run", checkpoint=initial))
        assert not mark.exists()
        assert played.status == 2, played.log
        assert "checkpoint.initial_load_path" in played.log
