"""The shortest PyTorch loop that trains the debug model: what a run costs at the very least.

    python benchmarks/by_hand.py REPORT.json

The network is the project's own; everything else is written out here. Imported by overhead.py,
and run by it as a script, to see how soon a first step can be done and in how little memory.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.device import pick
from torchtitan.models.llama3 import LLAMA3
from torchtitan.models.spec import build_empty, initialize

LR, WARMUP, STEPS, MAX_NORM = 3e-3, 20, 100_000, 1.0
BATCH, SEQ_LEN = 8, 256


def make_step(batches: list[tuple[Tensor, Tensor]], ranks: int, device: str) -> Callable[[], None]:
    """A function that takes one optimizer step, on the next of `batches` (tokens, targets)."""
    args = LLAMA3.flavors["debugmodel"]
    model = build_empty(LLAMA3.build, args, SEQ_LEN)
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for block in LLAMA3.blocks(model).values():
            fully_shard(block)
        fully_shard(model)
    model.to_empty(device=device)
    model.init_buffers()  # type: ignore[operator]
    initialize(model.named_parameters(), partial(LLAMA3.init_std, args), 0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    count = 0

    def step() -> None:
        nonlocal count
        tokens, targets = batches[count % len(batches)]
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = LR * min(count / WARMUP, 1 - count / STEPS)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if count % 10 == 0:
            print(count, loss.item(), file=sys.stderr)

    return step


if __name__ == "__main__":
    random = torch.randint(256, (8, BATCH, SEQ_LEN + 1), generator=torch.Generator())
    step = make_step([(batch[:, :-1], batch[:, 1:]) for batch in random], ranks=1, device="cpu")
    step()
    first = time.time()
    for _ in range(10):
        step()
    peak = pick().memory_peak()
    Path(sys.argv[1]).write_text(json.dumps({"first_step": first, "memory_gib": peak}))
