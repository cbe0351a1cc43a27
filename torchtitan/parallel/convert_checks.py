"""What a recipe can get wrong about its converters, and what would work instead."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.convert import Conversion, ConverterConfig, Float8, linears
from torchtitan.models.spec import TensorRole
from torchtitan.parallel.settings import ParallelismConfig
from torchtitan.parallel.sharding import ShardingConfig

Fault = tuple[str, str]
"""A dotted key, and what is wrong with its value."""


def problems(
    converters: Sequence[ConverterConfig],
    config: ParallelismConfig,
    sharding: ShardingConfig,
    model: nn.Module,
    plan: Mapping[str, TensorRole],
    tokens: int,
) -> Iterator[Fault]:
    """Everything about the converters that cannot work.

    Args:
        model: the whole, on the meta device; it stays as it is.
        plan: what its modules are to tensor parallelism.
        tokens: that a rank multiplies with a matrix at a time.
    """
    seen: dict[str, int] = {}
    for number, converter in enumerate(converters):
        key = f"convert.{number}"
        if isinstance(converter, Float8):
            yield from _problems_of_float8(key, converter, config, sharding)
        wanted = {
            name: linear.weight.shape for name, linear in linears(model, converter, Conversion())
        }
        if not wanted:
            message = (
                "it leaves no linear to convert: all others have a dim that is not a multiple of "
                f"{converter.multiple}; name fewer, or leave the converter out"
            )
            yield f"{key}.filter_fqns", message
            continue
        if before := {seen[name] for name in wanted if name in seen}:
            earlier = f"convert.{min(before)}"
            message = (
                f"{earlier} converts linears that this one would; filter them in one of the two "
                f"({earlier}.filter_fqns or {key}.filter_fqns)"
            )
            yield f"{key}.name", message
        seen |= dict.fromkeys(wanted, number)
        yield from _problems_of_parts(key, converter, config, wanted, plan)
        if tokens % converter.multiple:
            message = (
                f"a rank multiplies {tokens} tokens at a time (sequences of a microbatch x "
                "training.seq_len / context_parallel_degree), which the gradients of the weights "
                f"need in multiples of {converter.multiple}"
            )
            yield f"{key}.name", message


def _problems_of_float8(
    key: str, converter: Float8, config: ParallelismConfig, sharding: ShardingConfig
) -> Iterator[Fault]:
    fsdp, tensor = "enable_fsdp_float8_all_gather", "enable_tensor_parallel_float8_all_gather"
    for name in (fsdp, tensor):
        if getattr(converter, name) and converter.recipe != "tensorwise":
            message = (
                "what is gathered in Float8 has one scale for the whole tensor; use recipe = "
                f'"tensorwise", not "{converter.recipe}"'
            )
            yield f"{key}.{name}", message
    if converter.enable_fsdp_float8_all_gather and not sharding.packs_weights:
        message = 'it is FSDP2 that gathers so; use sharding.name = "fsdp2"'
        yield f"{key}.{fsdp}", message
    if converter.precompute_float8_dynamic_scale_for_fsdp and not getattr(converter, fsdp):
        message = f"it finds the scales for {fsdp} = true; write that too, or leave it out"
        yield f"{key}.precompute_float8_dynamic_scale_for_fsdp", message
    if converter.enable_tensor_parallel_float8_all_gather:
        if config.tensor_parallel_degree == 1:
            message = "parallelism.tensor_parallel_degree is 1, so there is nothing to gather"
            yield f"{key}.{tensor}", message
        elif config.disable_sequence_parallel:
            message = (
                "what is gathered are parts of the sequence, and "
                "parallelism.disable_sequence_parallel = true leaves each rank the whole"
            )
            yield f"{key}.{tensor}", message


def _problems_of_parts(
    key: str,
    converter: ConverterConfig,
    config: ParallelismConfig,
    wanted: Mapping[str, Sequence[int]],
    plan: Mapping[str, TensorRole],
) -> Iterator[Fault]:
    """A linear is converted by its whole shape, so that layouts agree; its parts must fit too."""
    tp, multiple = config.tensor_parallel_degree, converter.multiple
    if tp == 1:
        return
    for name, (outputs, inputs) in wanted.items():
        roles = [role for pattern, role in plan.items() if fnmatchcase(name, pattern)]
        split = inputs if roles == ["rowwise"] else outputs
        if roles and split % (tp * multiple):
            message = (
                f"{name} is {outputs} x {inputs}, and its {tp} parts (tensor_parallel_degree) are "
                f"not in multiples of {multiple}; add it to {key}.filter_fqns, or split it less"
            )
            yield f"{key}.filter_fqns", message
            return
