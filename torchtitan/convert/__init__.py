"""Converters by their name in recipes; adding one is a file here and a line below.

A converter changes a model before it is parallelized: a recipe's `[[convert]]` entries are applied
in order, while the model is whole and has no memory. Each reports what it changed and skipped.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed import ProcessGroup

from torchtitan.config import Registry, first_of
from torchtitan.convert.float8 import MXFP8, Float8
from torchtitan.convert.settings import (
    Conversion,
    ConversionTarget,
    ConverterConfig,
    LinearConverterConfig,
    Wire,
    linears,
    replace,
)
from torchtitan.logging import logger
from torchtitan.torch_private.torchao import quiet_torchao

CONVERTERS = Registry[type[ConverterConfig]]("convert", {"float8": Float8, "mxfp8": MXFP8})

SHOWN = 8
"""Maximum number of names listed per reason for skipping."""


def apply(
    model: nn.Module,
    converters: Iterable[ConverterConfig],
    capability: tuple[int, int] | None,
    has_fsdp: bool,
    groups: Mapping[str, ProcessGroup] | None = None,
) -> list[Conversion]:
    """Apply all `converters` to `model` in place, in order, and log the result of each.

    Args:
        capability: CUDA compute capability of the device, None on a CPU.
        has_fsdp: whether FSDP2 will gather the parameters.
        groups: by axis of the mesh, the ranks that have other parts of the same activations.
    """
    done = []
    for config in converters:
        lack = config.emulates(capability)
        with quiet_torchao():
            target = ConversionTarget(lack is not None, has_fsdp, groups or {})
            done.append(config.convert(model, target))
        how = f"; emulated: {lack}" if lack else ""
        logger.info("%s%s", describe(config, done[-1]), how)
    return done


def describe(config: ConverterConfig, done: Conversion) -> str:
    """Describe a conversion in a line: `float8: 224 of 225 linears; skipped output (filter)`."""
    changed, many = len(done.changed), len(done.changed) + len(done.skipped)
    by_reason = defaultdict[str, list[str]](list)
    for name, reason in done.skipped.items():
        by_reason[reason].append(name)
    skipped = [f"{first_of(names, SHOWN)} ({reason})" for reason, names in by_reason.items()]
    end = f"; skipped {'; '.join(skipped)}" if skipped else ""
    return f"{config.name}{done.how}: {changed} of {many} {done.kind}{end}"


def before_pass(converters: Iterable[ConverterConfig], parts: Iterable[nn.Module]) -> None:
    """Prepare the parts of the model for all converters after weights may have changed."""
    for config in converters:
        config.before_pass(parts)
