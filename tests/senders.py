"""Ways to send, which note how they are used, and a sharding, from outside the tree."""

from collections import Counter
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from torchtitan import comm
from torchtitan.parallel import SHARDING
from torchtitan.parallel.sharding import Sharding, ShardingConfig

USED = Counter()
"""By way and unit, in this process."""
BUFFERS = {}
"""Of each unit, elements of a part as its parameters have them, and as they were sent."""


class HalfWeights(comm.WeightsConfig):
    """Parameters are sent in bfloat16; all ranks compute with the same, the owner too."""

    name: Literal["half"] = Field("half", description="Method of gathering.")

    def open(self, unit, group):
        return HalfGather(unit, group)


class HalfGather(comm.Gather):
    def __init__(self, unit, group):
        self.unit, self.group = unit, group

    def __call__(self, whole, part):
        USED[f"gather {self.unit.name}"] += 1
        elements = sum(shape.numel() for shape in self.unit.shapes.values())
        BUFFERS[self.unit.name] = elements, part.numel()
        found = [torch.empty_like(part, dtype=torch.bfloat16) for _ in range(self.group.size())]
        dist.all_gather(found, part.bfloat16(), group=self.group)
        whole.copy_(torch.cat(found))


class HalfGradients(comm.GradientsConfig):
    """What each rank gets is rounded once, and added up in float32."""

    name: Literal["half"] = Field("half", description="Method of reduction.")
    bits: int = Field(16, description="Of each element.")

    def open(self, unit, group):
        return HalfReduce(unit, group)


class HalfReduce(comm.Reduce):
    def __init__(self, unit, group):
        self.unit, self.group = unit, group
        elements = group.size() * sum(shape.numel() for shape in unit.shapes.values())
        self.error = torch.zeros(elements, device=unit.device)

    def state(self):
        return {"error": self.error}

    def __call__(self, part, whole):
        USED[f"reduce {self.unit.name}"] += 1
        wanted = whole + self.error
        sent = wanted.bfloat16()
        self.error = wanted - sent
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=self.group)
        part.copy_(found.view(self.group.size(), -1).float().sum(0))


class Counted(comm.ReplicasConfig):
    """Gradients are added up all at once."""

    name: Literal["counted"] = Field("counted", description="Method of synchronizing replicas.")

    def open(self, unit, group):
        return Flat(group)


class Flat(comm.ReplicaReducer):
    def __init__(self, group):
        self.group = group

    def __call__(self, gradients):
        USED["agree"] += 1
        USED["agree on"] += len(gradients)
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        dist.all_reduce(flat, group=self.group)
        sizes = [gradient.numel() for gradient in gradients.values()]
        for gradient, summed in zip(gradients.values(), flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))


class Whole(ShardingConfig):
    """Unsharded parameters on every rank; gradients are summed after the backward."""

    name: Literal["whole"] = Field("whole", description="Method of sharding.")

    def open(self, target):
        return WholeModel(target.mesh)


class WholeModel(Sharding):
    def __init__(self, mesh):
        self.mesh, self.parts = mesh, []

    def apply(self, part, blocks):
        self.parts.append(part)

    def complete_gradients(self):
        for group in self.mesh.get_all_groups():
            for parameter in nn.ModuleList(self.parts).parameters():
                dist.all_reduce(parameter.grad, group=group)


comm.WEIGHTS["half"] = HalfWeights
comm.GRADIENTS["half"] = HalfGradients
comm.REPLICAS["counted"] = Counted
SHARDING["whole"] = Whole
