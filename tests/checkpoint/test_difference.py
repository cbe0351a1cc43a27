"""`torchtitan checkpoint diff`: weights first, and all that differs where it is asked for."""

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import train
from torchtitan.tools.checkpoint import SHOWN, Difference


def saved(folder, seed):
    job = tiny.job(folder, checkpoint={"enable": True}, training={"steps": 1}, debug={"seed": seed})
    run_ranks(train, 1, job)
    return folder / "checkpoint/step-1"


def test_weights_come_first_and_all_shows_the_rest(tmp_path, says):
    one, other = (str(saved(tmp_path / f"{seed}", seed)) for seed in (1, 2))
    brief = says("checkpoint", "diff", one, other, status=1).splitlines()
    full = says("checkpoint", "diff", one, other, "--all", status=1).splitlines()

    tensors = [line.split(":")[0] for line in full if ": off by " in line]
    are_weights = [name.startswith("model.") for name in tensors]
    assert True in are_weights
    assert False in are_weights
    assert are_weights == sorted(are_weights, reverse=True)
    assert full[0].startswith("model.")
    assert full[-1].endswith(f"{len(tensors)} differ in value, {sum(are_weights)} of them weights")
    assert brief[:SHOWN] == full[:SHOWN]
    assert f"and {len(tensors) - SHOWN} more tensors; --all shows them" in brief
    assert not any("--all" in line for line in full)
    assert full.index("debug.seed: 1 -> 2") >= len(tensors)


def test_checkpoints_that_are_equal():
    assert list(Difference((), (), (), (), 3).lines()) == [
        "3 tensors are equal, 0 differ in value, 0 of them weights"
    ]
