"""GaLore on one rank: its parts against numpy, and what it keeps of each matrix."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan.checks import load_job
from torchtitan.device import GIB
from torchtitan.models import MODELS
from torchtitan.models.decoder import DecoderArgs
from torchtitan.models.spec import build_empty
from torchtitan.optim import AdamW, Muon, Optimizers, name_parameters
from torchtitan.optim.adam_and_sgd import STATE_DTYPES
from torchtitan.optim.grouping import assign
from torchtitan.optim.parameters import NamedParameter
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.plan import plan
from torchtitan.research.galore.galore import GaLore, state_elements
from torchtitan.research.galore.low_rank import Method, Projection, Reduced, complete, find_bases


def decaying(rows, columns, seed=0, power=0.7):
    """A matrix whose singular values are 1, 2^-power, 3^-power and so on."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    u, s, v = torch.linalg.svd(random, full_matrices=False)
    values = torch.arange(1, len(s) + 1, dtype=torch.float64) ** -power
    return (u * values @ v).float()


def parameter(gradient, name="w"):
    tensor = torch.nn.Parameter(torch.zeros_like(gradient))
    tensor.grad = gradient.clone()
    return NamedParameter(tensor, name, "matrix")


def basis(gradient, rank, method, projected=1):
    (found,) = find_bases([Projection(parameter(gradient), rank, projected)], ["0"], method)
    return found


EXACT = Method(exact=True)


@pytest.mark.parametrize("projected", [0, 1])
def test_exact_vectors_are_those_of_numpy_with_fixed_signs(projected):
    gradient = decaying(40, 24)
    u, _, v = np.linalg.svd(gradient.double().numpy())
    expected = (v.T if projected else u)[:, :6]
    expected = expected * np.sign(expected[np.abs(expected).argmax(0), range(6)])
    np.testing.assert_allclose(basis(gradient, 6, EXACT, projected), expected, atol=1e-6)


def energy(gradient, found):
    """The part of a gradient's square that its projection has."""
    return ((gradient @ found).square().sum() / gradient.square().sum()).item()


def test_random_vectors_are_exact_where_the_gradient_is_of_low_rank():
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, 5, generator=generator) for size in (60, 40))
    gradient = left @ right.T
    for rank in (3, 5):
        found = basis(gradient, rank, Method(exact=False, power_iterations=0))
        exact = basis(gradient, rank, EXACT)
        torch.testing.assert_close(found, exact, atol=2e-6, rtol=0)


def test_power_iterations_find_as_much_as_exact_vectors():
    gradient = decaying(256, 128)
    exact = energy(gradient, basis(gradient, 16, EXACT))
    shares = [
        energy(gradient, basis(gradient, 16, Method(False, passes, 8))) / exact
        for passes in range(3)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.99 < shares[1] < shares[2] < 1
    assert energy(gradient, basis(gradient, 16, Method(False, 0, 0))) < shares[0] * exact


def test_float32_finds_what_float64_does():
    gradient = decaying(256, 128)
    wide, narrow = (
        basis(gradient, 16, Method(False, 2, 8, dtype)) for dtype in (torch.float64, torch.float32)
    )
    assert energy(gradient, narrow) == pytest.approx(energy(gradient, wide), rel=1e-4)
    torch.testing.assert_close(narrow.T @ narrow, torch.eye(16), atol=2e-6, rtol=0)


@pytest.mark.parametrize("method", [EXACT, Method(False, 1, 4)], ids=["exact", "random"])
def test_a_basis_is_whole_where_the_gradient_has_fewer_directions(method):
    left = torch.randn(30, 2, generator=torch.Generator().manual_seed(2))
    found = basis(left @ left.T[:, :20], 6, method)
    torch.testing.assert_close(found.T @ found, torch.eye(6), atol=1e-6, rtol=0)
    nothing = basis(torch.zeros(30, 20), 6, method)
    torch.testing.assert_close(nothing.T @ nothing, torch.eye(6), atol=1e-6, rtol=0)


def test_the_largest_component_of_each_column_is_positive():
    vectors = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(3))).Q
    found = complete(vectors, 4)
    assert torch.equal(found, complete(-vectors, 4))
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()
    squares = Reduced(decaying(9, 9).double() @ decaying(9, 9).double().T)
    assert squares.basis(3).shape == (9, 3)


class Oracle:
    """The published algorithm on one matrix, by numpy, in float64."""

    def __init__(self, weight, config):
        self.weight, self.config = weight.double().numpy().copy(), config
        self.rank, self.step = config.rank_of(weight.shape), 0
        self.on_columns = config.projected_dim(weight.shape) == 1
        self.first = 0.0
        self.second = 0.0
        self.rounded = None
        """Basis as it is stored, if that is rounded."""

    def update(self, gradient):
        c, grad = self.config, gradient.double().numpy()
        grad = grad if self.on_columns else grad.T
        if self.step % c.refresh_period == 0:
            basis = np.linalg.svd(grad)[2].T[:, : self.rank]
            basis = basis * np.sign(basis[np.abs(basis).argmax(0), range(self.rank)])
            if self.step and c.moments == "rotate":
                turn = self.basis.T @ basis
                self.first, self.second = self.first @ turn, self.second @ turn**2
            self.basis = basis if self.rounded is None else self.rounded
        self.step += 1
        low = grad @ self.basis
        self.first = c.beta1 * self.first + (1 - c.beta1) * low
        self.second = c.beta2 * self.second + (1 - c.beta2) * low**2
        root = np.sqrt(self.second / (1 - c.beta2**self.step)) + c.eps
        update = self.first / (1 - c.beta1**self.step) / root @ self.basis.T
        self.weight *= 1 - c.lr * c.weight_decay
        self.weight -= c.lr * c.scale * (update if self.on_columns else update.T)


@pytest.mark.parametrize("project", ["shorter", "longer", "rows", "columns"])
@pytest.mark.parametrize("moments", ["keep", "rotate"])
def test_updates_are_those_of_numpy(project, moments):
    config = GaLore(lr=0.1, rank=4, refresh_period=2, project=project, moments=moments, svd="exact")
    for shape in ((12, 8), (8, 12), (8, 8)):
        one = NamedParameter(torch.nn.Parameter(decaying(*shape, seed=9)), "w", "matrix")
        optimizer, oracle = Optimizers([one], config), Oracle(one.tensor.detach(), config)
        for step in range(5):
            gradient = decaying(*shape, seed=step)
            one.tensor.grad = gradient.clone()
            optimizer.step()
            oracle.update(gradient)
            found = one.tensor.detach().double().numpy()
            np.testing.assert_allclose(found, oracle.weight, atol=2e-6)


@pytest.mark.parametrize(
    ("project", "theirs"),
    [("shorter", "std"), ("longer", "reverse_std"), ("rows", "left"), ("columns", "right")],
)
def test_a_period_is_that_of_pytorch_optimizer(project, theirs):
    """Without decay, which it applies after the update, and eps, which it adds to another root.

    Beyond a period it differs: it does not fix signs, while it keeps the moments, and its second
    period begins at step `refresh_period`, counted from 1.
    """
    from pytorch_optimizer import GaLore as Reference

    for shape in ((12, 8), (8, 12)):
        one, other = parameter(decaying(*shape)), parameter(decaying(*shape))
        config = GaLore(
            lr=0.1, beta2=0.99, eps=1e-12, weight_decay=0, rank=4, project=project, svd="exact"
        )
        optimizer = Optimizers([one], config)
        group = {"rank": 4, "update_proj_gap": 200, "scale": 0.25, "projection_type": theirs}
        reference = Reference(
            [{"params": [other.tensor], **group}], lr=0.1, betas=(0.9, 0.99), eps=1e-12
        )
        for step in range(4):
            for each in (one, other):
                each.tensor.grad = decaying(*shape, seed=step)
            optimizer.step()
            reference.step()
        torch.testing.assert_close(one.tensor, other.tensor, atol=2e-6, rtol=0)


def test_a_full_rank_in_the_basis_of_the_weights_is_adamw():
    """Where the first gradient is diagonal, its singular vectors are those of the weights."""
    gradients = [torch.diag(torch.arange(6.0, 0, -1)), *(decaying(6, 6, seed) for seed in (1, 2))]
    one, other = parameter(gradients[0]), parameter(gradients[0])
    config = GaLore(lr=0.1, rank=6, scale=1.0, svd="exact")
    optimizers = Optimizers([one], config), Optimizers([other], AdamW(lr=0.1, eps=config.eps))
    for gradient in gradients:
        for parameters, optimizer in zip((one, other), optimizers, strict=True):
            parameters.tensor.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(one.tensor, other.tensor, atol=1e-6, rtol=0)


def test_state_elements_are_those_of_the_formula():
    spec = MODELS["llama3"]
    network = build_empty(spec.build, spec.flavors["debugmodel"], 8).to_empty(device="cpu")
    parameters = name_parameters([network], spec.role)
    for project in ("shorter", "longer", "rows", "columns"):
        config = GaLore(rank=16, project=project)
        states = dict(Optimizers(parameters, config).states())
        count = 0
        for one in parameters:
            found = {
                name.rpartition(".")[2]: state.numel()
                for name, state in states.items()
                if name.startswith(f"{one.name}.")
            }
            if one.role != "matrix":
                assert not found  # AdamW's are made in its first update
                continue
            (m, n), r = one.shape, 16
            kept = {"shorter": max(m, n), "longer": min(m, n), "rows": n, "columns": m}[project]
            assert found["exp_avg"] == found["exp_avg_sq"] == r * kept
            assert found["projector"] == r * (m + n - kept)
            elements = state_elements(one.shape, r, config.projected_dim(one.shape))
            assert sum(elements) == 2 * r * kept + r * (m + n - kept)
            count += sum(elements)
        assert count == sum(states[n].numel() for n in states if not n.endswith(".step"))


def test_what_is_no_matrix_is_refused_by_name():
    parameters = [
        NamedParameter(torch.empty(shape, device="meta"), name, "matrix")
        for name, shape in {"a.0.w": (8, 6), "a.1.w": (8, 6), "experts": (2, 8, 8)}.items()
    ]
    found = [f"{p.path}: {p.message}" for p in GaLore(rank=7).parameter_problems(parameters)]
    assert found == [
        "name: only matrices of two dims are projected, and experts have others",
        "rank: it is above the smaller side of a.*.w (8 x 6); use at most 6",
    ]


HAS_FEW_BITS = pytest.mark.skipif("8bit" not in STATE_DTYPES, reason="the system is not there")


@HAS_FEW_BITS
@pytest.mark.parametrize(("dtype", "apart"), [("bfloat16", 2**-8), ("8bit", 0.05), ("4bit", 0.3)])
def test_bases_in_few_bits(dtype, apart):
    """They are near to what float32 has, and updates are those of numpy with what is stored."""
    settings = {"lr": 0.1, "rank": 32, "refresh_period": 2, "svd": "exact"}
    config = GaLore(moments="rotate", basis_dtype=dtype, **settings)
    one = parameter(decaying(256, 128))
    optimizer, oracle = Optimizers([one], config), Oracle(one.tensor.detach(), config)
    for step in range(4):
        gradient = decaying(256, 128, seed=step)
        exact = basis(gradient, 32, EXACT)
        one.tensor.grad = gradient.clone()
        optimizer.step()
        stored = config.basis_storage.values(dict(optimizer.states())["w.projector"]).float()
        if step % 2 == 0:
            assert 0 < (stored - exact).norm() / exact.norm() < apart
            oracle.rounded = stored.double().numpy()
        oracle.update(gradient)
        found = one.tensor.detach().double().numpy()
        np.testing.assert_allclose(found, oracle.weight, atol=5e-6)
    state = optimizer.state_dict()
    assert state["w.projector"].dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    for other in (dtype, "parameter"):
        changed = config.model_copy(update={"basis_dtype": other})
        resumed = Optimizers([parameter(decaying(256, 128))], changed)
        loaded = resumed.state_dict()
        for name, tensor in loaded.items():
            tensor.copy_(state[name])
        resumed.load_state_dict(loaded)
        again = resumed.state_dict()["w.projector"]
        assert torch.equal(again.float(), state["w.projector"].float())


@HAS_FEW_BITS
@pytest.mark.usefixtures("uncompiled")
def test_moments_in_few_bits():
    """Of the moments only: what few bits leave of the update is near to what all leave."""
    weights = {}
    for dtype in ("parameter", "8bit", "bfloat16"):
        one = parameter(decaying(256, 128))
        config = GaLore(lr=0.1, rank=32, refresh_period=2, moments="rotate", state_dtype=dtype)
        optimizer = Optimizers([one], config)
        for step in range(4):
            one.tensor.grad = decaying(256, 128, seed=step)
            optimizer.step()
        weights[dtype] = one.tensor.detach().clone()
        states = dict(optimizer.states())
        assert (states["w.exp_avg"].dtype == torch.bfloat16) == (dtype == "bfloat16")
        assert hasattr(states["w.exp_avg"], "codes") == (dtype == "8bit")
        assert states["w.projector"].dtype == torch.float32
    moved = weights["parameter"].norm()
    for dtype, allowed in (("8bit", 0.05), ("bfloat16", 0.01)):
        assert 0 < (weights[dtype] - weights["parameter"]).norm() / moved < allowed


def test_groups_have_a_rank_and_a_scale_of_their_own():
    parameters = [parameter(decaying(8, 8), name) for name in ("a", "b")]
    group = {"names": ["b"], "rank": 3, "scale": 0.5}
    config = GaLore(lr=0.1, rank=2, groups=(group,))
    states = dict(Optimizers(parameters, config).states())
    assert [states[f"{name}.exp_avg"].shape for name in "ab"] == [(8, 2), (8, 3)]


@pytest.mark.slow
@HAS_FEW_BITS
def test_the_recipe_of_7b_fits_a_card_of_24_gb():
    """As much as a card reports, with its bases in 8 bits; and these are in the plan."""
    path = Path(__file__).parents[2] / "train_configs/research/galore_7b.toml"
    states = {}
    for dtype in ("8bit", "parameter"):
        flags = ["--model.tokenizer_path", "none", "--optimizer.basis_dtype", dtype]
        job = load_job(path, flags, 1, "cuda").config
        assert job.model_args() == replace(LLAMA_7B, rope_theta=1e4)
        found = plan(job, 1, find_hardware(job.job.hardware), capacity_gib=23.6)
        assert found.fits
        states[dtype] = found.by_kind_gib["optimizer states"]
    elements = 224 * 4096 * 1024
    fewer = elements * (4 - 1 - 4 / 256) / GIB
    assert states["parameter"] - states["8bit"] == pytest.approx(fewer, rel=1e-3)


LLAMA_7B = DecoderArgs(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008, vocab_size=32_000
)


def optimizers_of_7b():
    few, rows = {"rank": 1024, "state_dtype": "8bit"}, {"project": "rows"}
    return {
        "AdamW": AdamW(),
        "AdamW, 8bit": AdamW(state_dtype="8bit"),
        "Muon": Muon(),
        "GaLore, rank 1024": GaLore(rank=1024),
        "GaLore, rank 1024, 8bit": GaLore(**few),
        "GaLore, rank 1024, 8bit, bases in 8bit": GaLore(**few, basis_dtype="8bit"),
        'GaLore, rank 1024, 8bit, `project = "rows"`': GaLore(**few, **rows),
        'GaLore, rank 128, 8bit, `project = "rows"`': GaLore(**few | {"rank": 128}, **rows),
    }


LAYOUTS_OF_7B = {"one rank, DDP": (1, 1), "FSDP 8, HSDP 8 x 8": (8, 1), "FSDP 8 x TP 8": (8, 8)}
"""Ranks that share rows by FSDP, and ranks of tensor parallelism."""


def bytes_of_rank(config, parameters, layout):
    """Of the states of a whole model, those of one rank."""
    (fsdp, tp), total = LAYOUTS_OF_7B[layout], 0.0
    for one in assign(parameters, config):
        role = tensor_role(one.parameter.name)
        rows = fsdp * (tp if role in ("embedding", "colwise", "logits") else 1)
        columns = tp if role == "rowwise" else 1
        rule = one.rule
        if one.parameter.role == "embedding":  # its moments are never in few bits
            rule = rule.model_copy(update={"state_dtype": "parameter"})
        total += rule.bytes_of(one.parameter.shape, 4, rows, columns)
    return total


def tensor_role(name):
    plan = MODELS["llama3"].tensor_plan
    module = name.rpartition(".")[0]
    return next((role for pattern, role in plan.items() if fnmatchcase(module, pattern)), None)


@HAS_FEW_BITS
def test_the_table_of_the_docs_is_the_formula():
    spec = MODELS["llama3"]
    parameters = name_parameters([build_empty(spec.build, LLAMA_7B, 8)], spec.role)
    assert sum(one.shape.numel() for one in parameters) == 6_738_415_616
    page = (Path(__file__).parents[2] / "torchtitan/research/galore.md").read_text()
    for name, config in optimizers_of_7b().items():
        cells = [bytes_of_rank(config, parameters, layout) / GIB for layout in LAYOUTS_OF_7B]
        line = f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
        assert line in page, line
    assert f"| GiB of states on a rank | {' | '.join(LAYOUTS_OF_7B)} |" in page
