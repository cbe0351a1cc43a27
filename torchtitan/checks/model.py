"""Whether the model exists, and can be cut, converted and end in its loss as the recipe says."""

from collections.abc import Iterator

from torch import nn

from torchtitan.checks.layout import DEGREES, SHARD, divisors, smallest_world
from torchtitan.config import Problem, allowed_names
from torchtitan.job import JobConfig
from torchtitan.models import MODELS
from torchtitan.models.attention import attends
from torchtitan.models.output import has_linear_loss
from torchtitan.models.spec import build_empty
from torchtitan.parallel import convert_checks, pipeline_checks


def problems_of_model(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    spec = MODELS[job.model.name]
    if job.model.flavor not in spec.flavors:
        names = allowed_names(job.model.flavor, spec.flavors)
        yield Problem("model.flavor", names, ("model.name",))
        return
    args = job.model_args()
    if misfits := list(job.model.problems(args)):
        yield from (Problem(f"model.{key}", message, ("model",)) for key, message in misfits)
        return
    p, whose = job.parallelism, f"{job.model.name} {job.model.flavor}"
    tp = p.tensor_parallel_degree
    degrees = job.degrees(world_size or smallest_world(job))
    for count, what in ((args.n_heads, "heads"), (args.n_kv_heads, "key/value heads")):
        if count % tp:
            message = f"it does not divide the {count} {what} of {whose}; use {divisors(count)}"
            yield Problem("parallelism.tensor_parallel_degree", message, ("model",))
    size, batch = p.pipeline_parallel_microbatch_size, job.training.local_batch_size
    if p.pipeline_parallel_degree > 1 and batch % size:
        message = f"it does not divide training.local_batch_size {batch}; use {divisors(batch)}"
        rests_on = ("training.local_batch_size", *DEGREES)
        yield Problem("parallelism.pipeline_parallel_microbatch_size", message, rests_on)
    else:
        for key, message in pipeline_checks.problems(
            p,
            spec,
            args,
            microbatches=p.microbatches(batch),
            recompute=job.activation_checkpoint,
            compile=job.compile,
            functions=functions(job),
        ):
            rests_on = ("model", "training.local_batch_size", "parallelism")
            yield Problem(key, message, rests_on)
    if tp > 1 and not spec.tensor_plan:
        message = f"{job.model.name} does not say how its matrices are split (tensor_plan); use 1"
        yield Problem("parallelism.tensor_parallel_degree", message, ("model",))
    if p.context_parallel_degree > 1 and not attends(build_empty(spec.build, args, 1)):
        message = f"{job.model.name} does not attend by SelfAttention, which spans ranks; use 1"
        yield Problem("parallelism.context_parallel_degree", message, ("model",))
    if -(-args.vocab_size // tp) * (tp - 1) >= args.vocab_size:
        message = f"the {args.vocab_size} tokens of {whose} leave a rank without any; use fewer"
        yield Problem("parallelism.tensor_parallel_degree", message, ("model",))
    if tp > 1 and degrees.fsdp > 0 and args.dim % degrees.fsdp:
        message = (
            f"with tensor_parallel_degree {tp}, columns of matrices are split over the "
            f"{degrees.fsdp} ranks of data_parallel_shard_degree x context_parallel_degree, which "
            f"do not divide the dim {args.dim} of {whose}; use {divisors(args.dim)}"
        )
        yield Problem(SHARD, message, ("model", *DEGREES))


def functions(job: JobConfig) -> list[str]:
    """What has the model compute by autograd functions written in Python."""
    keys = {"loss.vocabulary_chunk": job.loss.vocabulary_chunk, "[[convert]]": job.convert}
    return [key for key, value in keys.items() if value]


def problems_of_converters(job: JobConfig) -> Iterator[Problem]:
    spec, p = MODELS[job.model.name], job.parallelism
    if job.metrics.precision_freq and not job.convert:
        message = "no layer is converted, so there is nothing to report; add [[convert]], or use 0"
        yield Problem("metrics.precision_freq", message, ("convert",))
    if not job.convert or job.model.flavor not in spec.flavors:
        return
    model = build_empty(spec.build, job.model_args(), 1)
    in_pipeline = p.pipeline_parallel_degree > 1
    sequences = (
        p.pipeline_parallel_microbatch_size if in_pipeline else job.training.local_batch_size
    )
    tokens = sequences * job.training.seq_len // p.context_parallel_degree
    for key, message in convert_checks.problems(
        job.convert, p, job.sharding, model, spec.tensor_plan, tokens
    ):
        yield Problem(key, message, ("convert", "model", "training", "parallelism"))


def problems_of_loss(job: JobConfig) -> Iterator[Problem]:
    """What cannot be where the model computes its loss itself."""
    spec, key = MODELS[job.model.name], "loss.vocabulary_chunk"
    if not job.loss.vocabulary_chunk or job.model.flavor not in spec.flavors:
        return
    model = build_empty(spec.build, job.model_args(), 1)
    if not has_linear_loss(model):
        message = f"{job.model.name} does not end in LinearLoss, which makes the chunks; use 0"
        yield Problem(key, message, ("model",))
    outputs = [name for name in spec.after_blocks if type(model.get_submodule(name)) is nn.Linear]
    for number, converter in enumerate(job.convert):
        for name in outputs:
            if not any(part in name for part in converter.filter_fqns):
                message = (
                    f"the loss multiplies with the weight of {name} itself, so {converter.name} "
                    f'would not act there; add "{name}" to its filter_fqns (convert.{number}), or '
                    "use 0"
                )
                yield Problem(key, message, ("model", "convert"))
