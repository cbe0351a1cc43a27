"""Checks of mixtures of experts, and of their placement on ranks."""

from collections.abc import Iterator

from torchtitan.checks.divisibility import DEGREES, SHARD, alternatives, divisors
from torchtitan.checks.model import RecipeModel, model_of
from torchtitan.config import PlannedWorld, Problem
from torchtitan.job import JobConfig
from torchtitan.models.sparse_decoder import SparseArgs


def bias(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that routers have the bias that is to be updated, by counts of all ranks."""
    model, key = model_of(job), "experts.bias_update_rate"
    if model is None:
        return
    is_sparse = isinstance(model.args, SparseArgs)
    has_bias = is_sparse and model.args.router_bias
    if job.experts.bias_update_rate is not None and not has_bias:
        reason = "its routers have no bias; set model.router_bias = true, or leave it out"
        if not is_sparse:
            reason = "it has no experts; leave it out"
        yield Problem(key, f"{model.title}: {reason}", ("model",))
    counts = has_bias or (is_sparse and model.args.load_balance)
    if counts and job.fault_tolerance.enable:
        message = (
            "each replica group would balance the experts by its own tokens; use experts without "
            "model.router_bias and load_balance, or no replica groups"
        )
        yield Problem("fault_tolerance.enable", message, ("model", "auxiliary_losses", "experts"))


DEGREE = "parallelism.expert_parallel_degree"


def parallelism(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that ranks can have different experts, as many each."""
    model, degree = model_of(job), job.parallelism.expert_parallel_degree
    if model is None or degree == 1:
        return
    args = model.args
    if not isinstance(args, SparseArgs):
        yield Problem(DEGREE, f"{model.title} has no experts; use 1", ("model",))
        return
    shared = job.degrees(world.ranks).fsdp
    if args.n_experts % degree:
        use = f"use {divisors(args.n_experts)}"
        message = f"it does not divide the {args.n_experts} experts of {model.title}; {use}"
        yield Problem(DEGREE, message, ("model",))
    elif shared > 0 and shared % degree:
        fits = (n for n in range(1, shared + 1) if shared % n == args.n_experts % n == 0)
        message = (
            f"it does not divide the {shared} ranks of data_parallel_shard_degree x "
            f"context_parallel_degree; use {alternatives(fits)}"
        )
        yield Problem(DEGREE, message, DEGREES)
    elif shared > 0:
        yield from _split_further(model, shared // degree, degree)
    if not job.sharding.places_experts:
        message = f'sharding.name = "{job.sharding.name}" has no expert parallelism; use 1, or '
        yield Problem(DEGREE, f'{message}"fsdp2" there', ("sharding.name",))
    elif job.sharding.neighbors:
        message = "the ranks of an expert are others than those of the rest; use 0"
        yield Problem("sharding.regather_size", message, (DEGREE,))
    for what in ("weights", "gradients"):
        if (name := getattr(job.communication, what).name) != "plain":
            message = f'with {DEGREE} {degree}, {what} cannot be sent by "{name}"; use "plain"'
            yield Problem(f"communication.{what}.name", message, (DEGREE,))


def _split_further(model: RecipeModel, ranks: int, degree: int) -> Iterator[Problem]:
    """Check that the ranks with the same experts can share them."""
    own, dim = model.args.n_experts // degree, model.args.dim
    if own % ranks and dim % ranks:
        message = (
            f"with expert_parallel_degree {degree}, {own} experts are split over {ranks} ranks of "
            "data_parallel_shard_degree x context_parallel_degree, which divide neither them nor "
            f"the dim {dim} of {model.title}; use another degree there"
        )
        yield Problem(SHARD, message, ("model", *DEGREES))
