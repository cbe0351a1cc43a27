"""Every schedule computes what one rank computes: loss, all gradients, and the held-out loss."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests import tiny
from tests.ranks import run_ranks
from tests.runs import whole
from torchtitan.comm import CommunicationConfig
from torchtitan.device import Device
from torchtitan.losses import cross_entropy
from torchtitan.models.initialize import initialize
from torchtitan.models.llama3.spec import LLAMA3
from torchtitan.models.spec import build_empty
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    ParallelismConfig,
    activation_checkpoint,
    stages,
)
from torchtitan.parallel.compile import CompileConfig
from torchtitan.parallel.loss_terms import AuxiliaryLosses
from torchtitan.parallel.pipeline import Pipeline, Shapes
from torchtitan.parallel.schedules import SCHEDULES, order
from torchtitan.parallel.settings import ReshardPolicy
from torchtitan.parallel.sharding import FSDP2, Precision, Sharding, ShardingTarget
from torchtitan.tasks.next_token import TokenBatch
from torchtitan.timeline import Timeline
from torchtitan.torch_private.pipeline_stages import pipeline_order

ARGS = dataclasses.replace(tiny.ARGS, n_layers=8)
SEQ_LEN = 16
BATCH = 4
ACCUMULATION = 2
MICROBATCHES = BATCH * ACCUMULATION


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline, and what else its ranks do."""

    config: ParallelismConfig
    replicate: int = 1
    shard: int = 1
    document_mask: bool = False
    reshard: ReshardPolicy = "never"
    compute: torch.dtype = torch.float32
    recompute: Literal["none", "full"] = "none"
    tolerance: float = 1e-5
    """Of each tensor, in parts of its largest value."""

    @property
    def pp(self) -> int:
        return self.config.pipeline_parallel_degree

    @property
    def data(self) -> int:
        return self.replicate * self.shard


def case(pp: int, schedule: str = "1F1B", parts: Sequence[Any] = (), **rest: Any) -> Case:
    """A pipeline in short: keys of [parallelism], the others fields of `Case`."""
    own = {key: value for key, value in rest.items() if key in Case.__dataclass_fields__}
    keys = {"degree": pp, "schedule": schedule} | {k: v for k, v in rest.items() if k not in own}
    config = ParallelismConfig(
        module_fqns_per_model_part=parts,
        **{f"pipeline_parallel_{key}": value for key, value in keys.items()},
    )
    return Case(config, **own)


def draw(part: nn.Module) -> nn.Module:
    part.to_empty(device="cpu")
    part.init_buffers()
    initialize(part.named_parameters(), lambda name: LLAMA3.init_std(ARGS, name), seed=1)
    return part


def read(rank: int, step: int) -> list[TokenBatch]:
    """The batches of a data-parallel rank; the targets that count differ in number."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = []
    for _ in range(ACCUMULATION):
        ids = torch.randint(ARGS.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
        length = torch.randint(1, SEQ_LEN + 1, (BATCH, 1), generator=generator)
        at = torch.arange(SEQ_LEN).expand(BATCH, -1)
        start = torch.randint(1, SEQ_LEN, (BATCH, 1), generator=generator)
        batches.append(
            TokenBatch(
                tokens=ids[:, :-1],
                targets=ids[:, 1:].masked_fill(at >= length, -100),
                positions=torch.where(at < start, at, at - start),
                documents=(at >= start).long(),
            )
        )
    return batches


def seen(case: Case, data_rank: int, step: int) -> list[TokenBatch]:
    """The same, without documents where attention does not ask for them."""
    batches = read(data_rank, step)
    if case.document_mask:
        return batches
    return [dataclasses.replace(batch, documents=None) for batch in batches]


def one_rank(case: Case, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, number of targets and gradients of the global batch on one rank."""
    model = draw(build_empty(LLAMA3.build, ARGS, SEQ_LEN))
    batches = [batch for rank in range(case.data) for batch in read(rank, step)]
    tokens = sum(batch.count() for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        documents = batch.documents if case.document_mask else None
        logits = model(batch.tokens, batch.positions, documents)
        loss = cross_entropy(logits, batch.targets) / tokens
        loss.backward()
        total += loss.detach()
    return total, tokens, {name: p.grad for name, p in model.named_parameters()}


def pipeline(case: Case, mesh: Any) -> tuple[Pipeline, Sharding]:
    model = build_empty(LLAMA3.build, ARGS, SEQ_LEN)
    group = mesh["pp"].get_group()
    plan = stages.plan(case.config, LLAMA3, ARGS, model, SEQ_LEN)
    parts = [stages.build(model, plan, stage) for stage in plan.of(dist.get_rank(group))]
    sharding = FSDP2().open(
        ShardingTarget(
            mesh=mesh["dp_replicate", "dp_shard"],
            tensor_mesh=mesh["dp_shard"],
            precision=Precision(compute=case.compute),
            reshard=case.reshard,
            last_block=list(LLAMA3.blocks(model))[-1],
            ends=LLAMA3.ends(ARGS),
            compile=CompileConfig(),
            communication=CommunicationConfig(),
            cpu_offload=False,
            device_type="cpu",
        )
    )
    for part in parts:
        named = LLAMA3.blocks(part)
        recompute = ActivationCheckpointConfig(mode=case.recompute)
        activation_checkpoint.apply(named, list(LLAMA3.blocks(model)), recompute)
        if case.data > 1 or case.compute != torch.float32:
            sharding.apply(part, named)
    for part in parts:
        draw(part)
    size = case.config.pipeline_parallel_microbatch_size
    run = Pipeline(
        parts,
        plan,
        group,
        case.config,
        timeline=Timeline(Device("cpu")),
        microbatches=MICROBATCHES // size,
        shapes=Shapes(
            inputs=(size, SEQ_LEN),
            input_dtype=torch.int64,
            hidden=((size, SEQ_LEN, ARGS.dim),) * len(plan.units),
            outputs=(size, SEQ_LEN, ARGS.vocab_size),
            dtype=case.compute,
        ),
        loss=cross_entropy,
        device=torch.device("cpu"),
        auxiliary=AuxiliaryLosses([]),
    )
    return run, sharding


def compare(cases: Sequence[Case]) -> list[list[int]]:
    """Train, evaluate and train again, on this rank, for each case; its stages."""
    found = []
    for case in cases:
        degrees = (case.pp, case.replicate, case.shard)
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
        run, sharding = pipeline(case, mesh)
        data_rank = dist.get_rank() % case.data
        try:
            for step in (0, 1):
                loss, tokens, gradients = one_rank(case, step)
                share = run.forward_backward(
                    [TokenBatch.join(seen(case, data_rank, step))], tokens
                )["loss"]
                assert not share.requires_grad
                assert (share != 0) == (run.last in run.parts)
                close(summed(share), loss, case.tolerance)
                names = set()
                for part in run.parts.values():
                    for name, parameter in part.named_parameters():
                        names.add(name)
                        close(whole(parameter.grad), gradients[name], case.tolerance, name)
                        parameter.grad = None
                everywhere: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, names)
                assert set().union(*everywhere) == gradients.keys()
                share = run.evaluate(seen(case, data_rank, step))
                sharding.after_evaluate()
                assert not share.requires_grad
                close(summed(share) / tokens, loss, case.tolerance)
        except AssertionError as error:
            error.add_note(str(case))
            raise
        found.append(list(run.parts))
    return found


def summed(share: Tensor) -> Tensor:
    dist.all_reduce(share)
    return share


def close(found: Tensor, expected: Tensor, tolerance: float, what: str = "loss") -> None:
    difference = (found - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance, f"{what} is off by {difference} of its largest value"


def schedule_file(path: Path, rows: Sequence[Sequence[Any]]) -> str:
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return str(path)


def files(folder: Path) -> list[str]:
    """Orders that a file can say and a name cannot, and two of torch's."""
    counts = range(MICROBATCHES)
    mine = [
        [
            *(f"0F{i}" for i in counts),
            "",
            *(f"2{kind}{i}" for i in counts for kind in "FB"),
            *(f"0{kind}{i}" for i in reversed(counts) for kind in "IW"),
        ],
        [*(f"1F{i}" for i in counts), *(f"1B{i}" for i in counts)],
    ]
    dual = pipeline_order("DualPipeV", 4, 2, MICROBATCHES)
    return [
        schedule_file(folder / "three_stages.csv", mine),
        schedule_file(folder / "one.csv", list(order("1F1B", 2, 2, MICROBATCHES).values())),
        schedule_file(folder / "dual.csv", list(dual.values())),
    ]


LAYERS = [f"layers.{i}" for i in range(ARGS.n_layers)]
BY_HAND = (("tok_embeddings", *LAYERS[:1]), (*LAYERS[1:], "norm", "output"))
ALONE = (("tok_embeddings",), LAYERS[:3], LAYERS[3:], ("norm", "output"))


@pytest.mark.gate
def test_every_schedule_on_two_ranks(tmp_path: Path) -> None:
    cases = {
        **{name: case(2, name) for name in SCHEDULES},
        **{Path(path).name: case(2, schedule_csv=path) for path in files(tmp_path)},
        "by hand": case(2, parts=BY_HAND),
        "embedding and head alone": case(2, "Interleaved1F1B", parts=ALONE),
        "many stages": case(2, "InterleavedZeroBubble", layers_per_stage=1),
        "larger microbatches": case(2, "DualPipeV", microbatch_size=2),
        "documents": case(2, "ZBVZeroBubble", document_mask=True),
        "recomputation": case(2, "ZBVZeroBubble", recompute="full"),
    }
    first, second = (
        dict(zip(cases, found, strict=True)) for found in run_ranks(compare, 2, [*cases.values()])
    )
    assert (first["1F1B"], second["1F1B"]) == ([0], [1])
    assert (first["LoopedBFS"], second["LoopedBFS"]) == ([0, 2], [1, 3])
    assert (first["DualPipeV"], second["DualPipeV"]) == ([0, 3], [1, 2])
    assert (first["dual.csv"], second["dual.csv"]) == ([0, 3], [1, 2])
    assert (first["three_stages.csv"], second["three_stages.csv"]) == ([0, 2], [1])
    assert (first["many stages"], second["many stages"]) == ([0, 2, 4, 6], [1, 3, 5, 7])


@pytest.mark.gate
def test_four_ranks() -> None:
    names = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    run_ranks(compare, 4, [case(4, name) for name in names])


SHARDED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
COPIED = ("GPipe", "InterleavedZeroBubble")


@pytest.mark.gate
def test_stages_that_are_sharded_or_copied() -> None:
    """Gradients are summed once, and divided by nothing."""
    cases = [
        *(case(2, name, shard=2, microbatch_size=2) for name in SHARDED),
        *(case(2, name, replicate=2, microbatch_size=2) for name in COPIED),
        case(2, "Interleaved1F1B", shard=2, microbatch_size=2, reshard="always"),
    ]
    run_ranks(compare, 4, cases)


@pytest.mark.gate
def test_stages_that_compute_in_bfloat16() -> None:
    loose = {"compute": torch.bfloat16, "tolerance": 0.1}
    run_ranks(compare, 2, [case(2, name, **loose) for name in ("1F1B", "ZBVZeroBubble")])
