"""Checks of pipelines, with a remedy for each mistake."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from torchtitan.checks.divisibility import DEGREES, divisors
from torchtitan.checks.model import model_of
from torchtitan.config import ConfigError, PlannedWorld, Problem, allowed_names, show
from torchtitan.job import JobConfig
from torchtitan.models.output import auxiliary_losses
from torchtitan.models.spec import ModelSpec, build_empty
from torchtitan.parallel import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    schedules,
)
from torchtitan.parallel.schedules import SCHEDULES
from torchtitan.parallel.stages import Unit, number_of_stages, units
from torchtitan.torch_private.compiler import keeps_nodes_of_functions

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
CSV = "parallelism.pipeline_parallel_schedule_csv"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
PARTS = "parallelism.module_fqns_per_model_part"


def pipeline(job: JobConfig, world: PlannedWorld) -> Iterator[Problem]:
    """Check that the schedule's stages and microbatches are possible with this model and batch."""
    model, p, degrees = model_of(job), job.parallelism, job.degrees(world.ranks)
    if (name := p.pipeline_parallel_schedule) not in SCHEDULES:
        yield Problem(SCHEDULE, allowed_names(name, SCHEDULES))
        return
    if model is None or p.pipeline_parallel_degree == 1:
        return
    batch, of = job.local_batch(degrees), "training.local_batch_size"
    if batch != job.training.local_batch_size:
        of = "each rank's share of training.global_batch_size,"
    if batch % p.pipeline_parallel_microbatch_size:
        message = f"it does not divide {of} {batch}; use {divisors(batch)}"
        rests_on = ("training.local_batch_size", "training.global_batch_size", *DEGREES)
        yield Problem("parallelism.pipeline_parallel_microbatch_size", message, rests_on)
        return
    python = {
        "loss.vocabulary_chunk": job.loss.vocabulary_chunk,
        "[[convert]]": job.convert,
        "auxiliary losses": job.auxiliary_losses or auxiliary_losses(model.empty()),
    }
    planned = Planned(
        p,
        model.spec,
        model.args,
        p.microbatches(batch),
        job.activation_checkpoint,
        job.compile,
        [key for key, value in python.items() if value],
    )
    for problem in planned.problems():
        yield problem._replace(also=("model", "training.local_batch_size", "parallelism"))


@dataclass(frozen=True)
class Planned:
    """Pipeline of a recipe."""

    config: ParallelismConfig
    spec: ModelSpec[Any]
    args: Any
    microbatches: int
    """Microbatches per batch of a rank."""
    recompute: ActivationCheckpointConfig
    compile: CompileConfig
    functions: Sequence[str]
    """Keys of features that use autograd functions written in Python."""

    @cached_property
    def network(self) -> nn.Module:
        """The whole model, without memory."""
        return build_empty(self.spec.build, self.args, 1)

    @property
    def layers(self) -> int:
        """Number of blocks of the model."""
        return len(self.spec.blocks(self.network))

    def problems(self) -> Iterator[Problem]:
        """Find all problems."""
        name = self.config.pipeline_parallel_schedule
        if self.spec.tied(self.args):
            message = (
                "the output shares the weights of the embedding, which would be on another "
                "stage; use 1, or a flavor with a separate output"
            )
            yield Problem(DEGREE, message)
        if self.config.pipeline_parallel_schedule_csv:
            yield from self.file_problems()
        else:
            stages = number_of_stages(self.config, self.layers)
            yield from self.stage_problems(stages)
            yield from self.cut_problems(stages)
            yield from self.microbatch_problems(stages)
            if SCHEDULES[name].splits_backward:
                yield from self.split_backward_problems(SCHEDULE)

    def file_problems(self) -> Iterator[Problem]:
        config = self.config
        try:
            orders = schedules.read(config.pipeline_parallel_schedule_csv)
        except ConfigError as error:
            yield Problem(CSV, str(error))
            return
        found = list(
            schedules.order_problems(orders, config.pipeline_parallel_degree, self.microbatches)
        )
        yield from (Problem(CSV, fault) for fault in found)
        if found:
            return
        stages = len(schedules.ranks(orders))
        if config.pipeline_parallel_layers_per_stage is not None:
            message = f"the file {CSV} has {stages} stages already; remove one of the two"
            yield Problem(LAYERS, message)
        parts = config.module_fqns_per_model_part
        if parts and len(parts) != stages:
            message = f"these are {len(parts)} parts, but the file {CSV} has {stages} stages"
            yield Problem(PARTS, message)
        yield from self.cut_problems(stages)
        if any(action.kind == "I" for actions in orders.values() for action in actions):
            yield from self.split_backward_problems(CSV)

    def stage_problems(self, stages: int) -> Iterator[Problem]:
        config, layers = self.config, self.layers
        pp, name = config.pipeline_parallel_degree, config.pipeline_parallel_schedule
        schedule = SCHEDULES[name]
        by_hand = config.module_fqns_per_model_part
        if by_hand and config.pipeline_parallel_layers_per_stage is not None:
            message = f"{PARTS} defines the stages already; remove one of the two"
            yield Problem(LAYERS, message)
            return
        if schedule.fits(stages, pp):
            return
        wanted = {
            "one": f"{pp}, one per rank",
            "two": f"{2 * pp}, two per rank",
            "several": f"{2 * pp}, {3 * pp} or any other multiple of {pp}, two or more per rank",
        }[schedule.stages]
        message = f"{name} on {pp} ranks needs this number of stages: {wanted}"
        if config.module_fqns_per_model_part:
            yield Problem(PARTS, f"these are {stages} stages; {message}")
            return
        fitting = {-(-layers // each): each for each in range(layers, 0, -1)}
        use = [each for count, each in fitting.items() if schedule.fits(count, pp)]
        hint = f"use {' or '.join(map(str, sorted(use)))}" if use else "leave it out"
        yield Problem(LAYERS, f"it cuts {layers} layers into {stages} stages; {message}; {hint}")

    def cut_problems(self, stages: int) -> Iterator[Problem]:
        config, spec = self.config, self.spec
        if config.module_fqns_per_model_part:
            known = units(spec, self.network)
            for fault in part_problems(config.module_fqns_per_model_part, known):
                yield Problem(PARTS, fault)
            return
        most = self.layers + bool(spec.before_blocks) + bool(spec.after_blocks)
        if stages > most:
            key = CSV if config.pipeline_parallel_schedule_csv else DEGREE
            message = (
                f"it makes {stages} stages, but {self.layers} layers, with the modules before "
                f"and after them, can be cut into at most {most}; use fewer"
            )
            yield Problem(key, message)

    def microbatch_problems(self, stages: int) -> Iterator[Problem]:
        pp, name = self.config.pipeline_parallel_degree, self.config.pipeline_parallel_schedule
        schedule, microbatches = SCHEDULES[name], self.microbatches
        if schedule.runs(microbatches, stages, pp):
            return
        fewer, more = (
            next((count for count in counts if schedule.runs(count, stages, pp)), None)
            for counts in (
                range(microbatches, 0, -1),
                range(microbatches, microbatches + stages + 1),
            )
        )
        rule = (
            f"at least as many microbatches as stages, {stages}"
            if schedule.needs_full
            else f"microbatches in equal rounds of {pp} or a few more"
        )
        message = (
            f"it needs {rule}, but there are {microbatches} (training.local_batch_size / "
            f"parallelism.pipeline_parallel_microbatch_size); {name} can run "
            f"{' or '.join(str(count) for count in (fewer, more) if count)}"
        )
        yield Problem(SCHEDULE, message)

    def split_backward_problems(self, key: str) -> Iterator[Problem]:
        """Find features that torch lacks with a split backward (seen with torch 2.11 to 2.13)."""
        for reason in self.split_backward_conflicts():
            yield Problem(key, f"it runs each backward in two parts, {reason}")

    def split_backward_conflicts(self) -> Iterator[str]:
        if self.compile.compiles("model"):
            yield (
                "and the backward of a compiled block can run only once; use Interleaved1F1B, "
                'or compile.components = ["loss"]'
            )
        if self.recompute.by_operator:
            yield (
                "and activations kept by selective recomputation are freed after the first; "
                'use Interleaved1F1B, or activation_checkpoint.mode = "full" or another '
                "selective_ac_option"
            )
        if self.functions and not keeps_nodes_of_functions():
            yield (
                "and this version of torch does not keep the graph of "
                f"{' and '.join(self.functions)} for the second; use Interleaved1F1B or torch "
                "2.13, or disable this"
            )
        if self.config.fsdp_reshard_after_forward == "always":
            yield (
                "and would lose the gradients of weights that are not gathered when the first "
                "starts; use Interleaved1F1B, or parallelism.fsdp_reshard_after_forward = "
                '"default" or "never"'
            )


def part_problems(parts: Sequence[Unit], known: Sequence[Unit]) -> Iterator[str]:
    """Find reasons why stages by hand are not a partition of `known` units; the first kind only."""
    names = [name for unit in known for name in unit]
    given = [name for part in parts for name in part]
    if unknown := [name for name in given if name not in names]:
        yield (
            f"{show(unknown[0])} is not a module that can be placed; "
            f"{allowed_names(unknown[0], names)}"
        )
    elif missing := [name for name in names if name not in given]:
        yield f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} in no part"
    elif twice := [name for name in names if given.count(name) > 1]:
        yield f"{', '.join(twice)} {'is' if len(twice) == 1 else 'are'} in several parts"
    elif given != names:
        at = next(index for index, name in enumerate(names) if given[index] != name)
        yield f"{given[at]} is in the place of {names[at]}; wanted the order of the model"
    elif () in parts:
        yield f"part {parts.index(()) + 1} is empty; wanted at least one module in each"
    else:
        for unit in known:
            if not any(set(unit) <= set(part) for part in parts):
                yield (f"{' and '.join(unit)} are in different parts; wanted one for all of them")
