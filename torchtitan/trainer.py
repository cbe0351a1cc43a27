"""Training on one rank: in this process alone, or in each that torchrun or our launcher starts.

Exit status: 0 when the run is finished, or was stopped by Ctrl-C and saved; the others are in
torchtitan/resilience/exit_codes.py.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchtitan.build import Observer, Run, build, resume_policy
from torchtitan.checkpoint import (
    Lock,
    ResumePoint,
    SaveFailed,
    TrainState,
    choose_together,
    lock,
    on_rank_0,
)
from torchtitan.checkpoint.settings import NOTHING_SAVED
from torchtitan.checks import load_job, problems
from torchtitan.checks.divisibility import BATCH
from torchtitan.checks.limits import problems_of_memory
from torchtitan.config import (
    ConfigError,
    PlannedWorld,
    Problem,
    Recipe,
    Unreachable,
    counted,
    is_hub_id,
    local_path,
    print_error,
    split_recipe,
)
from torchtitan.device import Device, pick
from torchtitan.flight_recorder import Recorder
from torchtitan.inputs import (
    open_stream,
    open_task,
    problems_of_files,
    problems_of_stream,
    problems_of_task,
    require_recipe,
)
from torchtitan.job import RECIPE_FILE, JobConfig
from torchtitan.logging import configure, logger
from torchtitan.metrics import MONITORS, Monitor
from torchtitan.packages import warn_of_other
from torchtitan.parallel import Launch, World, open_world
from torchtitan.provenance import to_toml, write_provenance
from torchtitan.resilience.divergence import TrainingDiverged
from torchtitan.resilience.exit_codes import ExitCode
from torchtitan.resilience.stop import StopSignal, read_grace, status_of_stop, stop_without_launcher


class Trainer:
    """Advances a run, one optimizer step at a time."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def train(self, start: ResumePoint) -> None:
        """Train from `start` to the recipe's last step, or to the step where all ranks stop.

        Raises:
            TrainingDiverged: after too many skipped steps in a row (`resilience.divergence`).
            SaveFailed: if the last state could not be saved.
        """
        run, state = self.run, self.run.state
        run.checkpoint.load(start)
        if run.is_finished():
            logger.info(
                "nothing to do: all %d steps are done; to continue, increase training.steps; "
                "to start over, choose another job.dump_folder",
                state.step,
            )
            return
        with run.session():
            while not run.is_finished():
                self.step()
                run.after_step()

    def step(self) -> None:
        """Run one optimizer step."""
        run, state = self.run, self.run.state
        batches, count = next(run.batches)
        lr = run.optimizers.begin(run.schedule(state.step + 1))
        shares = run.model.forward_backward(batches, count)
        status = run.agree(shares, run.optimizers.norm(), count)
        if run.guard.accepts(status):
            run.optimizers.step(status.own_norm, status.highest_norm)
        state.advance(status)
        run.meter.end_step(status, lr)


REFUSAL_SECONDS = 5.0
"""Time in which all ranks meet the mistake that one has met."""


def main(words: Sequence[str]) -> int:
    """Train on this rank, by a recipe and its flags; return the exit status."""
    with ExitStack() as held:
        return run(words, held)


def run(words: Sequence[str], held: ExitStack) -> int:
    """Train on this rank; `held` releases rank 0's lock at the end."""
    launch = Launch.read()
    if launch.by_agent:
        stop_without_launcher()
    try:
        grace = read_grace(os.environ)
        device = pick(launch.local_rank)
        # First of all, as CUDA creates a context on the current device on first use.
        device.make_current()
        recipe = read(words, launch.size, device.type, local_ranks=launch.local_size)
        job = recipe.config
        # Our launcher labels each line with its rank.
        ranks = 1 if launch.is_labeled else launch.size
        color = not job.metrics.disable_color_printing
        configure(launch.rank, ranks, color, job.metrics.log_level)
    except ConfigError as error:
        # Every rank finds the same mistakes; rank 0 reports them, and is not ended before by a
        # launcher that sees another rank exit.
        if launch.rank == 0:
            return refuse(error)
        time.sleep(REFUSAL_SECONDS)
        return 2
    folder = local_path(job.job.dump_folder)
    start = locked = None
    if launch.rank == 0:
        warn_of_other()
        try:
            # First the lock: a run that is ending may still write the checkpoint to start from.
            locked = held.enter_context(lock(folder))
            if job.checkpoint.frequent.interval:
                start = ResumePoint(None)  # until all ranks have told what their nodes hold
            else:
                start = prepare(recipe, choose(job), launch, device)
        except ConfigError as error:
            refuse(error)
            held.close()
            if launch.size == 1:
                return 2  # no other rank waits to learn of it

    try:
        monitors = open_monitors(recipe, launch, held)
    except ConfigError as error:
        return refuse(error)
    degrees, shared = job.degrees(launch.size), (ConfigError, TrainingDiverged, SaveFailed)
    recorder = Recorder(job.comm, folder, launch, device.type, shared)
    stop = StopSignal(locked.mark_ending if locked else None, grace)
    try:
        with ExitStack() as joined:
            joined.push(recorder.leave)
            world = joined.enter_context(open_world(degrees, job.comm, device))
            start = world.broadcast_object(start)
            if start is None:
                return 2  # rank 0 has reported why
            try:
                agree_on_commits(job, world)
                if job.checkpoint.frequent.interval:
                    start = choose_together(resume_policy(job), world)
                    on_rank_0(world, partial(prepare, recipe, start, launch, device))
                job = job.with_batch(world.degrees, start.global_batch).with_kept(start.kept)
                observer = observe(job, folder, world, recorder, stop, locked)
                observer = replace(observer, monitors=monitors)
                with recorder:
                    made = build(job, world, observer, stop)
                    recorder.timeline = made.timeline
                    with closing(made.batches):
                        Trainer(made).train(start)
            except ConfigError as error:
                refuse(error)
                held.close()
                # All have cleaned up before one exits, upon which the launcher ends the others.
                world.meet(REFUSAL_SECONDS)
                return 2
    except (TrainingDiverged, SaveFailed, Unreachable) as error:
        logger.error("%s", error)
        return ExitCode.DIVERGED if isinstance(error, TrainingDiverged) else ExitCode.FAILED
    if skips := made.state.consecutive_skips:
        logger.warning(
            "the last %s skipped (not finite, or spikes): the weights are those after step %d",
            f"{skips} steps were" if skips > 1 else "step was",
            made.state.step - skips,
        )
    return exit_status(job, made.state.step, stop, launch)


def prepare(
    recipe: Recipe[JobConfig], start: ResumePoint, launch: Launch, device: Device
) -> ResumePoint:
    """Check that the run can start at `start`, log what is known of it, and return `start`.

    Raises:
        ConfigError: if it cannot.
    """
    refuse_short_data(recipe, start, launch.size)
    about_batch = batch_note(recipe, start, launch.size, device.type)
    log_recipe(recipe)
    if not recipe.config.checkpoint.saves:
        logger.warning(NOTHING_SAVED)
    if about_batch:
        logger.info("note: %s", about_batch)
    if launch.restart:
        where = start.path or "the beginning"
        ranks = f"{launch.size} rank{'s' * (launch.size > 1)}"
        counts = launch.restart, launch.restarts
        logger.warning("restart %d of %d: %s, from %s", *counts, ranks, where)
    return start


def agree_on_commits(job: JobConfig, world: World) -> None:
    """Refuse repositories of the hub that nodes have read at different commits."""
    own = {k: v for k, v in job.flat().items() if isinstance(v, str) and is_hub_id(v)}
    if not own:
        return
    others = {k: v for k, v in world.broadcast_object(own).items() if own[k] != v}
    if world.any([bool(others)])[0]:
        told = [f"{key}: nodes have read {own[key]} and {there}" for key, there in others.items()]
        raise ConfigError("; ".join(told) or "nodes have read other commits; name a revision")


def open_monitors(recipe: Recipe[JobConfig], launch: Launch, held: ExitStack) -> list[Monitor]:
    """Open the monitors that the recipe asks for, on the first rank of each node.

    Raises:
        ConfigError: if the machine refuses.
    """
    found = []
    for key in MONITORS if launch.local_rank == 0 else ():
        if not (value := getattr(recipe.config.metrics, key)):
            continue
        timeout = recipe.config.comm.train_timeout_seconds
        try:
            found.append(held.enter_context(MONITORS[key](value, timeout, launch.restart)))
        except OSError as error:
            message = f"it cannot be served here: {error.strerror or error}; use another port"
            recipe.refuse([Problem(f"metrics.{key}", message)])
    return found


def observe(
    job: JobConfig,
    folder: Path,
    world: World,
    recorder: Recorder,
    stop: StopSignal,
    locked: Lock | None,
) -> Observer:
    """Return the observer of this rank: its traces, and on rank 0 the files that name the run."""
    if locked is None:
        return Observer(before_step=recorder.step, at_request=recorder.copy_note)

    def after_step(state: TrainState) -> None:
        # The last save follows.
        if stop.is_agreed or state.step >= job.training.steps:
            locked.mark_ending()

    session = described(job, folder, world)
    return Observer(
        before_step=recorder.step,
        after_step=after_step,
        at_request=recorder.copy_note,
        session=session,
    )


@contextmanager
def described(job: JobConfig, folder: Path, world: World) -> Iterator[None]:
    """Write the recipe and the environment of a run, once its state is loaded.

    A start that is refused leaves those of the last run.
    """
    write_provenance(folder, job, world.size, world.device)
    report_reference(job)
    yield


def exit_status(job: JobConfig, step: int, stop: StopSignal, launch: Launch) -> int:
    """Return the exit status of a run that finished, or was stopped after `step`."""
    steps = job.training.steps
    saves = job.checkpoint.saves
    if not saves and launch.rank == 0:
        what = "stopped" if step < steps else "ended"
        logger.warning("%s at step %d of %d; nothing is saved: see [checkpoint]", what, step, steps)
    # An elastic agent would restart after any other; our launcher knows that it was a stop.
    if step >= steps or launch.by_agent:
        return 0
    return status_of_stop(stop.by, saves)


def read(
    words: Sequence[str],
    ranks: int | range,
    device_type: str,
    *,
    local_ranks: int,
    may_restart: bool = False,
) -> Recipe[JobConfig]:
    """Read and check the recipe for `ranks` ranks, `local_ranks` of them on this machine.

    Raises:
        ConfigError: with every mistake found.
    """
    path, flags = split_recipe(words)
    require_recipe(path, flags, "train")
    recipe = load_job(
        path,
        flags,
        ranks,
        device_type,
        is_here=True,
        may_restart=may_restart,
        local_ranks=local_ranks,
    )

    least = ranks if isinstance(ranks, int) else ranks[0]
    recipe.refuse(problems_of_memory(recipe.config, least, local_ranks, device_type))
    recipe.refuse(problems_of_task(recipe.config))
    recipe.refuse(problems_of_files(recipe.config))
    is_new = isinstance(ranks, int) and not may_continue(recipe.config)
    recipe.refuse(problems_of_stream(recipe.config, least, is_new=is_new))
    return recipe


def may_continue(job: JobConfig) -> bool:
    """Whether a run may start at a position in its data: that of a run before it, say.

    It looks at no checkpoint, which may take long.
    """
    start = job.checkpoint
    loads_all = start.initial_load_path is not None and not start.initial_load_model_only
    return loads_all or (local_path(job.job.dump_folder) / RECIPE_FILE).exists()


def choose(job: JobConfig) -> ResumePoint:
    """Choose the checkpoint to start from, on one rank, before any of them writes."""
    return resume_policy(job).start()


def refuse_short_data(recipe: Recipe[JobConfig], start: ResumePoint, ranks: int) -> None:
    """Refuse a new run that takes more from a source of data than it has."""
    if start.path is None or start.model_only:
        recipe.refuse(problems_of_stream(recipe.config, ranks, is_new=True))


def batch_note(
    recipe: Recipe[JobConfig], start: ResumePoint, ranks: int, device_type: str
) -> str | None:
    """Explain the batch of a run if its size may surprise; a resumed run keeps its batch.

    Raises:
        ConfigError: if the ranks cannot divide it, with numbers of ranks that can.
    """
    job, kept = recipe.config, start.global_batch
    degrees = job.degrees(ranks)
    if job.training.global_batch_size != -1 or kept in (None, job.global_batch(degrees)):
        return job.batch_note(degrees)
    on = counted(job.data_ranks(degrees), "data-parallel rank")
    message = f"the run to resume has {counted(kept, 'sequence')} in a step"
    if kept % job.data_ranks(degrees):
        fitting = ", ".join(str(n) for n in range(1, kept + 1) if kept % n == 0)
        message += f", which {on} cannot divide; use one of {fitting}"
        recipe.refuse([Problem(BATCH, message)])
    kept_job = job.with_batch(degrees, kept)
    replace(recipe, config=kept_job).refuse(problems(kept_job, PlannedWorld(ranks, device_type)))
    each, times = kept_job.local_batch(degrees), kept_job.accumulation(degrees)
    message += f", and keeps them: {each:,} at a time x {times:,} accumulated x {on}"
    return recipe.line(Problem(BATCH, message))


def refuse(error: ConfigError) -> int:
    """Print the mistakes in the recipe; return the exit status."""
    print_error(error)
    return 2


def log_recipe(recipe: Recipe[JobConfig]) -> None:
    """Log settings read differently from how they are written, and the recipe if requested."""
    for notice in recipe.notices:
        logger.info("note: %s", notice)
    if recipe.config.job.print_config:
        logger.info("the resolved recipe:\n%s", to_toml(recipe.config))


def report_reference(job: JobConfig) -> None:
    """Log the baseline loss that needs no model, once, for comparison."""
    if not job.data.report_unigram_loss:
        return
    task, degrees = open_task(job), job.degrees(None)
    stream = partial(open_stream, job, task, degrees, rank=0, once=True)
    if words := task.reference(job.data, job.debug.seed, stream):
        logger.info("reference: %s", words)
