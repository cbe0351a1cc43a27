"""QK-clip as a feature of a run: logits are measured in a step, and heads scaled after it."""

from collections.abc import Sequence

from torchtitan.build import Run
from torchtitan.data import Batch
from torchtitan.models import MODELS
from torchtitan.parallel import Losses
from torchtitan.research.qk_clip.attention_logits import LargestLogits, attentions
from torchtitan.research.qk_clip.scaling import QKClip, heads_of
from torchtitan.research.qk_clip.settings import MuonClip
from torchtitan.step import Hooks


def logit_limit(run: Run) -> Hooks:
    """Return the hooks of the limiter."""
    return LogitLimit(run).hooks


class LogitLimit:
    """Limiter of attention logits: measures them in a step, and scales heads after the update."""

    def __init__(self, run: Run) -> None:
        job, spec, world = run.job, MODELS[run.job.model.name], run.world
        assert isinstance(job.optimizer, MuonClip)
        self.meter = run.meter
        parameters = [assigned.parameter for assigned in run.optimizers.inner.assignments]
        assert spec.queries_and_keys is not None, "the recipe was checked"
        queries = spec.queries_and_keys[0]
        own = {
            name: heads_of(parameters, f"{name}.{queries}")
            for part in run.model.parts
            for name, _ in attentions(part)
        }
        heads = dict(sorted(item for of_rank in world.gather(own) for item in of_rank.items()))
        self.logits = LargestLogits(run.model.parts, heads, world, job.parallelism)
        self.clip = QKClip(
            job.optimizer.qk_clip, parameters, spec.queries_and_keys, self.logits.places
        )
        self.largest = self.logits.all
        self.hooks = Hooks(
            before_forward=self.logits.begin, after_backward=self.measure, after_update=self.apply
        )

    def measure(self, batches: Sequence[Batch], losses: Losses) -> None:
        """Agree on the largest logits of the step, and record the largest of all."""
        self.largest = self.logits.agree()
        self.meter.record(max_attention_logit=self.largest.max())

    def apply(self) -> None:
        """Scale down the heads whose logits were above the limit."""
        self.clip.apply(self.largest)
