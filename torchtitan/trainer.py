"""The loop and the step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan.build import Run
from torchtitan.checkpoint import ResumePoint
from torchtitan.data import preview
from torchtitan.logging import logger
from torchtitan.parallel import Launch, World
from torchtitan.resilience.spikes import judge


class TrainingDiverged(RuntimeError):
    """Too many steps in a row were skipped, and rolling back is no way out."""


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Python collects garbage only when told: at the same step on all ranks, so that none waits."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def highest_of_all_ranks(world: World, *numbers: Tensor) -> list[float]:
    """The maximum of each number over all ranks; infinite where one of them is not finite."""
    mine = torch.stack([number.double() for number in numbers])
    return world.max(mine.nan_to_num(torch.inf, posinf=torch.inf, neginf=torch.inf)).tolist()


class Trainer:
    """Moves a run forward, one optimizer step at a time."""

    def __init__(self, run: Run, at_step: Callable[[int], None] = lambda step: None) -> None:
        """`at_step` is told every step when it begins."""
        self.run, self.at_step = run, at_step
        self.has_shown = False

    def train(self, start: ResumePoint) -> None:
        """Train from `start` to the recipe's last step, or to the step where all ranks stop.

        Raises:
            TrainingDiverged: after `training.max_skipped_steps` skipped steps in a row; what was
                trained before them is saved. After the first, if the backward makes the updates.
        """
        run, state, training = self.run, self.run.state, self.run.job.training
        run.checkpoint.load(start)
        run.meter.resume(state.step, state.tokens)
        if state.step >= training.steps:
            logger.info("nothing to do: step %d of %d is done", state.step, training.steps)
            return
        is_first, stopping, diverged = True, False, False
        startup = run.startup()
        with run.meter, run.profiler, run.stop, run.replicas.join(), garbage_kept():
            if restart := Launch.read().restart:
                run.meter.event(state.step, "restart", restart=restart, ranks=run.world.size)
            while state.step < training.steps and not stopping and not diverged:
                startup.before_step()
                before, stopping = state.step, self.step()
                if state.step == before and not (stopping and before):
                    continue  # a replica group was lost: once more, without it
                if state.consecutive_skips and run.optimizers.in_backward:
                    diverged = True
                    break  # the weights are harmed already, and are not saved
                if state.consecutive_skips >= training.max_skipped_steps:
                    if self.roll_back():
                        continue
                    diverged = True
                is_last = state.step == training.steps or stopping or diverged
                if run.checkpoint.is_due(is_last):
                    with run.timeline.pause("checkpoint"):
                        run.checkpoint.save(finished=state.step == training.steps)
                if run.validator.is_due(state.step, training.steps) and not stopping:
                    with run.timeline.pause("validation"):
                        found = run.validator.run()
                    run.meter.log(state.step, **found)
                run.profiler.step(state.step)
                if state.step % training.gc_freq == 0:
                    gc.collect(1)
                if is_first:
                    run.world.after_first_step()
                    run.model.confirm()
                    is_first = False
                run.model.compiler.after_step(state.step, is_last)
                startup.after_step(state.step)
            run.checkpoint.finish()
        if diverged:
            raise TrainingDiverged(self.why_diverged())

    def step(self) -> bool:
        """One optimizer step; returns whether all ranks agreed to stop after it.

        The step is none, and can be done again, where the replica groups do not agree on it.
        """
        run, state, world = self.run, self.run.state, self.run.world
        self.meet()
        state.step += 1
        self.at_step(state.step)
        lr = run.optimizers.set_lr_factor(run.schedule(state.step - state.schedule_start))

        with run.timeline.phase("data"):
            batches = [next(run.data) for _ in range(run.accumulation)]
        if not self.has_shown and world.rank == 0:
            logger.info("first sequence: %s", preview(batches[0], run.tokenizer))
        self.has_shown = True
        batches = [batch.to(world.device.torch_device) for batch in batches]
        counts = torch.stack([batch.target_count() for batch in batches])
        with run.timeline.phase("sync"):
            tokens = run.replicas.count(world.sum(counts.sum(), over="data"))

        if run.precision.is_due(state.step):
            with run.timeline.pause("precision"):
                found = run.precision.measure(state.step, batches[0], tokens)
            run.meter.measured(state.step, "precision", **found)
        run.optimizers.zero_grad()
        if run.optimizers.in_backward:
            self.wait_for_weights()
        # Every rank's share of the global mean loss; they add up to it.
        share = run.model.forward_backward(batches, tokens)
        with run.timeline.phase("sync"):
            loss = world.sum(share, over="loss")
            run.replicas.sum([loss, *run.optimizers.gradients()])
        statistics: dict[str, float] = {}
        if run.statistics.is_due(state.step):
            with run.timeline.pause("statistics"):
                statistics = run.statistics.measure(batches)
        with run.timeline.phase("clip"):
            grad_norm = run.optimizers.clip(run.job.training.max_norm, run.replicas.max)
        wishes = (run.stop.requested, run.checkpoint.is_busy, run.profiler.wish())
        flags = (torch.full_like(loss, float(wish)) for wish in wishes)

        # The one wait for the device in a step: all ranks read the same numbers, to the bit, so
        # they decide alike whether to apply the update and whether to go on.
        with run.timeline.phase("sync"):
            verdict = highest_of_all_ranks(world, loss, grad_norm, tokens, *flags)
        highest_loss, highest_norm, count, stop, busy, traced = verdict
        run.profiler.agree(int(traced))
        if not run.replicas.agree():
            state.step -= 1
            return bool(stop)
        if statistics:
            run.meter.measured(state.step, "statistics", **statistics)
        skip = judge(run.job.spikes, state.history, loss=highest_loss, grad_norm=highest_norm)
        if skip is None:
            self.wait_for_weights()
            with run.timeline.phase("optimizer"):
                run.optimizers.step()
        if not busy:
            run.checkpoint.advance()
        state.skipped += skip is not None
        state.consecutive_skips = 0 if skip is None else state.consecutive_skips + 1
        state.tokens += int(count)
        run.meter.record(
            loss=loss, grad_norm=grad_norm, lr=lr, tokens=int(count), skipped=skip is not None
        )
        run.meter.flush(state.step, **({} if skip is None else skip.row))
        if skip is not None:
            logger.warning(
                "step %d: loss %g, gradient norm %g: %s; the update is %s",
                *(state.step, loss.item(), grad_norm.item(), skip.why),
                "made already" if run.optimizers.in_backward else "skipped",
            )
        return bool(stop)

    def wait_for_weights(self) -> None:
        """Return when weights may change: nothing copies them for a checkpoint any more."""
        if self.run.checkpoint.is_staging:
            with self.run.timeline.pause("checkpoint"):
                self.run.checkpoint.wait_staging()

    def meet(self) -> None:
        """Find out who takes part in the next step; catch up with replica groups that are ahead."""
        run, state, before = self.run, self.run.state, self.run.state.step
        groups = run.replicas.meet(before)
        if state.step != before:
            run.meter.go_on_after(state.step, state.tokens)
        if groups is not None:
            run.meter.event(state.step, "groups", groups=groups)

    def roll_back(self) -> bool:
        """Go back to the checkpoint before a row of skipped steps, but on with the data after it.

        False where there is none, or the recipe does not allow it (again).
        """
        run, state = self.run, self.run.state
        if state.rollbacks >= run.job.spikes.max_rollbacks:
            return False
        last, row, before = state.step, state.consecutive_skips, state.skipped_samples
        with run.timeline.pause("rollback"):
            if not run.checkpoint.roll_back(last - row + 1):
                return False
        run.meter.go_on_after(state.step, state.tokens)
        samples = state.skipped_samples - before
        logger.warning(
            "step %d: %d steps in a row were skipped: rolled back to step %d; the data goes on, so "
            "%d samples are stepped over (rollback %d of at most %d)",
            *(last, row, state.step, samples, state.rollbacks, run.job.spikes.max_rollbacks),
        )
        details = {"from_step": last, "skipped_samples": samples, "rollbacks": state.rollbacks}
        run.meter.event(state.step, "rollback", **details)
        return True

    def why_diverged(self) -> str:
        """What to tell of a run that cannot go on, and what may help."""
        state, allowed = self.run.state, self.run.job.spikes.max_rollbacks
        if self.run.optimizers.in_backward:
            saved = self.run.checkpoint.saver.saved_step
            return (
                f"step {state.step}: the loss or gradient norm is not finite, which with "
                "optimizer.early_step_in_backward is known only after the update. These weights "
                f"are not saved; the last checkpoint is {f'step-{saved}' if saved else 'none'}. "
                "Go on from there without it, or with a lower optimizer.lr"
            )
        way_out = ""
        if allowed and state.rollbacks >= allowed:
            way_out = f", after {state.rollbacks} rollbacks (spikes.max_rollbacks)"
        elif allowed:
            way_out = ", with no checkpoint before them to roll back to"
        return (
            f"step {state.step}: {state.consecutive_skips} steps in a row "
            f"(training.max_skipped_steps) were skipped{way_out}; none of them changed a weight. "
            "Lower optimizer.lr, lengthen lr_scheduler.warmup_steps, or look at the data of these "
            "steps"
        )
