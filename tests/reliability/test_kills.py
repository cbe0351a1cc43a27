"""Processes killed at any moment, at every stage of a save: only the last steps are lost."""

import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reliability.trials import (
    CASES,
    STEPS,
    End,
    after_seconds,
    at_call,
    checkpoints,
    damage,
    die,
    leftovers,
    play,
    ranks_of,
    recipe,
)
from tests.tables import table
from torchtitan.provenance import to_toml

ROOT = Path(__file__).parents[2]
MODES = ("disabled", "async")


def look(folder, played):
    """Check what a killed run left; returns the newest step that is complete."""
    found = checkpoints(folder)
    for path in found.values():
        assert damage(path) == []
    told = [int(step) for step in re.findall(r"saved \S+/step-(\d+):", played.log)]
    newest = max(found, default=0)
    assert newest >= max(told, default=0), "a checkpoint that was told of is gone"
    assert not [name for name in leftovers(folder) if "damaged" in name]
    return newest


def finish(folder, layout, newest, **checkpoint):
    """Go on from what is on disk to the end."""
    played = play(recipe(folder, layout, checkpoint=checkpoint), ranks_of(layout), status=0)
    assert ("resumed from" in played.log) == (newest > 0)
    assert not newest or f"/step-{newest} at step {newest}\n" in played.log
    assert leftovers(folder) == []


# --- at every stage ---


def torn(share):
    """Writes half of the header (0), or of the tensor at a share of all tensors, and dies."""

    def torn_file(write, path, pieces):
        def half(write, file, data):
            write(file, data[: len(data) // 2])
            die()

        number = 1 + math.floor(share * len(pieces))
        at_call(f"{CHECKPOINT}.storage:write_all", number, half)()
        write(path, pieces)

    return at_call(f"{CHECKPOINT}.saver:write_file", 2, torn_file)


def half_a_json(write, path, value):
    file = write(path, value)
    os.truncate(path, file.bytes // 2)
    die()


def half_deleted(rmtree, path, *rest, **named):
    (path / "manifest.json").unlink()
    die()


def done_and_dead(function, *arguments):
    function(*arguments)
    die()


CHECKPOINT = "torchtitan.checkpoint"


def trap(place, number, *action):
    """What ends a rank, by the words of `kills.txt`."""
    if place == "torn":
        return torn(float(number))
    return at_call(place, int(number), *(globals()[name] for name in action))


STAGES = {
    stage: (trap(*words.split()), who, int(newest))
    for stage, words, who, newest in table(__file__, "kills.txt")
}
"""Of the save of step 4: the trap; which rank is trapped; the newest checkpoint that is there then.

A rank flushes one file a save, and the first rank four more things; all meet three times a save."""


def stages():
    """Every stage, layout, mode and rank to which it applies; a few for every day."""
    found = []
    for layout in ("one rank", "FSDP 2", "PP 2"):
        for mode in MODES:
            for stage, (_, who, _) in STAGES.items():
                if stage == "while weights are copied" and mode == "disabled":
                    continue
                ranks = ranks_of(layout)
                trapped = {"any": {0, ranks - 1}, "first": {0}, "other": {*range(1, ranks)}}
                for rank in sorted(trapped[who]):
                    daily = (layout, mode) == ("one rank", "async") and stage in DAILY
                    marks = () if daily else pytest.mark.slow
                    found.append(pytest.param(layout, mode, stage, rank, marks=marks))
    return found


DAILY = ("halfway through the data", "halfway through the manifest", "after it is renamed")


@pytest.mark.parametrize(("layout", "mode", "stage", "rank"), stages())
def test_a_kill_at_a_stage_of_a_save(layout, mode, stage, rank, tmp_path, undisturbed):
    trap, _, expected = STAGES[stage]
    folder, saves = tmp_path / "run", {"keep_latest_k": 1, "async_mode": mode}
    played = play(recipe(folder, layout, checkpoint=saves), ranks_of(layout), {rank: trap})
    assert played.was_killed, played.log
    newest = look(folder, played)
    # A save may not have ended by then that goes on beside training, or on the other rank.
    is_late = mode != "disabled" and stage == "after the weights have changed"
    may_be = {2, 4} if is_late or stage == "while others commit" else {expected}
    assert newest in may_be, played.log
    finish(folder, layout, newest, **saves)
    End.of(folder).assert_same(undisturbed(layout)[0], to_the_bit=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "trap"),
    {
        "while an unfinished one is deleted": at_call("shutil:rmtree", 1, half_deleted),
        "while it is verified before loading": at_call(f"{CHECKPOINT}.manifest:hash_file", 2),
        "while it is loaded": at_call(f"{CHECKPOINT}.contents:load_into"),
    }.items(),
)
@pytest.mark.parametrize("layout", ["one rank", "FSDP 2"])
def test_a_kill_while_resuming(layout, what, trap, tmp_path, undisturbed):
    folder, saves = tmp_path / "run", {"keep_latest_k": 1, "async_mode": "async"}
    stages = (STAGES["before it is renamed"][0], trap)
    for stage in stages:
        played = play(recipe(folder, layout, checkpoint=saves), ranks_of(layout), {0: stage})
        assert played.was_killed, played.log
        assert look(folder, played) == 2
    finish(folder, layout, 2, **saves)
    End.of(folder).assert_same(undisturbed(layout)[0], to_the_bit=True)


# --- at random moments ---


def chains():
    """Layout, mode, seed, kills."""
    found = [pytest.param("one rank", "async", 0, 2)]
    for layout in CASES:
        seeds = range(1, 2 if ranks_of(layout) > 2 else 5)
        found += [
            pytest.param(layout, mode, seed, 3, marks=pytest.mark.slow)
            for mode in MODES
            for seed in seeds
        ]
    return found


@pytest.mark.parametrize(("layout", "mode", "seed", "kills"), chains())
def test_kills_at_random_moments(layout, mode, seed, kills, tmp_path, undisturbed):
    """Run, be killed, go on, be killed; sometimes on another layout."""
    draw = random.Random(f"{layout} {mode} {seed}")
    end, seconds = undisturbed(layout)
    folder, saves = tmp_path / "run", {"interval": 1, "keep_latest_k": 2, "async_mode": mode}
    used, newest = [layout], 0
    while kills:
        now = used[-1]
        ranks = ranks_of(now)
        victims = [draw.randrange(ranks)] if draw.random() < 0.7 else list(range(ranks))
        moment = draw.uniform(0.2, 1 - newest / STEPS / 2) * seconds
        traps = dict.fromkeys(victims, after_seconds(moment))
        played = play(recipe(folder, now, checkpoint=saves), ranks, traps)
        if not played.was_killed:  # it was done before that: another one, killed earlier
            seconds *= 0.8
            assert played.status == 0, played.log
            End.of(folder).assert_same(end, to_the_bit=set(used) == {layout})
            shutil.rmtree(folder)
            used, newest = [layout], 0
            continue
        kills -= 1
        newest = look(folder, played)
        others = [name for name in ("one rank", "DDP 2", "FSDP 2") if name != now]
        used.append(draw.choice(others) if draw.random() < 0.2 else now)
    finish(folder, used[-1], newest, **saves)
    End.of(folder).assert_same(end, to_the_bit=set(used) == {layout})


# --- from outside ---

FAULTY = "tests.tiny,tests.faults"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_killed_from_outside(seed, tmp_path, undisturbed):
    """Not forked and not trapped: a process as from a shell, and `kill -9`, two times.

    Each goes to sleep soon after the checkpoint that is waited for, and so cannot reach the end.
    """
    draw, run, recipe_file = random.Random(seed), tmp_path / "run", tmp_path / "recipe.toml"
    recipe_file.write_text(to_toml(recipe(run, checkpoint={"interval": 1, "async_mode": "async"})))
    command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", recipe_file]
    whole, trapped = ([*command, f"--job.imports={names}"] for names in ("tests.tiny", FAULTY))
    with (tmp_path / "log").open("w") as log:
        for _ in range(2):
            last = max(checkpoints(run), default=0) + draw.randrange(1, 3)
            environment = os.environ | {"FAULT": f"sleep 0 {last + 2}"}
            process = subprocess.Popen(trapped, cwd=ROOT, env=environment, stdout=log, stderr=log)
            while last not in checkpoints(run):
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            assert process.wait() == -9, (tmp_path / "log").read_text()
            assert all(damage(path) == [] for path in checkpoints(run).values())
        assert subprocess.call(whole, cwd=ROOT, stdout=log, stderr=log) == 0
    End.of(run).assert_same(undisturbed("one rank")[0], to_the_bit=True)
