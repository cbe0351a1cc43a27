"""Checks of mixtures of experts."""

from collections.abc import Iterator

from torchtitan.checks.model import model_of
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
