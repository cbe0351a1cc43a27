"""Optimizer states in host memory, with updates computed on the host.

The host holds the states and a copy of the weights. Each parameter has its own optimizer, so while
one is updated, gradients of later ones are copied to the host and weights of earlier ones to the
device (ZeRO-Offload, Ren et al., 2021, arXiv:2101.06840). Weights are float32 and the host's copy
equals the device's to the bit, so a checkpoint is the same as without offloading.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.device import Device
from torchtitan.optim.grouping import Assignment, groups_of
from torchtitan.optim.norm import local
from torchtitan.optim.optimizer_group import Optimizers
from torchtitan.optim.parameters import NamedParameter
from torchtitan.optim.settings import OptimizerConfig, UpdateRule
from torchtitan.torch_private.dtensor import laid_out_as


class Offloaded(Optimizers):
    """The optimizer over every model part of this rank, in host memory."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        config: OptimizerConfig,
        stages: dist.ProcessGroup | None,
        device: Device,
    ) -> None:
        self.device = device
        self.hosts: dict[Tensor, Tensor] = {}
        self.optimizer_of: dict[Tensor, torch.optim.Optimizer] = {}
        self.is_current = False
        """Whether the host's weights equal those of the device."""
        super().__init__(parameters, config, stages)
        self.name_of = {host: self.names[p] for p, host in self.hosts.items()}

    def _build(self, assignments: Sequence[Assignment]) -> dict[torch.optim.Optimizer, UpdateRule]:
        for one in assignments:
            parameter = one.parameter.tensor
            host = self.hosts[parameter] = self._memory_for(parameter)
            on_host = one._replace(parameter=replace(one.parameter, tensor=host))
            self.optimizer_of[parameter] = one.chosen.build(groups_of([on_host]))
        return {self.optimizer_of[one.parameter.tensor]: one.chosen for one in assignments}

    def _memory_for(self, parameter: Tensor) -> Tensor:
        """Allocate host memory, pinned for fast copies, with the parameter's layout."""
        pinned = self.device.type != "cpu"
        part = torch.empty_like(local(parameter), device="cpu", pin_memory=pinned)
        return laid_out_as(parameter, part)

    def _name(self, updated: Tensor) -> str:
        return self.name_of[updated]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        arrivals = {p: self._bring_down(p) for p in self.names if p.grad is not None}
        self.is_current = True
        departures = []
        for parameter, arrived in arrivals.items():
            if arrived is not None:
                arrived.synchronize()
            self.optimizer_of[parameter].step()
            departures.append(self._copy(local(parameter), local(self.hosts[parameter])))
        for departed in departures:
            if departed is not None:
                departed.wait()

    def _bring_down(self, parameter: Tensor) -> torch.Event | None:
        host, gradient = self.hosts[parameter], parameter.grad
        assert gradient is not None
        if not self.is_current:
            local(host).copy_(local(parameter))
        if host.grad is None:
            host.grad = self._memory_for(parameter)
        return self._copy(local(host.grad), local(gradient))

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Copy asynchronously, until the event; None if already complete."""
        if self.device.type == "cpu":
            target.copy_(source)
            return None
        with self.device.side_stream() as copied:
            target.copy_(source, non_blocking=True)
        return copied

    def weights_changed(self) -> None:
        self.is_current = False
