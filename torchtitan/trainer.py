"""The loop and the step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtitan.build import Run
from torchtitan.checkpoint import Start
from torchtitan.data import preview
from torchtitan.logging import logger


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a loss or gradient norm that was not finite."""


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Python collects garbage only when told: at the same step on all ranks, so that none waits."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Trainer:
    """Moves a run forward, one optimizer step at a time."""

    def __init__(self, run: Run, at_step: Callable[[int], None] = lambda step: None) -> None:
        """`at_step` is told every step when it begins."""
        self.run, self.at_step = run, at_step
        self.has_shown = False

    def train(self, start: Start) -> None:
        """Train from `start` to the recipe's last step, or to the step where all ranks stop.

        Raises:
            TrainingDiverged: after `training.max_skipped_steps` skipped steps in a row; what was
                trained before them is saved.
        """
        run, state, training = self.run, self.run.state, self.run.job.training
        run.checkpoint.load(start)
        run.meter.resume(state.step, state.tokens)
        if state.step >= training.steps:
            logger.info("nothing to do: step %d of %d is done", state.step, training.steps)
            return
        first = state.step + 1
        stopping = diverged = False
        with run.meter, run.profiler, run.stop, garbage_kept():
            while state.step < training.steps and not stopping and not diverged:
                stopping = self.step()
                diverged = state.skipped_in_a_row >= training.max_skipped_steps
                is_last = state.step == training.steps or stopping or diverged
                if run.checkpoint.is_due(is_last):
                    with run.meter.time("checkpoint"):
                        run.checkpoint.save(finished=state.step == training.steps)
                if run.validator.is_due(state.step, training.steps) and not stopping:
                    with run.meter.time("validation"):
                        loss = run.validator.run()
                    run.meter.log(state.step, validation_loss=loss)
                run.profiler.step(state.step)
                if state.step % training.gc_freq == 0:
                    gc.collect(1)
                if state.step == first:
                    run.world.after_first_step()
                    run.model.confirm()
        if diverged:
            raise TrainingDiverged(
                f"step {state.step}: the loss or the gradient norm was not finite in "
                f"{state.skipped_in_a_row} steps in a row (training.max_skipped_steps); none of "
                "them changed a weight. Lower optimizer.lr, lengthen lr_scheduler.warmup_steps, "
                "or look at the data of these steps"
            )

    def step(self) -> bool:
        """One optimizer step; returns whether all ranks agreed to stop after it."""
        run, state, world = self.run, self.run.state, self.run.world
        state.step += 1
        self.at_step(state.step)
        lr = run.optimizers.set_lr_factor(run.schedule(state.step - state.schedule_start))
        run.optimizers.zero_grad()

        with run.meter.time("data"):
            batches = [next(run.data) for _ in range(run.accumulation)]
        if not self.has_shown and world.rank == 0:
            logger.info("first sequence: %s", preview(batches[0], run.tokenizer))
        self.has_shown = True
        batches = [batch.to(world.device.torch_device) for batch in batches]
        counts = torch.stack([batch.target_count() for batch in batches])
        tokens = world.sum(counts.sum(), over="data")

        # Every rank's share of the global mean loss; they add up to it.
        loss = world.sum(run.model.forward_backward(batches, tokens), over="loss")
        grad_norm = run.optimizers.clip(run.job.training.max_norm)
        stop = world.max(torch.full((), float(run.stop.requested), device=loss.device))

        # The one wait for the device in a step: all ranks read the same numbers, so they decide
        # alike whether to apply the update and whether to go on.
        verdict = torch.stack([value.double() for value in (loss, grad_norm, tokens, stop)])
        is_finite = bool(torch.isfinite(verdict[:2]).all())
        if is_finite:
            run.optimizers.step()
        state.skipped += not is_finite
        state.skipped_in_a_row = 0 if is_finite else state.skipped_in_a_row + 1
        state.tokens += int(verdict[2])
        run.meter.record(
            loss=loss, grad_norm=grad_norm, lr=lr, tokens=int(verdict[2]), skipped=not is_finite
        )
        run.meter.flush(state.step)
        if not is_finite:
            logger.warning(
                "step %d: loss %g, gradient norm %g: not finite; the update is skipped",
                state.step,
                *verdict[:2].tolist(),
            )
        return bool(verdict[3])
