"""No recipe is shipped that cannot start: each takes a step on as many ranks as it is meant for.

The process group is torch's fake one, which has one rank and says that there are the others, and
tensors have shapes and no values; all else is what a run does: the layout is built, and forward,
backward, clipping and the optimizer run on this rank's part. Blocks are not compiled, which would
need values. A pipeline gets as few microbatches as its schedule allows.
"""

from pathlib import Path

import pytest

from tests.gpu.fake import step
from tests.ranks import run_ranks
from tests.recipes.test_recipes import FOLDER, RANKS
from tests.tiers import tiers
from torchtitan.checks import load_job
from torchtitan.tools.verify.ranks import EXEMPT

LARGE = [(name, 0) for name in RANKS if "debug" not in name]
# A rank of each kind: the first, and in a pipeline the last too.
CASES = [*LARGE, ("llama3_405b", 511)]
GATE = [("llama3_8b", 0), ("qwen3_0.6b", 0)]
"""The others wait for a release. Their plans, of tests/estimate/test_shipped_recipes.py, take such
steps too."""


def step_of(path: Path, ranks: int, rank: int) -> dict[str, int]:
    """A step on fake ranks; what there was to see."""
    flags = ["--compile.enable", "false"]
    job = load_job(path, flags, ranks, "cpu", exempt=EXEMPT).config
    degrees = job.degrees(ranks)
    if degrees.pp > 1:
        flags += ["--training.local_batch_size", str(degrees.pp)]
        job = load_job(path, flags, ranks, "cpu", exempt=EXEMPT).config
    return step(job, ranks, rank)


@pytest.mark.parametrize(("name", "rank"), tiers(CASES, [], gate=GATE))
def test_recipe_takes_a_step_at_its_real_size(name: str, rank: int) -> None:
    ranks = RANKS[name]
    (seen,) = run_ranks(step_of, 1, FOLDER / f"{name}.toml", ranks, rank)
    job = load_job(FOLDER / f"{name}.toml", [], ranks, "cpu", exempt=EXEMPT).config
    degrees = job.degrees(ranks)
    assert seen["gradients"] == seen["tensors"] > 0
    assert seen["stages"] == (2 if degrees.pp > 1 else 1)
    # Each rank owns its share: a stage's parameters, split over the fsdp and the tensor ranks
    # (norms are whole on the tensor ranks, hence about).
    share = seen["parameters"] / (degrees.fsdp * degrees.tp)
    assert share <= seen["own"] <= 1.01 * share
