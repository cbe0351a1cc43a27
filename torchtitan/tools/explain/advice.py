"""Advice on a run: rules, each of which applies only if its numbers hold, and shows them.

A rule names the keys of the recipe that would change the numbers. Some rules need a trace, which
`torchtitan profile` requests.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from torchtitan.tools.explain.facts import Facts

# Shares of the time of a step, or of all the time.
DATA, BUBBLE, AGREE, OPTIMIZER = 0.05, 0.15, 0.10, 0.15
CHECKPOINT, MEASURED = 0.05, 0.10
EXPOSED, IDLE = 0.15, 0.25
STARTUP = 0.30
# Percent of a step; of the reports; of the device's memory; the ratio of ranks.
STRAGGLER, OFTEN, ROOM, TIGHT, UNEVEN = 10.0, 0.75, 60.0, 95.0, 1.10
SKIPPED = 0.01
LOW_MFU = 0.40
KEY = re.compile(r"\b[a-z_]+\.[a-z_]+\b")
MEASURING: Final = {
    "validation": "validation.freq",
    "statistics": "metrics.statistics_freq",
    "profiling": "profiling.profile_freq",
}
"""Pauses, and the keys that set their frequency."""


class Advice(NamedTuple):
    """A thing to try."""

    because: str
    """The numbers that lead to it."""
    attempt: str
    """The settings to change, by their keys."""

    @property
    def keys(self) -> list[str]:
        """The keys of the settings to change."""
        return list(dict.fromkeys(KEY.findall(self.attempt)))


def advise(facts: Facts) -> list[Advice]:
    """All advice that follows from the numbers, in the order of the rules."""
    return [advice for rule in RULES for advice in rule(facts)]


def _stragglers(facts: Facts) -> Iterator[Advice]:
    for one in facts.slowest:
        if one.percent > STRAGGLER and one.often >= OFTEN:
            yield Advice(
                f"rank {one.rank} is the slowest in {one.phase} in {one.often:.0%} of the reports, "
                f"and works {one.percent:.0f}% of a step longer there than the median rank",
                "look at that rank's machine: other processes, heat, a slow disk; all others wait "
                "for it",
            )
    # On a CPU the processor time above tells more.
    compute = facts.traces.compute_s if facts.traces and facts.on_cuda else {}
    if len(compute) > 1 and facts.layout.get("pp", 1) == 1:
        slow, fast = max(compute, key=compute.__getitem__), min(compute.values())
        if compute[slow] > UNEVEN * fast:
            yield Advice(
                f"in the traces, rank {slow} computes {compute[slow] / fast:.2f} times as long as "
                "the fastest rank",
                "look at that rank's machine: clocks, heat, other processes",
            )


def _waiting(facts: Facts) -> Iterator[Advice]:
    if facts.share("data") > DATA:
        yield Advice(
            f"waiting for data takes {facts.share('data'):.0%} of a step",
            f"read further ahead: data.num_workers (now {facts.recipe.get('data.num_workers')}), "
            "data.prefetch_factor; or put the data on a faster disk",
        )
    has_stages = facts.layout.get("pp", 1) > 1
    # A rank that is done with a batch waits for the others in `sync`.
    share = facts.share("pipeline") + facts.share("sync")
    if has_stages and share > BUBBLE:
        schedule = facts.recipe.get("parallelism.pipeline_parallel_schedule")
        yield Advice(
            f"pipeline stages wait for each other {share:.0%} of a step",
            "more microbatches in a batch: a larger training.local_batch_size, or a smaller "
            "parallelism.pipeline_parallel_microbatch_size; or a schedule with a smaller bubble "
            f"in parallelism.pipeline_parallel_schedule (now {schedule})",
        )
    if not has_stages and (facts.ranks or 1) > 1 and facts.share("sync") > AGREE:
        yield Advice(
            f"ranks wait {facts.share('sync'):.0%} of a step to agree on it",
            "one of them comes late: see the slowest ranks above, and the data, which is read "
            "before (data.num_workers)",
        )


def _traced(facts: Facts) -> Iterator[Advice]:
    if facts.traces is None or not facts.traces.exposed:
        return
    # A rank that waits for a slow one has more of it.
    exposed, idle = min(facts.traces.exposed.values()), min(facts.traces.idle.values())
    because = f"in the trace, exposed communication takes {exposed:.0%} of the time"
    if exposed > EXPOSED and facts.layout.get("dp_shard", 1) > 1:
        reshard = facts.recipe.get("parallelism.fsdp_reshard_after_forward")
        once_less = (
            '; if memory allows, parallelism.fsdp_reshard_after_forward = "never" (now '
            f'"{reshard}"), which gathers once less'
        )
        yield Advice(
            because,
            "a larger training.local_batch_size, so that there is more to compute for each"
            f"{once_less * (reshard != 'never')}"
            "; fewer ranks to gather from, with copies between: "
            "parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree",
        )
    if exposed > EXPOSED and facts.layout.get("tp", 1) > 1:
        yield Advice(
            because,
            "fewer ranks in parallelism.tensor_parallel_degree (now "
            f"{facts.layout['tp']}), which communicates within each layer"
            + (", or parallelism.enable_async_tensor_parallel" if facts.on_cuda else ""),
        )
    if facts.on_cuda and idle > IDLE:
        yield Advice(
            f"in the trace, the device has nothing to do for {idle:.0%} of the time",
            "larger kernels, by a larger training.local_batch_size; or fewer to start, by "
            "compile.enable, and compile.cuda_graphs where it can be",
        )


def _optimizer(facts: Facts) -> Iterator[Advice]:
    share, recipe = facts.share("optimizer"), facts.recipe
    if share > OPTIMIZER:
        ways = [
            f"{key} = false, if memory allows: the host makes the updates"
            for key in ("training.enable_cpu_offload", "optimizer.offload_states")
            if recipe.get(key)
        ]
        if recipe.get("optimizer.implementation", "fused") != "fused":
            ways.append('optimizer.implementation = "fused"')
        ways.append(
            f"a larger training.global_batch_size has fewer updates for as many {facts.unit}"
        )
        yield Advice(f"updates take {share:.0%} of a step", "; or ".join(ways))


def _between_steps(facts: Facts) -> Iterator[Advice]:
    recipe, share = facts.recipe, facts.share_of_pause("checkpoint")
    if share > CHECKPOINT:
        often = recipe.get("checkpoint.frequent.interval")
        in_background = 'checkpoint.async_mode = "async", which writes during training; or '
        yield Advice(
            f"saving checkpoints takes {share:.0%} of the time",
            in_background * (recipe.get("checkpoint.async_mode") == "disabled")
            + f"save less often: checkpoint.interval (now {recipe.get('checkpoint.interval')})"
            + f" or checkpoint.frequent.interval (now {often})" * bool(often),
        )
    for pause, key in MEASURING.items():
        if facts.share_of_pause(pause) > MEASURED:
            yield Advice(
                f"{pause} takes {facts.share_of_pause(pause):.0%} of the time",
                f"a larger {key} (now {recipe.get(key)})",
            )
    startup, compiling = facts.startup_s, facts.compile_s or 0.0
    if startup is not None and compiling > STARTUP * (startup + facts.reported_s):
        yield Advice(
            f"the compiler takes {compiling / (startup + facts.reported_s):.0%} of the time so far",
            "compile.cache_folder on a disk that stays, so that the next start finds the graphs",
        )


def _device(facts: Facts) -> Iterator[Advice]:
    mode = facts.recipe.get("activation_checkpoint.mode")
    now = f'activation_checkpoint.mode (now "{mode}")'
    used = facts.memory_pct if facts.on_cuda else None
    if used is not None and used < ROOM:
        yield Advice(
            f"at most {used:.0f}% of the device's memory is used",
            f"less recomputation: {now}; or " * (mode != "none")
            + "a larger training.local_batch_size",
        )
    if used is not None and used > TIGHT:
        yield Advice(
            f"{used:.0f}% of the device's memory is used, and torch may spend time on finding more",
            f"a smaller training.local_batch_size, or more recomputation: {now}",
        )
    is_low = facts.mfu is not None and facts.mfu < LOW_MFU
    if facts.on_cuda and is_low and facts.recipe.get("compile.enable") is False:
        yield Advice(f"MFU is {facts.mfu:.1%}, and nothing is compiled", "compile.enable = true")


def _skipped(facts: Facts) -> Iterator[Advice]:
    if facts.step and facts.skipped / facts.step > SKIPPED:
        yield Advice(
            f"{facts.skipped} of {facts.step} steps were skipped",
            "a lower optimizer.lr, a longer lr_scheduler.warmup_steps, or a larger spikes.sigma "
            "if they were harmless",
        )


RULES: Final = (_stragglers, _waiting, _traced, _optimizer, _between_steps, _device, _skipped)
