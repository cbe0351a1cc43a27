"""Checks of converted layers, and of the loss in chunks."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.checks.model import model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.convert import Conversion, LinearConverterConfig, linears
from torchtitan.job import JobConfig
from torchtitan.models.output import has_linear_loss
from torchtitan.models.spec import TensorRole
from torchtitan.parallel import ParallelismConfig
from torchtitan.tasks import TASKS

SECTIONS = ("convert", "model", "training", "parallelism")


def linear_converters(job: JobConfig) -> Iterator[tuple[int, LinearConverterConfig]]:
    """Yield the converters of linear layers, with their numbers in the recipe."""
    for number, converter in enumerate(job.convert):
        if isinstance(converter, LinearConverterConfig):
            yield number, converter


def sent(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that tensors with a converter's own format are communicated at all."""
    p = job.parallelism
    for number, converter in enumerate(job.convert):
        key = f"convert.{number}"
        if (packs := converter.packs_weights) and not job.sharding.packs_weights:
            message = 'only FSDP2 gathers parameters in this format; use sharding.name = "fsdp2"'
            yield Problem(f"{key}.{packs}", message, ("convert", "sharding"))
        if (gathers := converter.gathers_inputs) and p.tensor_parallel_degree == 1:
            message = "parallelism.tensor_parallel_degree is 1: nothing is gathered; use false"
            yield Problem(f"{key}.{gathers}", message, SECTIONS)
        elif gathers and p.disable_sequence_parallel:
            message = (
                "parts of the sequence are gathered, but with "
                "parallelism.disable_sequence_parallel = true each rank has the whole; use "
                "false here or there"
            )
            yield Problem(f"{key}.{gathers}", message, SECTIONS)


def converters(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that each converter has layers to convert, with shards that it can round."""
    model, p = model_of(job), job.parallelism
    if not job.convert or model is None:
        return
    in_pipeline = p.pipeline_parallel_degree > 1
    local = job.local_batch(job.degrees(world.ranks))
    sequences = p.pipeline_parallel_microbatch_size if in_pipeline else local
    shapes = model.spec.shapes(model.args, job.training.seq_len)
    positions = {shape[0] for shape in (shapes.hidden, *shapes.others.values())}
    what = (
        "tokens at a time (sequences of a microbatch x training.seq_len / context_parallel_degree)"
        if TASKS[model.spec.task].splits_sequences
        else "positions at a time (samples of a microbatch x positions of each in the blocks)"
    )
    products = sorted(sequences * count // p.context_parallel_degree for count in positions)
    network, seen = model.empty(), dict[str, int]()
    for number, converter in linear_converters(job):
        key = f"convert.{number}"
        found = linears(network, converter, Conversion())
        wanted = {name: linear.weight.shape for name, linear in found}
        if not wanted:
            message = (
                "no linear is left to convert: all others have a dim that is not a multiple "
                f"of {converter.multiple}; list fewer names, or remove the converter"
            )
            yield Problem(f"{key}.filter_fqns", message, SECTIONS)
            continue
        if before := {seen[name] for name in wanted if name in seen}:
            earlier = f"convert.{min(before)}"
            message = (
                f"{earlier} already converts some of these linears; exclude them in one of "
                f"the two ({earlier}.filter_fqns or {key}.filter_fqns)"
            )
            yield Problem(f"{key}.name", message, SECTIONS)
        seen |= dict.fromkeys(wanted, number)
        tp, plan = p.tensor_parallel_degree, model.spec.tensor_plan
        is_fast = world.device_type == "cuda" and not converter.emulate
        largest = max(shape.numel() for shape in wanted.values()) // tp
        if is_fast and (ratio := converter.measured(largest)):
            message = f"{ratio}; remove the converter, unless its rounding is what you want"
            yield Problem(f"{key}.name", message, SECTIONS, "note")
        yield from _parts(key, converter, p, wanted, plan)
        if uneven := [str(count) for count in products if count % converter.multiple]:
            message = (
                f"a rank multiplies {' and '.join(uneven)} {what}, but the gradients of the "
                f"weights need a multiple of {converter.multiple}"
            )
            yield Problem(f"{key}.name", message, SECTIONS)


def _parts(
    key: str,
    converter: LinearConverterConfig,
    p: ParallelismConfig,
    wanted: Mapping[str, Sequence[int]],
    plan: Mapping[str, TensorRole],
) -> Iterator[Problem]:
    """Check the shards of linears, which are chosen by their whole shape on all layouts, and their
    inputs."""
    tp, is_whole = p.tensor_parallel_degree, p.disable_sequence_parallel
    for name, (outputs, inputs) in wanted.items() if tp > 1 else ():
        roles = [role for pattern, role in plan.items() if fnmatchcase(name, pattern)]
        split = inputs if roles == ["rowwise"] else outputs
        if roles and split % (tp * converter.multiple):
            message = (
                f"{name} is {outputs} x {inputs}, and its {tp} shards "
                f"(tensor_parallel_degree) are not multiples of {converter.multiple}; add it "
                f"to {key}.filter_fqns, or use a smaller degree"
            )
            yield Problem(f"{key}.filter_fqns", message, SECTIONS)
            return
        if converter.name == "mxfp8" and not is_whole and {*roles} & {"whole", "norm"}:
            message = f"{name} gets a part of each sequence (tensor_parallel_degree {tp}), which "
            message += f"mxfp8 cannot multiply; add it to {key}.filter_fqns"
            yield Problem(f"{key}.filter_fqns", message, SECTIONS)
            return


def loss(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that a model that computes its loss ends in an unconverted linear loss."""
    model, key = model_of(job), "loss.vocabulary_chunk"
    if not job.loss.vocabulary_chunk or model is None:
        return
    if job.parallelism.disable_loss_parallel:
        message = f"it has no effect with {key}, which never gathers logits"
        yield Problem("parallelism.disable_loss_parallel", message, (key,), "note")
    network = model.empty()
    if not has_linear_loss(network):
        message = f"{job.model.name} does not end in a LinearLoss, which computes the chunks; use 0"
        yield Problem(key, message, ("model",))
    after = model.spec.after_blocks
    outputs = [name for name in after if type(network.get_submodule(name)) is nn.Linear]
    for number, converter in linear_converters(job):
        for name in outputs:
            if not any(part in name for part in converter.filter_fqns):
                message = (
                    f"the loss uses the weight of {name} directly, so {converter.name} would "
                    f'have no effect there; add "{name}" to its filter_fqns '
                    f"(convert.{number}), or use 0"
                )
                yield Problem(key, message, ("model", "convert"))
