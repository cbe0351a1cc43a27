"""Sentences about parts of a run that its plan leaves out, or models in a simpler way."""

from collections.abc import Iterator

from torchtitan.convert.settings import LinearConverterConfig
from torchtitan.job import JobConfig
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.plan.hardware import Hardware

UNTIMED = "not in the time of a step"
LAUNCHES = 33.7, 37.3
"""GiB that an H100 reserved for one compiled recipe, from launch to launch."""


def plan_notes(
    job: JobConfig, ranks: int, hardware: Hardware | None, saved_gib: float
) -> Iterator[str]:
    """Yield a sentence for each setting of a recipe that is not in its plan.

    Args:
        saved_gib: parameters and optimizer states of a rank.
    """
    if hardware is None:
        yield "without hardware, memory outside of the allocator is left out; name it"
    yield from _times(job, ranks, saved_gib)
    yield from _device(job, hardware)


def memory_notes(job: JobConfig, room_gib: float | None, reserved_gib: float) -> Iterator[str]:
    """Yield a sentence if a compiled recipe may not fit at every launch.

    With a cold and a warm cache of the compiler a step leaves the same tensors; what the allocator
    reserves for it may differ.
    """
    low, high = LAUNCHES
    if (
        job.compile.enable
        and room_gib is not None
        and 0 <= room_gib < reserved_gib * (high / low - 1)
    ):
        yield (
            f"compile.enable: of one recipe an H100 reserved {low} GiB in one launch and {high} in "
            f"another, and the {room_gib:.1f} GiB that remain here are less than that in proportion"
        )


def _times(job: JobConfig, ranks: int, saved_gib: float) -> Iterator[str]:
    """Yield what is done between steps, or slows them down."""
    saving, validation, metrics = job.checkpoint, job.validation, job.metrics
    if saving.saves:
        copies = ""
        if saving.async_mode != "disabled":
            copies = f"; each copies up to {saved_gib:.1f} GiB of a rank to host memory"
        yield f"checkpoint.interval: a save every {saving.interval:,} steps is {UNTIMED}{copies}"
    if validation.enable:
        yield f"validation.freq: a validation every {validation.freq:,} steps is {UNTIMED}"
        own = validation.local_batch_size or job.training.local_batch_size
        tokens = own * (validation.seq_len or job.training.seq_len)
        if (
            validation.unit == "local"
            and tokens > job.local_batch(job.degrees(ranks)) * job.training.seq_len
        ):
            yield "validation.local_batch_size: batches larger than in training are not in the peak"
    if metrics.statistics_freq:
        yield (
            f"metrics.statistics_freq: a forward every {metrics.statistics_freq:,} steps is "
            f"{UNTIMED}"
        )
    for note in job.optimizer.unplanned():
        yield f"optimizer.{note}"
    for key in ("enable_profiling", "enable_memory_snapshot"):
        if getattr(job.profiling, key):
            yield f"profiling.{key}: the time of the profiler is {UNTIMED}"
    if job.fault_tolerance.enable:
        yield "fault_tolerance.enable: the communication of replica groups is not in the plan"
    if job.comm.debug_level == "detail":
        yield f"comm.debug_level: the checks of each collective are {UNTIMED}"
    if job.training.enable_cpu_offload:
        yield (
            f"training.enable_cpu_offload: copies to and from host memory are {UNTIMED}, and the "
            "update takes the time that the device would"
        )
    apart = job.communication.replicas.steps_apart
    if apart and apart > 1 and job.degrees(ranks).dp_replicate > 1:
        yield (
            f"communication.replicas.every: the exchange of weights every {apart:,} steps is "
            f"{UNTIMED}, and the copy of the weights for it is not in the memory"
        )
    if job.parallelism.expert_parallel_degree > 1:
        yield (
            "parallelism.expert_parallel_degree: all experts are taken to be chosen equally "
            "often (a rank with more rows needs more time and memory), and the host's wait for the "
            f"numbers of rows is {UNTIMED}"
        )
    if job.model.separates_documents:
        yield (
            "model.attn_mask_type: attention takes the time of whole sequences, since their "
            "documents are not known"
        )


def _device(job: JobConfig, hardware: Hardware | None) -> Iterator[str]:
    """Yield what depends on the device."""
    if job.compile.enable and job.compile.backend != "inductor":
        yield f"compile.backend: {job.compile.backend} is planned as code that is not compiled"
    is_prepared = type(job.optimizer).prepare is not OptimizerConfig.prepare
    if job.model.separates_documents and hardware and hardware.device.startswith("AMD"):
        yield "model.attn_mask_type: documents are planned packed; on ROCm they run one by one"
    if job.compile.enable and is_prepared:
        yield "optimizer.name: the update, which is compiled, takes the time of its operators"
    if job.debug.deterministic:
        yield f"debug.deterministic: slower algorithms on CUDA are {UNTIMED}"
    for number, converter in enumerate(job.convert):
        if hardware is None or not isinstance(converter, LinearConverterConfig):
            continue
        if not (converter.emulate or getattr(hardware.peaks, converter.name, None)):
            yield (
                f"convert.{number}.name: {hardware.name} has no products in {converter.name}, so "
                "a run there is refused; set emulate = true"
            )
