"""What sends less than all is compared with a model of what is sent."""

import json
import re
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from tests.parallel.test_verify import RECIPES as MAIN_ROAD
from tests.parallel.test_verify import SHARD, can_be_shrunk, verify
from tests.tiers import tiers
from torchtitan.comm import GRADIENTS, REPLICAS
from torchtitan.research.common.quantized import QuantizedReduce
from torchtitan.tools.verify import REFERENCES

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def sent(weights="plain", gradients="plain", replicas="all_reduce", **more):
    """A section of a recipe; `more` are settings, as `replicas_every`."""
    ways = {"weights": weights, "gradients": gradients, "replicas": replicas}
    lines = []
    for way, name in ways.items():
        lines += [f"[communication.{way}]", f'name = "{name}"']
        lines += [
            f"{key.removeprefix(f'{way}_')} = {json.dumps(value)}"
            for key, value in more.items()
            if key.startswith(f"{way}_")
        ]
    return "\n".join(lines) + "\n"


DDP = "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 2\n"
HSDP = "data_parallel_shard_degree = 2\ndata_parallel_replicate_degree = 2\n"
FEW = {"weights_bucket": 64, "gradients_bucket": 64}
LEARNED = {**FEW, "gradients_levels": "learned"}
FOUR_BITS = {"weights_bits": 4, "gradients_bits": 4, "gradients_learn_steps": 1}
LOCO = sent(gradients="loco", gradients_bucket=64)
MODELLED = {
    "LoCo": f"{SHARD}\n{LOCO}",
    "LoCo and TP": f"{SHARD}\ntensor_parallel_degree = 2\n{LOCO}",
    "LoCo and PP": f"{SHARD}\npipeline_parallel_degree = 2\n{LOCO}",
    "LoCo in two hops": HSDP
    + sent(gradients="loco", replicas="loco", gradients_bucket=64, replicas_bucket=64),
    "QSDP": f"{SHARD}\n{sent('qsdp', 'qsdp', **FEW)}",
    "QSDP with learned levels": f"{SHARD}\n{sent('qsdp', 'qsdp', **LEARNED, **FOUR_BITS)}",
    "QSDP and CP": f"{SHARD}\ncontext_parallel_degree = 2\n{sent('qsdp', 'qsdp', **FEW)}",
    "DeMo": HSDP + sent(replicas="demo", replicas_sign=False),
    "DeMo of what two steps moved": DDP
    + sent(replicas="demo", replicas_every=2, replicas_sign=False),
    "slices and TP": f"{DDP}tensor_parallel_degree = 2\n"
    + sent(replicas="slicing", replicas_sign=False),
    "local SGD": DDP + sent(replicas_every=2),
    "local SGD and FSDP": HSDP + sent(replicas_every=2),
    "DiLoCo": DDP + sent(replicas="diloco", replicas_every=2),
    "replicas that never agree": HSDP
    + sent(gradients="qsdp", replicas="none", gradients_bucket=64),
}

MODELLED = {
    name: recipe
    for name, recipe in MODELLED.items()
    if all(
        way in ("plain", "all_reduce", "none") or way in GRADIENTS or way in REPLICAS
        for way in re.findall(r'name = "(.*)"', recipe)
    )
}
"""Those whose systems are there."""


@pytest.mark.parametrize(
    "way",
    tiers(
        MODELLED,
        [name for name in ("local SGD",) if name in MODELLED],
        gate=["QSDP", "LoCo", "DeMo", "DiLoCo"],
    ),
)
def test_what_sends_less_is_compared_with_a_model_of_it(way, capsys):
    assert verify(MODELLED[way], "--steps", "3") == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "\n  everything is computed in float64: " in said
    last = said.splitlines()[-1]
    assert last.startswith("PASS: 3 steps simulated in one process and ")
    # Far less than what is allowed: no number was sent in another code.
    assert float(last.split(" difference ")[1]) < 1e-9


def test_without_a_model_it_is_refused(capsys, monkeypatch):
    monkeypatch.delitem(REFERENCES, "modelled")
    assert verify(MODELLED["local SGD"]) == 2
    assert "the simulation to compare it with is not installed" in capsys.readouterr().err


@pytest.mark.skipif("QSDP" not in MODELLED, reason="a system that is not there")
def test_rows_that_are_cut_differently_are_not_modelled(capsys):
    p = "--parallelism.context_parallel_"
    balanced = (f"{p}degree=2", f"{p}load_balancer=documents")
    assert verify(MODELLED["QSDP"], *balanced, "--model.attn_mask_type=block_causal") == 2
    assert "the simulation to compare them with cuts all rows alike" in capsys.readouterr().err


def test_a_code_that_is_wrong_is_named(capsys, monkeypatch):
    """On ranks alone: a part of what one receives is one code off."""
    whole = QuantizedReduce.__call__

    def spoiled(way, part, sent):
        whole(way, part, sent)
        if isinstance(way.group, ProcessGroup) and way.group.rank() == 1:
            part[1000] += part.abs().max() / 127

    monkeypatch.setattr(QuantizedReduce, "__call__", spoiled)
    assert verify(MODELLED["QSDP"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"FAIL: SGD with momentum, step 1, rank 1: gradient of ", last)


FOLDER = Path(__file__).parents[2] / "train_configs"
RECIPES = sorted({*FOLDER.glob("*.toml"), *FOLDER.glob("research/*.toml")} - {*MAIN_ROAD})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_shrunk(path):
    can_be_shrunk(path)
