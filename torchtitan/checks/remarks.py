"""What works, but perhaps not as its writer thinks."""

from collections.abc import Iterator

from torchtitan.job import JobConfig


def remarks(job: JobConfig) -> Iterator[str]:
    """What works, but perhaps not as its writer thinks."""
    yield from job.sharding.remarks(job.parallelism, job.compile)
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
