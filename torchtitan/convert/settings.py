"""What all converters have in common: their settings, and the record of what they changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.config import Config, PlannedWorld, Problem
from torchtitan.device import Device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


What = Literal["input", "weight", "gradient"]
"""What of a linear is rounded; the gradient is that of its output."""


@dataclass
class Conversion:
    """What a converter did to a model, by name of module."""

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why each of the others was left as it is."""
    how: str = ""
    """What else to say of it, for the log."""
    kind: str = "linears"
    """What modules there are of."""


@dataclass(frozen=True)
class Target:
    """What a model is converted for."""

    emulate: bool
    """The device lacks what it takes."""
    has_fsdp: bool
    """FSDP2 gathers the parameters."""
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """By axis of the mesh, the ranks that have other parts of the same activations."""


@dataclass
class Wire:
    """How a converted linear, as its attribute `wire`, has tensors sent between tensor ranks."""

    shrink: "Callable[[DTensor], DTensor]"
    """Applied to its input before that is gathered."""
    shrink_gradient: "Callable[[DTensor], DTensor]"
    """Applied to its output; has the gradient of that shrunk before it is gathered."""
    watch: "Callable[[What, Tensor], None] | None" = None
    """Called with what is shrunk."""


class Rounding(NamedTuple):
    """What a tensor is rounded from and to, and how it was scaled before."""

    scaled: Tensor
    """Elements times their scales, float32."""
    rounded: Tensor
    """The same in the format, float32."""
    scale: Tensor
    largest: float
    """Of the numbers that the format has."""

    def shares(self) -> dict[str, Tensor]:
        """How much is lost, and the scale of the largest elements; 0-d each, on the device."""
        if not self.scaled.numel():
            return {}
        is_something = self.scaled != 0
        vanished = is_something & (self.rounded == 0)
        return {
            "underflow": vanished.sum() / is_something.sum().clamp(min=1),
            "saturation": (self.scaled.abs() > self.largest * BEYOND).float().mean(),
            "scale": self.scale.min(),
        }


BEYOND = 1 + 2**-12
"""More than the largest number by more than the rounding of its own scale."""


class ConverterConfig(Config):
    """Settings of a converter; `name` picks the subclass."""

    name: str = Field(description="Which converter: a key of torchtitan.convert.CONVERTERS.")

    @property
    def packs_weights(self) -> str | None:
        """The key by which weights are gathered in the converter's own form, if they are."""
        return None

    @property
    def gathers_inputs(self) -> str | None:
        """The key by which inputs are gathered in that form over tensor ranks, if they are."""
        return None

    def emulates(self, capability: tuple[int, int] | None) -> str | None:
        """What a device of that compute capability (None: a CPU) lacks and is emulated, if so."""
        return None

    def convert(self, model: nn.Module, target: Target) -> Conversion:
        """Change `model`, which is whole and still on the meta device, in place."""
        raise NotImplementedError

    def has_converted(self, module: nn.Module) -> bool:
        """Whether a module is one that such a converter makes, and `watch` knows it."""
        return False

    def watch(
        self, module: nn.Module, keep: Callable[[str, Rounding], None]
    ) -> Iterator[Callable[[], None]]:
        """Have `keep` called with the name and the rounding of each tensor that a converted module
        rounds on this rank.

        Yields:
            Functions that end it.
        """
        raise NotImplementedError

    def before_pass(self, parts: Iterable[nn.Module]) -> None:
        """Do what the parts of the model need whenever their weights may have changed."""


class LinearConverterConfig(ConverterConfig):
    """Settings of a converter of linear layers."""

    filter_fqns: tuple[str, ...] = Field(
        ("output",),
        description="Linear layers whose name contains one of these are not converted.",
    )
    emulate: bool = Field(
        False,
        description="On a device without such matrix products: round the operands in the same "
        "way, and multiply them in their original dtype.",
    )

    def problems(self, recipe: Any, world: PlannedWorld) -> Iterator[Problem]:
        if not world.is_here or self.emulate:
            return
        if lack := self.lacks(Device("cuda").capability if world.device_type == "cuda" else None):
            message = f"{lack}; write emulate = true to round so and multiply otherwise"
            yield Problem("emulate", message)

    def rounding(self, module: nn.Module, what: What, x: Tensor) -> Rounding | None:
        """How a converted linear rounds this rank's part of `x`; None: it does not, or has done."""
        raise NotImplementedError

    def watch(
        self, module: Any, keep: Callable[[str, Rounding], None]
    ) -> Iterator[Callable[[], None]]:
        weight = module.weight

        @torch.no_grad()
        def note(what: What, x: Tensor) -> None:
            if (rounding := self.rounding(module, what, x.detach())) is not None:
                keep(what, rounding)

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            note("input", inputs[0])
            # Where it was gathered in Float8, this rank's part of it was not.
            note("weight", module.weight)
            note("weight", weight)

        def leave(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(partial(note, "gradient"))  # type: ignore[no-untyped-call]

        # Before tensor parallelism makes parts of it again.
        yield module.register_forward_pre_hook(enter).remove
        yield module.register_forward_hook(leave, prepend=True).remove
        if hasattr(module, "wire"):
            wire = module.wire

            def forget() -> None:
                wire.watch = None

            wire.watch = note
            yield forget

    @property
    def multiple(self) -> int:
        """What both dims of a matrix must be a multiple of."""
        return 1

    def lacks(self, capability: tuple[int, int] | None) -> str | None:
        """What a device of that compute capability (None: a CPU) lacks for it, if anything."""
        return None

    def emulates(self, capability: tuple[int, int] | None) -> str | None:
        return self.lacks(capability) if self.emulate else None


def linears(
    model: nn.Module, config: LinearConverterConfig, done: Conversion
) -> Iterator[tuple[str, nn.Linear]]:
    """The linears that `config` converts; `done` is called for all, and why others are left out."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        outputs, inputs = module.weight.shape
        if type(module) is not nn.Linear:
            done.skipped[name] = "converted before"
        elif any(part in name for part in config.filter_fqns):
            done.skipped[name] = "filter"
        elif outputs % config.multiple or inputs % config.multiple:
            done.skipped[name] = f"{outputs} x {inputs}, not in multiples of {config.multiple}"
        else:
            done.changed.append(name)
            yield name, module


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one of that name."""
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, module)
