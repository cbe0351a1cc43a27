"""`step-N` holds the weights of step N, to the bit, whatever the run does while it is written."""

import numpy as np
import pytest
import torch
import xxhash

from tests.reliability.trials import at_call, checkpoints, copy_late, play, ranks_of, recipe
from tests.runs import whole
from torchtitan.checkpoint import saved_steps
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.checkpoint.storage import SavedTensors

STEPS = 4


def digest(tensors):
    """The sum of the bits of all elements, times weights of their indices: torchtitan/digest.py."""
    lines = []
    for name in sorted(tensors):
        elements = np.atleast_1d(tensors[name].numpy())
        words = elements.view({1: np.uint8, 4: np.int32, 8: np.int32}[elements.itemsize])
        terms = words.astype(np.int64).astype(np.uint64)
        for dim, size in enumerate(words.shape):
            shape = [size if other == dim else 1 for other in range(words.ndim)]
            terms = terms * index_weights(dim, size).reshape(shape)
        lines.append(f"{name} {int(terms.sum(dtype=np.uint64)):016x}\n")
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())


def index_weights(dim, size):
    """SplitMix64 of the indices along a dimension."""
    state = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64((dim + 1) * 0xD1B54A32D192ED03 % 2**64)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)


def note_every_save(rank, folder):
    def note(save, checkpointer, *rest, **named):
        tensors = {name: whole(t) for name, t in checkpointer.contents.tensors().items()}
        torch.save(tensors, folder / f"{checkpointer.state.step}.{rank}.pt")
        save(checkpointer, *rest, **named)

    return at_call("torchtitan.checkpoint.manager:Checkpointer.save", 0, note)


def no_wait():
    at_call(
        "torchtitan.checkpoint.manager:Checkpointer.wait_staging",
        0,
        lambda wait, checkpointer: None,
    )()


def train(folder, layout, mode, *more):
    """A run that saves each step, every second one for good; what each save should hold."""
    notes = folder / "notes"
    notes.mkdir()

    def traps(rank):
        def set_all():
            for trap in (note_every_save(rank, notes), copy_late, *more):
                trap()

        return set_all

    often = {"interval": 1, "keep_latest_k": STEPS}
    job = recipe(
        folder / "run",
        layout,
        by="SGD",
        training={"steps": STEPS},
        checkpoint={"keep_latest_k": 0, "async_mode": mode, "frequent": often},
    )
    ranks = range(ranks_of(layout))
    played = play(job, len(ranks), {rank: traps(rank) for rank in ranks})
    found = {}
    for path in notes.iterdir():
        found.setdefault(int(path.name.split(".")[0]), {}).update(torch.load(path))
    return played, found


def wrong_steps(folder, noted):
    """Steps whose checkpoint is not what was noted."""
    found = checkpoints(folder / "run")
    assert list(found) == [2, 4]
    found |= saved_steps(folder / "run/frequent")
    assert sorted(found) == sorted(noted) == [1, 2, 3, 4]
    wrong = []
    for step, path in found.items():
        saved = SavedTensors(path)
        assert saved.shapes().keys() == noted[step].keys()
        is_same = all(torch.equal(saved.read(name), t) for name, t in noted[step].items())
        assert (read_manifest(path).digest == digest(noted[step])) == is_same
        if not is_same:
            wrong.append(step)
    return wrong


DAILY = [("one rank", "async_with_pinned_mem"), ("FSDP 2", "async")]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(*pair, marks=() if pair in DAILY else pytest.mark.slow)
        for layout in ("one rank", "DDP 2", "FSDP 2", "PP 2", "FSDP 2 x TP 2")
        for mode in ("disabled", "async", "async_with_pinned_mem")
        if (pair := (layout, mode))
    ],
)
def test_a_checkpoint_holds_the_step_it_is_named_after(layout, mode, tmp_path):
    played, noted = train(tmp_path, layout, mode)
    assert played.status == 0, played.log
    assert wrong_steps(tmp_path, noted) == []
    assert len({digest(tensors) for tensors in noted.values()}) == len(noted), "weights change"


@pytest.mark.parametrize("layout", ["one rank", pytest.param("FSDP 2", marks=pytest.mark.slow)])
def test_without_the_wait_it_would_be_found(layout, tmp_path):
    played, noted = train(tmp_path, layout, "async", no_wait)
    assert played.status == 0, played.log
    assert sorted(wrong_steps(tmp_path, noted)) == [1, 2, 3]  # after the last there is no update
