"""Reads a recipe, and says which settings, each valid, cannot work together, and what would.

All checks run before any process group exists and touch nothing but file names.
"""

import importlib
import math
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torch import nn

from torchtitan import convert, dialect, fault_tolerance, optim
from torchtitan.config import KeyPath, Problem, Recipe, Setting, allowed_names, load, show
from torchtitan.data import check_data
from torchtitan.device import Device
from torchtitan.job import JobConfig
from torchtitan.metrics import check_metrics
from torchtitan.models import MODELS
from torchtitan.models.attention import attends
from torchtitan.models.output import has_linear_loss
from torchtitan.models.spec import build_empty
from torchtitan.parallel import (
    activation_checkpoint,
    async_tensor,
    convert_checks,
    cuda_graphs,
    pipeline_checks,
    simple_fsdp,
)
from torchtitan.profiling import check_profiling


def load_job(
    recipe: str | Path | None,
    flags: Sequence[str],
    world_size: int | range | None,
    device_type: str,
    *,
    spared: Collection[str] = (),
) -> Recipe[JobConfig]:
    """Read and check a recipe for `world_size` ranks; None: for any number that fits it.

    A range: for each of these numbers, as the run may change from one to another.

    Of the keys in `spared` it does not matter how they fit the others and this machine.

    Raises:
        RecipeError: with all mistakes, one line each.
    """

    def check(job: JobConfig) -> Iterator[Problem]:
        if isinstance(world_size, range):
            found = problems_of_range(job, world_size, device_type)
        else:
            found = problems(job, world_size, device_type)
        return (problem for problem in found if problem.path not in spared)

    return load(
        JobConfig,
        recipe,
        flags,
        translate=dialect.translate,
        new_name=dialect.new_name,
        prepare=_import_first,
        check=check,
    )


def _import_first(settings: dict[KeyPath, Setting]) -> Iterator[str]:
    """Import the modules of `job.imports`, which may add names that the recipe uses."""
    setting = settings.get(("job", "imports"))
    if setting is None or not isinstance(setting.value, list):
        return
    for name in map(str, setting.value):
        where = f"{setting.origin}: job.imports: got {show(name)}"
        if not all(part.isidentifier() for part in name.split(".")):
            yield f"{where}; wanted the dotted name of a module"
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"{where}; it cannot be imported: {error}"


def problems(job: JobConfig, world_size: int | None, device_type: str) -> Iterator[Problem]:
    """Everything about a recipe, valid in form, that cannot work."""
    yield from _problems_of_degrees(job, world_size)
    yield from _problems_of_model(job, world_size)
    yield from _problems_of_compiler(job, None)
    yield from _problems_of_cuda_graphs(job, world_size)
    yield from _problems_of_data_parallelism(job, world_size)
    yield from _problems_of_sequences(job)
    yield from _problems_of_batches(job, world_size)
    yield from _problems_of_precision(job)
    yield from _problems_of_converters(job)
    yield from _problems_of_loss(job)
    yield from _problems_of_optimizer(job, world_size)
    yield from _problems_of_files(job)
    yield from _problems_of_checkpoints(job)
    yield from _problems_of_groups(job)
    for key, message in check_metrics(job.metrics):
        yield Problem(key, message)
    for key, message in check_profiling(job.profiling, device_type):
        yield Problem(key, message, ("profiling",))


def problems_of_range(job: JobConfig, sizes: range, device_type: str) -> Iterator[Problem]:
    """Everything that cannot work in a run whose number of ranks may change, told once each."""
    batch, found = "training.global_batch_size", dict[Problem, list[int]]()
    for size in sizes:
        for problem in problems(job, size, device_type):
            found.setdefault(problem, []).append(size)
    for problem, at in found.items():
        on = "" if len(at) == len(sizes) else f"on {_count(at)}: "
        if problem.path != batch:
            yield problem._replace(message=on + problem.message)
    yield from problems_of_restarts(job)
    if job.fault_tolerance.enable and len(sizes) > 1:
        message = f"the run may have {_count(sizes)}; all replica groups need as many"
        yield Problem("fault_tolerance.enable", message)
    misfits = sorted(
        {size for problem, at in found.items() if problem.path == batch for size in at}
    )
    why = f"it does not fit {_count(misfits)}"
    if job.training.global_batch_size == -1:
        why = "it would change with the number of ranks"
    elif not misfits:
        return
    each = job.training.local_batch_size
    once = [each * job.data_ranks(job.degrees(size)) for size in sizes]
    fits = math.lcm(*filter(None, once))
    near = max(round(job.training.global_batch_size / fits), 1) * fits
    message = f"{why}; {near} fits all from {sizes[0]} to {sizes[-1]}"
    yield Problem(batch, message, ("training.local_batch_size", *DEGREES))


def _count(ranks: Sequence[int]) -> str:
    return f"{' or '.join(map(str, ranks))} rank{'s' * (list(ranks) != [1])}"


def problems_of_restarts(job: JobConfig) -> Iterator[Problem]:
    """What keeps a run that is started again from going on where it was."""
    c = job.checkpoint
    wrong = {
        # What a replica group has lost the other groups still have.
        "enable": (not c.enable and not job.fault_tolerance.enable, True),
        "load_only": (c.load_only, False),
        "load_step": (c.load_step >= 0, -1),
        "resume": (c.resume == "never", "auto"),
    }
    for key, (is_wrong, right) in wrong.items():
        if is_wrong:
            message = f"a restart goes on from the newest checkpoint; write {show(right)}"
            yield Problem(f"checkpoint.{key}", message)


def smallest_world(job: JobConfig) -> int:
    """The least number of ranks that the degrees of a recipe ask for."""
    p = job.parallelism
    shard = max(p.data_parallel_shard_degree, 1)
    one = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
    return one * p.data_parallel_replicate_degree * shard


DEGREES = tuple(
    f"parallelism.{kind}_degree"
    for kind in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    )
)
SHARD = "parallelism.data_parallel_shard_degree"
GROUPS = ("fault_tolerance.enable", "fault_tolerance.group_size")


def _problems_of_degrees(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    p = job.parallelism
    if p.data_parallel_shard_degree == 0:
        yield Problem(SHARD, "wanted -1 (all ranks that are left) or an integer >= 1")
        return
    needed = smallest_world(job)
    if world_size is None or world_size == needed:
        return
    ranks = f"the {world_size} rank{'s' * (world_size > 1)} of this run"
    others = needed // max(p.data_parallel_shard_degree, 1)
    factors = {key: job.flat()[key] for key in DEGREES}
    product = " x ".join(
        f"{key.split('.')[1]} {n}" for key, n in factors.items() if n not in (1, -1)
    )
    if p.data_parallel_shard_degree != -1:
        hint = f"; use {world_size // others} or -1" if world_size % others == 0 else ""
        message = (
            f"the degrees multiply to {needed} ({product or 'all are 1'}), not to {ranks}{hint}"
        )
        yield Problem(SHARD, message, DEGREES)
    elif world_size % others:
        message = (
            f"the other degrees multiply to {others} ({product}), which does not divide {ranks}"
        )
        yield Problem(SHARD, message, DEGREES)


def _problems_of_model(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    spec = MODELS.get(job.model.name)
    if spec is None:
        yield Problem("model.name", allowed_names(job.model.name, MODELS))
        return
    args = spec.flavors.get(job.model.flavor)
    if args is None:
        names = allowed_names(job.model.flavor, spec.flavors)
        yield Problem("model.flavor", names, ("model.name",))
        return
    p, whose = job.parallelism, f"{job.model.name} {job.model.flavor}"
    tp = p.tensor_parallel_degree
    degrees = job.degrees(world_size or smallest_world(job))
    for count, what in ((args.n_heads, "heads"), (args.n_kv_heads, "key/value heads")):
        if count % tp:
            message = f"it does not divide the {count} {what} of {whose}; use {_divisors(count)}"
            yield Problem("parallelism.tensor_parallel_degree", message, ("model",))
    size, batch = p.pipeline_parallel_microbatch_size, job.training.local_batch_size
    if p.pipeline_parallel_degree > 1 and batch % size:
        message = f"it does not divide training.local_batch_size {batch}; use {_divisors(batch)}"
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
            functions=_functions(job),
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
            f"do not divide the dim {args.dim} of {whose}; use {_divisors(args.dim)}"
        )
        yield Problem(SHARD, message, ("model", *DEGREES))


def _functions(job: JobConfig) -> list[str]:
    """What has the model compute by autograd functions written in Python."""
    keys = {"loss.vocabulary_chunk": job.loss.vocabulary_chunk, "[[convert]]": job.convert}
    return [key for key, value in keys.items() if value]


def _divisors(count: int) -> str:
    found = [str(n) for n in range(1, count + 1) if count % n == 0]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


def _problems_of_sequences(job: JobConfig) -> Iterator[Problem]:
    p, length = job.parallelism, job.training.seq_len
    factors = {}
    if p.tensor_parallel_degree > 1 and not p.disable_sequence_parallel:
        factors["tensor_parallel_degree"] = p.tensor_parallel_degree
    if p.context_parallel_degree > 1:
        factors["context_parallel_degree"] = p.context_parallel_degree
        if p.context_parallel_load_balancer == "headtail":
            factors["2 (a part from the head and one from the tail each)"] = 2
    parts = math.prod(factors.values())
    if length % parts:
        why = " x ".join(f"{key} {n}" if key[0] != "2" else key for key, n in factors.items())
        near = max(round(length / parts), 1) * parts
        message = f"it is not a multiple of {parts} ({why}); use {near}"
        yield Problem("training.seq_len", message, DEGREES)


def _problems_of_batches(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    t = job.training
    if t.global_batch_size == 0:
        yield Problem("training.global_batch_size", "wanted -1 or an integer >= 1")
        return
    degrees = job.degrees(world_size or smallest_world(job))
    if (ranks := job.data_ranks(degrees)) < 1:
        return  # said of the degrees already, or of the groups
    once = t.local_batch_size * ranks
    rests_on = ("training.local_batch_size", "training.global_batch_size", *DEGREES, *GROUPS)
    if job.global_batch(degrees) % once:
        near = max(round(t.global_batch_size / once), 1) * once
        message = (
            f"it is not a multiple of local_batch_size {t.local_batch_size} x {ranks} "
            f"data-parallel rank{'s' * (ranks > 1)} = {once}; use {near}"
        )
        yield Problem("training.global_batch_size", message, rests_on)
        return
    sizes = {
        "local_batch_size": t.local_batch_size,
        "accumulation": job.accumulation(degrees),
        "ranks": ranks,
    }
    for key, message in check_data(job.data, **sizes):
        yield Problem(key, message, ("data", *rests_on))
    if job.validation.enable:
        for key, message in check_data(job.validation.data(job.data), **sizes):
            if key.startswith("data.dataset"):
                own = key.replace("data.", "validation.", 1)
                yield Problem(own, message.replace("data.dataset", "validation.dataset"))


def _problems_of_precision(job: JobConfig) -> Iterator[Problem]:
    t = job.training
    if t.dtype == "bfloat16" and t.mixed_precision_param == "float32":
        message = (
            "parameters stored in bfloat16 (training.dtype) gain nothing from it; "
            "use bfloat16 here or float32 there"
        )
        yield Problem("training.mixed_precision_param", message, ("training.dtype",))
    if job.debug.deterministic_warn_only and not job.debug.deterministic:
        message = "it means nothing without debug.deterministic = true"
        yield Problem("debug.deterministic_warn_only", message, ("debug.deterministic",))
    if getattr(job.optimizer, "nesterov", False) and not getattr(job.optimizer, "momentum", 0):
        yield Problem("optimizer.nesterov", "it needs optimizer.momentum > 0", ("optimizer",))
    c = job.compile
    if c.enable and not c.components:
        message = "with compile.enable = true, wanted at least one of model, loss"
        yield Problem("compile.components", message, ("compile",))
    if c.cache_folder is not None and c.backend != "inductor":
        message = f'compile.backend = "{c.backend}" keeps no graphs; use "inductor"'
        yield Problem("compile.cache_folder", message, ("compile.backend",))


def _problems_of_data_parallelism(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees, t = job.degrees(world_size or smallest_world(job)), job.training
    casts = t.dtype != t.mixed_precision_param
    for key, message in simple_fsdp.problems(
        job.parallelism,
        job.compile,
        hooks=degrees.data * degrees.cp > 1 or casts or t.enable_cpu_offload,
        cpu_offload=t.enable_cpu_offload,
    ):
        yield Problem(key, message, ("compile", "training", "parallelism"))


def _problems_of_cuda_graphs(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees, t = job.degrees(world_size or smallest_world(job)), job.training
    for key, message in cuda_graphs.problems(
        job.compile,
        job.parallelism,
        accumulation=job.accumulation(degrees) if job.data_ranks(degrees) > 0 else 1,
        moves_parameters=degrees.data > 1 or t.dtype != t.mixed_precision_param,
        cpu_offload=t.enable_cpu_offload,
    ):
        yield Problem(key, message, ("compile", "training", "parallelism"))


def _problems_of_converters(job: JobConfig) -> Iterator[Problem]:
    spec, p = MODELS.get(job.model.name), job.parallelism
    if not job.convert or spec is None or job.model.flavor not in spec.flavors:
        return
    model = build_empty(spec.build, spec.flavors[job.model.flavor], 1)
    in_pipeline = p.pipeline_parallel_degree > 1
    sequences = (
        p.pipeline_parallel_microbatch_size if in_pipeline else job.training.local_batch_size
    )
    tokens = sequences * job.training.seq_len // p.context_parallel_degree
    for key, message in convert_checks.problems(job.convert, p, model, spec.tensor_plan, tokens):
        yield Problem(key, message, ("convert", "model", "training", "parallelism"))


def _problems_of_loss(job: JobConfig) -> Iterator[Problem]:
    """What cannot be where the model computes its loss itself."""
    spec, key = MODELS.get(job.model.name), "loss.vocabulary_chunk"
    if not job.loss.vocabulary_chunk or spec is None or job.model.flavor not in spec.flavors:
        return
    model = build_empty(spec.build, spec.flavors[job.model.flavor], 1)
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


def _problems_of_compiler(job: JobConfig, device_type: str | None) -> Iterator[Problem]:
    """What the compiler cannot do, on any device (None) or on this kind."""
    p, recompute = job.parallelism, job.activation_checkpoint
    for key, message in (
        *activation_checkpoint.problems(recompute, job.compile, p, device_type),
        *async_tensor.problems(p, job.compile, device_type),
    ):
        yield Problem(key, message, ("compile", "parallelism", "activation_checkpoint"))


def _problems_of_optimizer(job: JobConfig, world_size: int | None) -> Iterator[Problem]:
    degrees = job.degrees(world_size or smallest_world(job))
    accumulation = job.accumulation(degrees) if job.data_ranks(degrees) > 0 else 1
    for key, message in optim.problems(job.optimizer, job.flat(), accumulation):
        yield Problem(key, message, ("optimizer", "training", *DEGREES))


FOLDERS = (
    "checkpoint.folder",
    "comm.save_traces_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def _problems_of_files(job: JobConfig) -> Iterator[Problem]:
    tokenizer = job.model.tokenizer_path
    if tokenizer is not None and not Path(tokenizer).expanduser().exists():
        message = (
            "there is no such file or folder; put the model's tokenizer.json or tokenizer.model "
            "there (for Llama 3: hf download meta-llama/Llama-3.1-8B tokenizer.json "
            f"--local-dir {tokenizer})"
        )
        yield Problem("model.tokenizer_path", message)
    initial = job.checkpoint.initial_load_path
    if initial is not None and not Path(initial).expanduser().is_dir():
        yield Problem("checkpoint.initial_load_path", "there is no such folder")
    if job.job.config_file is not None:
        message = 'only a flag can say it; in a recipe, wanted extends = "other.toml"'
        yield Problem("job.config_file", message)
    dump = Path(job.job.dump_folder).expanduser()
    cache = job.compile.cache_folder
    if cache is not None and Path(cache).expanduser().is_file():
        yield Problem("compile.cache_folder", "it is a file; wanted a folder")
    existing = next((folder for folder in (dump, *dump.parents) if folder.exists()), None)
    if existing and not existing.is_dir():
        yield Problem("job.dump_folder", f"{existing} is a file; wanted a folder")
    for key in FOLDERS:
        folder = Path(job.flat()[key])
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            yield Problem(key, "wanted the name of a folder inside job.dump_folder")
    prefix = job.comm.save_traces_file_prefix
    if "/" in prefix or prefix[-1:].isdigit():
        message = "wanted the first part of a file's name; the number of a rank follows it"
        yield Problem("comm.save_traces_file_prefix", message)


def _problems_of_checkpoints(job: JobConfig) -> Iterator[Problem]:
    c = job.checkpoint
    idle = {
        "resume": c.resume == "must",
        "load_step": c.load_step >= 0,
        "load_only": c.load_only,
        "last_save_in_hf": c.last_save_in_hf,
    }
    for key, is_asked in idle.items():
        if is_asked and not c.enable:
            message = "it does nothing while checkpoint.enable is false"
            yield Problem(f"checkpoint.{key}", message, ("checkpoint.enable",))
    if c.load_step >= 0 and c.resume == "never":
        message = 'checkpoint.resume is "never"; use "must" there or -1 here'
        yield Problem("checkpoint.load_step", message, ("checkpoint.resume",))
    if c.export_dtype != "float32" and not (c.last_save_model_only or c.last_save_in_hf):
        message = "it needs checkpoint.last_save_model_only or checkpoint.last_save_in_hf"
        yield Problem("checkpoint.export_dtype", message, ("checkpoint.last_save_model_only",))
    spec = MODELS.get(job.model.name)
    if c.last_save_in_hf and spec and "hf" not in spec.formats:
        message = f"the spec of {spec.name} does not say how its weights are written so"
        yield Problem("checkpoint.last_save_in_hf", message, ("model.name",))
    row = job.training.max_skipped_steps
    needed = 1 + -(-row // c.interval)
    message = ""
    if not c.enable or c.load_only:
        message = "rolling back needs checkpoints: checkpoint.enable = true, load_only = false"
    elif 0 < c.keep_latest_k < needed:
        message = (
            f"the checkpoint before {row} skipped steps in a row (training.max_skipped_steps) "
            f"would be gone after them; use checkpoint.keep_latest_k >= {needed}, or 0"
        )
    if job.spikes.max_rollbacks and message:
        yield Problem("spikes.max_rollbacks", message, ("checkpoint", "training"))


def _problems_of_groups(job: JobConfig) -> Iterator[Problem]:
    for key, message in fault_tolerance.problems(job.fault_tolerance):
        yield Problem(key, message, ("fault_tolerance",))
    if job.fault_tolerance.enable and job.spikes.max_rollbacks:
        message = "replica groups, each with checkpoints of its own, cannot roll back; use 0"
        yield Problem("spikes.max_rollbacks", message, ("fault_tolerance.enable",))


def problems_of_machine(job: JobConfig, device_type: str) -> Iterator[Problem]:
    """What this very machine cannot do; a check made for another one does not ask."""
    anywhere = set(_problems_of_compiler(job, None))
    yield from (p for p in _problems_of_compiler(job, device_type) if p not in anywhere)
    for key, message in fault_tolerance.problems_of_machine(job.fault_tolerance):
        yield Problem(key, message)
    if job.convert:
        capability = Device("cuda").capability if device_type == "cuda" else None
        for number, message in convert.lacking(job.convert, capability):
            yield Problem(f"convert.{number}.emulate", message, ("convert",))
    for key, message in optim.problems_of_machine(job.optimizer, device_type):
        yield Problem(key, message, ("optimizer",))
    for key, message in cuda_graphs.problems_of_machine(job.compile, device_type):
        yield Problem(key, message)
    for key, message in simple_fsdp.problems_of_machine(job.parallelism, device_type):
        yield Problem(key, message)
    on_cpu = job.compile.backend == "inductor" and device_type == "cpu"
    if job.compile.enable and on_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        message = (
            "torch.compile on a CPU needs g++ or clang++, and there is neither; install one, or "
            'use compile.backend = "aot_eager"'
        )
        yield Problem("compile.enable", message)


def remarks(job: JobConfig) -> Iterator[str]:
    """What works, but perhaps not as its writer thinks."""
    yield from simple_fsdp.remarks(job.parallelism, job.compile)
    schedule, steps = job.lr_scheduler, job.schedule_steps()
    if schedule.warmup_steps > steps:
        yield (
            f"lr_scheduler.warmup_steps: {schedule.warmup_steps} is more than the {steps} steps "
            "of the schedule; the run ends within the warm-up"
        )
    elif schedule.warmup_steps + schedule.decay_steps(steps) > steps:
        yield (
            f"lr_scheduler.decay_ratio: {schedule.decay_ratio} of {steps} steps reaches into the "
            f"{schedule.warmup_steps} steps of warm-up; the decay begins after them, already "
            "under way"
        )
    if steps < job.training.steps and schedule.decay_steps(steps) and not schedule.min_lr_factor:
        yield (
            f"lr_scheduler.total_steps: after {steps} steps the learning rate is 0, but there are "
            f"{job.training.steps} steps"
        )
    if job.loss.vocabulary_chunk and job.parallelism.disable_loss_parallel:
        yield (
            "parallelism.disable_loss_parallel: with loss.vocabulary_chunk no logits are gathered; "
            "each tensor rank makes those of its part of the vocabulary, with or without it"
        )
    if job.spikes.sigma and job.spikes.window >= job.training.steps:
        yield (
            f"spikes.window: it fills only after {job.spikes.window} good steps, and there are "
            f"{job.training.steps}; no step is skipped but for what is not finite"
        )
