"""One mixture of experts, timed beside a feed-forward of equal FLOPs."""

import dataclasses
import statistics
import warnings

import torch

from tests.gpu.timing import in_turns, relative
from torchtitan.models.experts import (
    Experts,
    MixtureOfExperts,
    Routing,
    add_up,
    expert_products,
    inverse,
    select,
)
from torchtitan.models.layers import FeedForward
from torchtitan.plan.hardware import find_hardware


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the tokens that it gets."""

    dim: int
    n_experts: int
    expert_dim: int
    routing: Routing
    shared_dim: int = 0
    tokens: int = 8192
    ranks: int = 1
    """Number of ranks among which the experts are divided; this layer has those of one. In the mean
    they send it as many rows as its router chooses, so it computes those with its own experts."""

    @property
    def active_dim(self):
        """Width of the feed-forward of equal FLOPs."""
        return self.routing.top_k * self.expert_dim + self.shared_dim

    @property
    def flops(self):
        """FLOPs of the experts of all tokens, forward and backward."""
        return 6 * self.tokens * 3 * self.dim * self.active_dim

    def build(self):
        sizes = (self.dim, self.n_experts, self.expert_dim)
        layer = MixtureOfExperts(*sizes, self.routing, shared_dim=self.shared_dim)
        if self.ranks > 1:
            layer.experts = Experts(self.dim, self.n_experts // self.ranks, self.expert_dim)
            layer.experts.exchange = self._keep_rows
        return layer

    def _keep_rows(self, rows, scores, expert, compute):
        return compute(rows, scores, expert // self.ranks)

    def shrunk(self, by):
        """Return a layer whose widths and tokens are smaller."""
        sizes = ("dim", "expert_dim", "shared_dim", "tokens")
        return dataclasses.replace(self, **{size: getattr(self, size) // by for size in sizes})


DEEPSEEK = Routing(top_k=8, scores="sigmoid", scale=2.5, groups=8, top_groups=4, has_bias=True)
LAYERS = {
    "30B-A3B": Layer(2048, 128, 768, Routing(top_k=8)),
    "671B, a rank of EP 8": Layer(7168, 256, 2048, DEEPSEEK, shared_dim=2048, ranks=8),
}


def timed(layer, device, dtype, rounds):
    """Return milliseconds by what is computed, ratios to the feed-forward, and host waits."""
    where = {"device": device.torch_device, "dtype": dtype}
    x = torch.randn(1, layer.tokens, layer.dim, **where, requires_grad=True)
    mixture = _drawn(layer.build, device, dtype)
    dense = _drawn(lambda: FeedForward(layer.dim, layer.active_dim), device, dtype)

    ways = {
        "feed-forward": lambda: dense(x).backward(x.detach()),
        "grouped": lambda: mixture(x).backward(x.detach()),
        **_parts(mixture, x, layer.ranks),
    }
    given = [x, *mixture.parameters(), *dense.parameters()]
    found, _ = in_turns(ways, device, rounds, given)
    figures = {"ways": relative(found, "feed-forward")}
    if peak := device.peak_flops(dtype):
        for name in ("feed-forward", "grouped"):
            figures[f"MFU, {name}"] = layer.flops / statistics.median(found[name]) / peak
    if device.type == "cuda":
        figures["waits"] = {"grouped": _waits(ways["grouped"])}
        assert not figures["waits"]["grouped"], "the host waits for the device"
        figures["GiB"] = device.memory_peak()
        assert figures["GiB"] < find_hardware("h100").memory_gib, figures
    return figures


def _parts(mixture, x, ranks):
    """Return what surrounds the products, forward and backward."""
    experts, top_k = mixture.experts, mixture.router.routing.top_k
    with torch.no_grad():
        scores, chosen = mixture.router(x)
        expert, order = chosen.flatten().int().sort(stable=True)
        expert = expert // ranks
        where = order // top_k, inverse(order).view(-1, top_k)
        numbers = torch.arange(len(experts.w1), device=x.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        rows = x.detach().repeat_interleave(top_k, dim=1)[0].requires_grad_()
    w1 = experts.w1

    def route():
        mixture.router(x)[0].backward(scores)

    def combine():
        add_up(rows, *where).backward(x.detach()[0])

    def dispatch():
        order = chosen.flatten().int().sort(stable=True).indices
        place = inverse(order).view(-1, top_k)
        select(x[0], order // top_k, place).backward(rows.detach())

    def one_product():
        expert_products(rows, w1, ends).sum().backward()

    return {
        "routing": route,
        "dispatch": dispatch,
        "combine": combine,
        "one grouped product": one_product,
    }


def _waits(run):
    """Count the calls in which the host waits for the device."""
    usual = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            run()
    finally:
        torch.cuda.set_sync_debug_mode(usual)
    return sum("synchroniz" in str(each.message) for each in caught)


def _drawn(build, device, dtype):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            made = build()
    finally:
        torch.set_default_dtype(usual)
    made.to_empty(device=device.torch_device)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02)
        for buffer in made.buffers():
            buffer.zero_()
    return made
