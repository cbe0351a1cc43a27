"""What is said of how converted linears round, and that saying it changes nothing."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import layouts
from tests.layouts import (
    GATHERED,
    MICROSCALED,
    ROWWISE,
    TENSORWISE,
    Case,
    case,
)
from tests.ranks import run_ranks
from tests.runs import rows, train_each
from torchtitan import checks, convert
from torchtitan.config import PlannedWorld
from torchtitan.convert import MXFP8, ConverterConfig, Float8, Rounding
from torchtitan.job import JobConfig

PAGE = (Path(__file__).parents[2] / "benchmarks/results/gpu_h100.md").read_text()
SENT_SO = (Float8(emulate=True, enable_tensor_parallel_float8_all_gather=True),)


@pytest.mark.parametrize(("recipe", "words"), [("tensorwise", "as"), ("rowwise", "0.87 times as")])
def test_matrices_too_small_to_gain_are_noted(recipe: str, words: str) -> None:
    """With the ratio that was measured; not of larger ones, of the same on a CPU, or emulated."""
    (row,) = re.findall(rf"Float8 {recipe} \|[^|]*\| ([\d.]+)", PAGE.partition("### 1B")[2])
    assert f"{float(row):.2f}" == {"as": "1.00"}.get(words, words[:4])

    def notes(flavor: str, device_type: str, **settings: Any) -> list[str]:
        converter = {"name": "float8", "recipe": recipe, **settings}
        given = {"model": {"name": "llama3", "flavor": flavor}, "convert": [converter]}
        found = checks.problems(JobConfig.model_validate(given), PlannedWorld(8, device_type))
        return [each.message for each in found if each.path == "convert.0.name"]

    (note,) = notes("1B", "cuda")
    assert f"was {words} fast as in bf16 on one H100" in note
    assert not notes("8B", "cuda") + notes("1B", "cpu") + notes("1B", "cuda", emulate=True)


def test_shares_are_of_what_vanishes_and_what_is_cut_off() -> None:
    scaled = torch.tensor([0.0, 1e-9, 3.0, 500.0])
    rounding = Rounding(scaled, scaled.to(torch.float8_e4m3fn).float(), torch.tensor([2.0]), 448.0)
    found = {name: float(value) for name, value in rounding.shares().items()}
    assert found == {"underflow": pytest.approx(1 / 3), "saturation": 0.25, "scale": 2.0}
    nothing = torch.zeros(0)
    assert Rounding(nothing, nothing, nothing, 448.0).shares() == {}


@pytest.mark.parametrize(
    "config", [Float8(emulate=True), Float8(recipe="rowwise", emulate=True), MXFP8(emulate=True)]
)
def test_rounding_is_that_of_the_product(config: ConverterConfig) -> None:
    """Multiplied by hand, what is said to be rounded gives what the linear gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    convert.apply(model, [config], None, has_fsdp=False)
    x = torch.randn(32, 64)
    x[:, 0] *= 1e-9  # too small for a scale that fits the others
    factors = []
    for what, tensor in (("input", x), ("weight", model[0].weight)):
        rounding = config.rounding(model[0], what, tensor.detach())  # type: ignore[arg-type]
        assert rounding is not None
        scale = rounding.scale[..., None] if isinstance(config, MXFP8) else rounding.scale
        factors.append((rounding.rounded / scale).reshape(tensor.shape))
        assert float(rounding.shares()["underflow"]) == pytest.approx(
            (what == "input") / 64, abs=1e-3
        )
    torch.testing.assert_close(model(x), factors[0] @ factors[1].T)


def recipe(folder: Path, layout: Case, watched: int) -> JobConfig:
    return layouts.job(
        layout,
        "SGD",
        job={"dump_folder": str(folder)},
        training={"steps": 4},
        metrics={"precision_freq": watched},
    )


@pytest.mark.parametrize(
    ("layout", "lacks"),
    [
        (case(convert=TENSORWISE), ()),
        (case(shard=2, convert=GATHERED), ()),
        pytest.param(case(2, tp=2, convert=ROWWISE), (), marks=pytest.mark.slow),
        # What is gathered for three linears is rounded once.
        pytest.param(
            case(tp=2, convert=SENT_SO),
            ("wk/input", "wv/input", "w3/input"),
            marks=pytest.mark.gate,
        ),
        pytest.param(case(shard=2, tp=2, convert=MICROSCALED), (), marks=pytest.mark.slow),
    ],
)
def test_every_layer_is_reported_and_the_run_is_the_same(
    layout: Case, lacks: tuple[str, ...], tmp_path: Path
) -> None:
    folders = {watched: tmp_path / str(watched) for watched in (0, 2)}
    jobs = [recipe(folder, layout, watched) for watched, folder in folders.items()]
    weights = run_ranks(train_each, layout.ranks, jobs)[0]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
    assert not [row for row in rows(folders[0]) if row.get("event") == "precision"]
    found = [row for row in rows(folders[2]) if row.get("event") == "precision"]
    assert [row["step"] for row in found] == [2, 4]
    for row in found:
        values: dict[str, Any] = {k: v for k, v in row.items() if k.startswith("precision/")}
        tensors = {key.rpartition("/")[0] for key in values}
        linears = {key.split("/")[1] for key in values}
        assert len(linears) == 14
        wanted = {
            f"precision/{n}/{what}" for n in linears for what in ("input", "weight", "gradient")
        }
        missing = {key for key in wanted - tensors if not key.endswith(lacks or ("?",))}
        assert not missing
        assert all(math.isfinite(value) for value in values.values())
        assert all(v > 0 for k, v in values.items() if k.endswith("scale"))
        assert all(0 <= v <= 1 for k, v in values.items() if not k.endswith("scale"))
