"""docs/systems.md names only what there is, and quotes figures of today's code.

Each figure is on the page that it links to. Bytes that are sent are planned again, as are those on
the pages of results.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from torchtitan.models import MODELS
from torchtitan.models.spec import build_empty
from torchtitan.optim import OPTIMIZERS
from torchtitan.plan.comparison import planned_collectives
from torchtitan.plan.plan import plan
from torchtitan.tools.compare.study import prepare, read_study

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "systems.md"
HEAD = ("system", "measured here", "not reproduced")
SYSTEMS = (
    *("FSDP", "SimpleFSDP", "TorchTitan", "GaLore", "DeMo", "FlexDeMo", "LoCo", "QSDP", "RTP"),
    *("8-bit optimizers", "4-bit states", "QK-clip", "DiLoCo"),
    *("HadaCore", "Ranger21", "Geospatial ViT-MAE", "Auxiliary tasks"),
)


def table():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(head) == HEAD
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


ROWS = table()
SINGLE_NUMBERS = 0.002
"""Megabytes of losses, counts and norms at most, of which a plan has a part."""


def test_every_system_has_a_row():
    named = {name for row in ROWS for name in re.findall(r"\*\*(.+?)\*\*", row["system"])}
    assert named == set(SYSTEMS)
    assert all("https://arxiv.org/abs/" in row["system"] for row in ROWS)
    assert all(row["measured here"] and row["not reproduced"] for row in ROWS)


def test_figures_stand_where_they_link_to():
    quoted = [found for row in ROWS for found in FIGURE.findall(row["measured here"])]
    assert len(quoted) >= 8
    for words, path in quoted:
        page = (PAGE.parent / path).resolve().read_text()
        numbers = re.findall(r"\d[\d.,]*\d|\d", words)
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", page), (number, path)
        assert numbers, words


def test_measurements_have_the_day_of_their_page():
    for row in ROWS:
        pages = re.findall(r"\]\((\.\./benchmarks/results/\w+\.md)\)", row["measured here"])
        dated = re.findall(r"\]\((\S+)\) \((\d{4}-\d\d-\d\d)\)", row["measured here"])
        assert [path for path, _ in dated] == pages
        for path, day in dated:
            assert day in (PAGE.parent / path).resolve().read_text(), row["system"]


FIGURE = re.compile(r"\[([^]]+)\]\(([^)#]+\.md)(?:#[^)]*)?\)")


def measured_here(system):
    (row,) = [row for row in ROWS if f"**{system}**" in row["system"]]
    return row["measured here"]


@cache
def sent(study, *flags):
    """Megabytes that rank 0 sends in a step of each variant, by axis, by its plan."""
    found = {}
    for variant in prepare(read_study(ROOT / f"train_configs/studies/{study}.toml", flags)):
        axes = {}
        planned = plan(variant.job, variant.plan.ranks, device_type="cpu")
        for (axis, _), (_, size) in planned_collectives(planned).items():
            axes[axis] = axes.get(axis, 0.0) + size / 1e6
        found[variant.name] = axes
    return found


@pytest.mark.gate
@pytest.mark.parametrize(
    ("system", "study", "axis", "variants"),
    [
        ("FSDP", "fsdp_debug", "dp_shard", ("full shard", "grad-op")),
        ("SimpleFSDP", "communication_debug", "dp_shard", ("SimpleFSDP", "FSDP2")),
        ("DeMo", "communication_debug", "dp_replicate", ("DeMo 2 x 2", "HSDP 2 x 2")),
        ("LoCo", "communication_debug", "dp_shard", ("LoCo, 4 bits", "FSDP2")),
        ("QSDP", "communication_debug", "dp_shard", ("QSDP, 8 bits", "FSDP2")),
        ("RTP", "communication_debug", "dp_shard", ("RTP", "FSDP2")),
    ],
)
def test_bytes_that_are_quoted_are_planned(system, study, axis, variants):
    (quoted, _) = FIGURE.findall(measured_here(system))[0]
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", quoted)]
    expected = [sent(study)[variant][axis] for variant in variants]
    # As many digits as are quoted.
    assert numbers == pytest.approx(expected, rel=3e-4, abs=SINGLE_NUMBERS)


@pytest.mark.gate
def test_rotated_weights_send_less_than_fsdp_that_frees_every_block():
    always = sent("communication_debug", "--parallelism.fsdp_reshard_after_forward=always")
    found = {name: always[name]["dp_shard"] for name in ("RTP", "FSDP2")}
    assert found["RTP"] < found["FSDP2"]


@pytest.mark.gate
def test_bytes_on_the_page_of_communication_are_planned():
    text = (ROOT / "benchmarks/results/communication.md").read_text()
    found = dict(bytes_of_page(text))
    expected = sent("communication_debug") | sent("qsdp_debug")
    assert found.keys() == expected.keys()
    for variant, axes in expected.items():
        own = {axis: size for axis, size in found[variant].items() if axis != "all"}
        assert own == pytest.approx(axes, rel=5e-4, abs=SINGLE_NUMBERS), variant


def bytes_of_page(text):
    """Each variant with its megabytes by axis."""
    for line in re.findall(r"^\| \w.*", text, re.MULTILINE):
        name, cell, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        yield name, {axis: float(size) for axis, size in re.findall(SENT, cell)}


SENT = r"(\w+) ([\d.]+)"


def test_states_of_ranger21_are_as_many_as_is_said():
    values = OPTIMIZERS["Ranger21"]().state_bytes(4) / 4
    times = values / (OPTIMIZERS["AdamW"]().state_bytes(4) / 4)
    assert f"[{values:g} values for each parameter, {times:g} times as" in measured_here("Ranger21")


def test_sizes_of_vision_models_are_those_of_the_page():
    spec, page = MODELS["vit_mae"], (ROOT / "docs/vision.md").read_text()
    encoders = []
    for flavor in ("base", "huge", "1B", "3B", "5B", "15B"):
        model = build_empty(spec.build, spec.flavors[flavor], 1)
        sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        encoder = ("embeddings.", "layers.", "bridge.norm.")
        own = sum(size for name, size in sizes.items() if name.startswith(encoder))
        table = model.get_buffer("embeddings.positions.table").numel()
        encoders.append(f"{(own + table) / 1e6:,.1f}M")
        cells = rf"{encoders[-1]} \| {sum(sizes.values()) / 1e6:,.1f}M"
        assert re.search(rf"^\| `{flavor}` .*\| {cells} \|$", page, re.MULTILINE)
    assert f"[{encoders[0]} to {encoders[-1]} parameters]" in measured_here("Geospatial ViT-MAE")
