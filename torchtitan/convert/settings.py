"""Settings shared by all converters, and the record of their changes."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup

from torchtitan.config import Config, Context, Problem
from torchtitan.device import Device
from torchtitan.models.experts import Experts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from torchtitan.models.spec import ModelSpec


@dataclass
class Conversion:
    """Record of a converter's changes to a model, by name of module."""

    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason for each skipped module."""
    how: str = ""
    """Further remarks for the log."""
    kind: str = "linears"
    """Kind of modules, for the log."""


@dataclass(frozen=True)
class ConversionTarget:
    """Execution environment of the converted model."""

    emulate: bool
    """Whether the device lacks the instructions, so that they are emulated."""
    has_fsdp: bool
    """Whether FSDP2 gathers the parameters."""
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """Ranks that have other parts of the same activations, by axis of the mesh."""


@dataclass
class Wire:
    """Format in which a converted linear, whose attribute `wire` it is, sends tensors over tp."""

    shrink: "Callable[[DTensor], DTensor]"
    """Function applied to its input before that is gathered."""
    shrink_gradient: "Callable[[DTensor], DTensor]"
    """Function applied to its output, which shrinks its gradient before that is gathered."""


class ConverterConfig(Config):
    """Settings of a converter; `name` picks the subclass."""

    name: str
    """Name of the converter: a key of torchtitan.convert.CONVERTERS."""

    @property
    def packs_weights(self) -> str | None:
        """Key that makes weights be gathered in the converter's own form, if set."""
        return None

    @property
    def gathers_inputs(self) -> str | None:
        """Key that makes inputs be gathered in that form over tensor ranks, if set."""
        return None

    def emulates(self, capability: tuple[int, int] | None) -> str | None:
        """Return what a device of that capability (None: a CPU) lacks, if it can be emulated."""
        return None

    def unfit_after_training(self, spec: "ModelSpec[Any]", args: Any) -> str | None:
        """Return why a trained model cannot be evaluated with it; None if it can."""
        return "it serves training; an evaluation computes in --dtype"

    @abstractmethod
    def convert(self, model: nn.Module, target: ConversionTarget) -> Conversion:
        """Change `model`, which is whole and still on the meta device, in place."""

    def before_pass(self, parts: Iterable[nn.Module]) -> None:
        """Prepare the parts of the model whenever their weights may have changed."""


class LinearConverterConfig(ConverterConfig):
    """Settings of a converter of linear layers."""

    filter_fqns: tuple[str, ...] = ("output",)
    """Skip linear layers whose name contains one of these."""
    emulate: bool = False
    """Emulate the matrix products on a device that lacks them: round the operands in the same way,
    and multiply them in their original dtype."""

    def problems(self, context: Context) -> Iterator[Problem]:
        if not context.world.is_here or self.emulate:
            return
        if lack := self.lacks(
            Device("cuda").capability if context.world.device_type == "cuda" else None
        ):
            message = (
                f"{lack}; set emulate = true to round in the same way and multiply in the "
                "original dtype"
            )
            yield Problem("emulate", message)

    @property
    def multiple(self) -> int:
        """Divisor required of both dims of a matrix."""
        return 1

    def measured(self, elements: int) -> str | None:
        """Return what was measured of matrices of at most `elements`, if they gain no speed."""
        return None

    def lacks(self, capability: tuple[int, int] | None) -> str | None:
        """Return what a device of that capability (None: a CPU) lacks, if anything."""
        return None

    def emulates(self, capability: tuple[int, int] | None) -> str | None:
        return self.lacks(capability) if self.emulate else None


def linears(
    model: nn.Module, config: LinearConverterConfig, done: Conversion
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linears that `config` converts; `done` records all, with reasons for skipping."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            done.skipped[name] = "grouped products"
        if not isinstance(module, nn.Linear):
            continue
        outputs, inputs = module.weight.shape
        if type(module) is not nn.Linear:
            done.skipped[name] = "converted before"
        elif any(part in name for part in config.filter_fqns):
            done.skipped[name] = "filter"
        elif outputs % config.multiple or inputs % config.multiple:
            done.skipped[name] = f"{outputs} x {inputs}, not multiples of {config.multiple}"
        else:
            done.changed.append(name)
            yield name, module


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name` by `module`."""
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, module)
