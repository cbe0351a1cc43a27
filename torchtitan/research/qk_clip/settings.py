"""The key `qk_clip` of Muon (MuonClip; Kimi Team, 2025, arXiv:2507.20534)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from torchtitan.checks.divisibility import DEGREES
from torchtitan.checks.model import model_of
from torchtitan.config import Context, Problem, between
from torchtitan.optim import Muon, NamedParameter
from torchtitan.research.qk_clip.attention_logits import attentions

REFUSED: Mapping[str, tuple[Any, str]] = {
    "fault_tolerance.enable": (False, "replica groups do not exchange their largest logits")
}
"""Keys ruled out by a limit of attention logits: the one allowed value, and why."""


class MuonClip(Muon):
    """Orthogonal updates of matrices, with AdamW for other parameters."""

    qk_clip: float = Field(0.0, ge=0)
    """Limit of attention logits: if the largest logit of a head in a step exceeds it, the update is
    followed by scaling the head's queries and keys down to the limit; 0: no limit."""

    @property
    def features(self) -> tuple[str, ...]:
        return ("qk_clip",) if self.qk_clip else ()

    def summary(self, parameters: Sequence[NamedParameter]) -> Iterator[str]:
        if self.qk_clip:
            yield f"heads are scaled down whose attention logits are above {self.qk_clip:g}"

    def problems(self, context: Context) -> Iterator[Problem]:
        yield from super().problems(context)
        if self.qk_clip and context.recipe is not None:
            yield from between(self._conflicts(context))

    def _conflicts(self, context: Context) -> Iterator[Problem]:
        """Find whether the largest logits of all heads, and the weights of these, are available."""
        job, key = context.recipe, f"{context.key}.qk_clip"
        model, values = model_of(job), job.flat()
        if model is None:
            return
        heads = [
            model.spec.heads(model.args, f"{name}.{linear}.weight")
            for name, _ in attentions(model.empty())
            for linear in model.spec.queries_and_keys or ()
        ]
        if not heads or None in heads:
            message = (
                f"{job.model.name} does not define the weights of its queries and keys "
                "(queries_and_keys, heads); use 0"
            )
            yield Problem(key, message, ("model",))
        for other, (allowed, why) in REFUSED.items():
            if values[other] != allowed:
                yield Problem(other, f"with {key}, {why}; use {str(allowed).lower()}", (key,))
        if job.sharding.never_whole:
            message = (
                f'with {key}, a rank needs all weights of a head, and "{job.sharding.name}" '
                'moves them between ranks; use "fsdp2"'
            )
            yield Problem("sharding.name", message, (key,))
        copies = job.degrees(context.world.ranks).dp_replicate
        if job.communication.replicas.runs_apart and copies > 1:
            message = (
                f"with {key}, replicas must scale the same heads, and these make updates of their "
                "own; use every = 1"
            )
            yield Problem("communication.replicas.name", message, (key, *DEGREES))
