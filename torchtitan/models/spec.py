"""The facts about a model that the rest of the library uses.

A network is a plain module; its spec holds the facts that training needs but the network does not.
Everything outside `torchtitan.models` reads the facts and never the network, so a new model is one
file and one line in `torchtitan.models.MODELS`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.config import show
from torchtitan.models.settings import ModelConfig, TextConfig
from torchtitan.torch_private.dtensor import is_dtensor, local_extent
from torchtitan.torch_private.runtime import generator_of

InitialWeight = float | Literal["ones", "zeros"]
"""Initial value of a parameter: normal with this standard deviation, or all ones, or zeros."""

TensorRole = Literal[
    "embedding",
    "norm",
    "head_norm",
    "joint_norm",
    "whole",
    "input_gather",
    "colwise",
    "gathered_colwise",
    "gathered",
    "sinks",
    "rowwise",
    "logits",
    "router",
    "experts",
]
"""Role of a module in tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053):

    embedding     a table sharded on the vocabulary
    norm          works on each token separately, so on any part of the sequence
    head_norm     normalizes each attention head separately: (batch, sequence, heads, features)
    joint_norm    normalizes all heads together: (batch, sequence, features of all heads)
    whole         replicated: all ranks compute the same
    input_gather  a module whose input is gathered once, for the "colwise" inside it
    colwise       a linear sharded by its outputs
    gathered_colwise
                  the same, whose input is gathered for it alone
    gathered      what heads of all ranks share: a module that returns its input, without weights
    sinks         a vector with an element for each query head: sharded with the heads
    rowwise       a linear sharded by its inputs, whose results are summed over ranks
    logits        the last linear, sharded on the vocabulary
    router        replicated: each rank chooses experts for its tokens, and all learn of the choice
    experts       sharded by hidden features, whose results are summed over ranks
"""


class ModelArgs(Protocol):
    """Attributes common to the arguments of all models; those of text also have `vocab_size`."""

    @property
    def n_layers(self) -> int: ...
    @property
    def dim(self) -> int: ...


class SampleShapes(NamedTuple):
    """Shapes of one sample in a network; the first dim of a sequence is its positions."""

    inputs: tuple[int, ...]
    hidden: tuple[int, ...]
    """Shape between two blocks."""
    outputs: tuple[int, ...]
    input_dtype: torch.dtype = torch.int64
    others: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """Outputs of blocks that differ from `hidden`, by patterns of their names."""

    extra_hidden: int = 0
    """Number of additional hidden states that pipeline stages pass on in training, for auxiliary
    losses on the last stage; they follow in the dim of samples."""

    def after(self, module: str) -> tuple[int, ...]:
        """Return the shape of the output of a block, or of the modules before all blocks."""
        found = (shape for pattern, shape in self.others.items() if fnmatchcase(module, pattern))
        return next(found, self.hidden)


def shapes_of_tokens(args: Any, seq_len: int) -> SampleShapes:
    """Return the shapes of a network that maps token ids to logits."""
    return SampleShapes((seq_len,), (seq_len, args.dim), (seq_len, args.vocab_size))


class TensorSplits(NamedTuple):
    """Sizes that must be divisible by the number of tensor-parallel ranks, by name."""

    heads: Mapping[str, int]
    dims: Mapping[str, int]
    """Sharded input dims of matrices; FSDP shards the rest."""


class AttentionShape(NamedTuple):
    """Sizes of each `SelfAttention` of a network."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads, a divisor of the query heads."""
    head_dim: int
    window: int = 0
    """Number of most recent tokens that a token attends to, itself included; 0: all."""
    has_norms: bool = False
    """Whether queries and keys are normalized."""
    has_sinks: bool = False
    """Whether each head has a sink."""
    is_mixed: bool = False
    """Whether some have no window."""

    def window_in(self, seq_len: int) -> int:
        """Return the window if it is shorter than a sequence, else 0."""
        return self.window if self.window < seq_len else 0


class ExpertShape(NamedTuple):
    """Experts of the blocks that have them."""

    number: int
    chosen: int
    """Number of experts of a token."""
    has_bias: bool = False
    """Whether a bias of each expert, which no gradient changes, balances the choice."""
    has_loss: bool = False
    """Whether the loss that balances the choice is computed."""


class MinShape(NamedTuple):
    """Minimum sizes of a small model, so that the layout of the large one fits it."""

    n_layers: int
    tensor_ranks: int
    """Divisor of the heads and the features."""
    vocab_size: int


Args = TypeVar("Args", bound=ModelArgs)


class TensorShare(NamedTuple):
    """Place of a parameter in a tensor of a `WeightFormat`.

    If the parameter has three dims, its last two are exchanged there.
    """

    first: int = 0
    """Index in the last dim there of the parameter's first element."""
    step: int = 1
    """Distance of its elements in that dim, and number of parameters that share it."""

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor there from that of the parameter."""
        *others, last = _exchanged(shape)
        return *others, last * self.step

    def block(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of the block there that holds one of the parameter."""
        (*begin, start), (*counts, count) = _exchanged(offsets), _exchanged(sizes)
        return (*begin, start * self.step), (*counts, count * self.step)

    def of(self, whole: Tensor) -> Tensor:
        """Return the parameter's elements of a tensor there, or of such a block, as a view."""
        own = whole[..., self.first :: self.step]
        return own.mT if own.ndim == 3 else own


def _exchanged(sizes: Sequence[int]) -> Sequence[int]:
    """Return sizes with the last two of three exchanged."""
    return (sizes[0], sizes[2], sizes[1]) if len(sizes) == 3 else sizes


@dataclass(frozen=True, kw_only=True)
class WeightFormat(Generic[Args]):
    """Description, names and row order of a family's weights in other software."""

    config: Callable[[Args, int | None], dict[str, Any]]
    """(arguments, longest sequence if known) to the content of its config file; a RecipeError names
    everything that it cannot express of the network."""
    args: Callable[[Mapping[str, Any]], Args]
    """Content of its config file to arguments; a RecipeError names everything unsupported."""
    name: Callable[[str], str]
    """Our name of a parameter to its name there; `*` in it is the index in our first dim, of
    parameters that are several tensors there."""
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """End of the name of a tensor that may hold others, as equal parts of its second dim, to the
    ends of their names, with `*` for the index in its first."""
    architectures: Sequence[str] = ()
    """Names of its networks in a config file, if it has names. Those after the first are networks
    of other families that it reads if it is asked to."""
    near: Mapping[str, str] = field(default_factory=dict)
    """Names of networks like its own to what differs, for the message that refuses them."""
    rows: Callable[[Args, str], Tensor | None] = lambda args, name: None
    """(arguments, our name) to the row there of each of our rows; None: the same."""
    repeated: Callable[[Args], Mapping[str, str]] = lambda args: {}
    """Optional tensors there that repeat another: their name there to our name of the other."""
    must_repeat: bool = False
    """Whether the `repeated` tensors are required."""
    constants: Callable[[Args], Mapping[str, Tensor]] = lambda args: {}
    """Tensors there that are not parameters of ours: written, and compared if present."""
    share: Callable[[str], "TensorShare | None"] = lambda name: None
    """Our name to the place in a tensor there of a parameter that several may share."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensors that cannot be read to what to do about them."""
    has_tokens: bool = True
    """Whether its config file names the tokens that start and end a text."""
    computed: str = "(?!)"
    """Pattern of tensors there that follow from the config, and are not read."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Generic[Args]):
    """Facts about one family of models."""

    name: str
    flavors: Mapping[str, Args]
    """Arguments of each size, by its name in recipes."""
    build: Callable[[Args, int], nn.Module]
    """(arguments, longest sequence) to a network that maps the inputs of its task's batches,
    with their context by keyword, to the input of the task's loss. A network of text maps
    tokens, `positions` in the sequence and, to mask other documents, `documents`, all (B, S), to
    logits (B, S, V); with `targets` as well, by its `LinearLoss`, to the sum of their losses."""
    blocks: Callable[[nn.Module], dict[str, nn.Module]]
    """Repeating blocks of a network, or of a pipeline stage of it: in order, by name."""
    init_std: Callable[[Args, str], InitialWeight]
    """(arguments, parameter name) to the initial value of that parameter."""
    growth: Callable[[Args, str], tuple[float, float]] = lambda args, name: (1.0, 1.0)
    """(arguments, parameter name) to the widths of its inputs and outputs, relative to those in the
    base model of `model.base_width`."""
    without_base: Callable[[Args, str, Tensor], Tensor] = lambda args, name, weight: weight
    """(arguments, parameter name, its weights) to those of the same network without a base."""
    before_blocks: tuple[str, ...]
    """Modules with parameters before the blocks, in order: a pipeline's first stage."""
    after_blocks: tuple[str, ...]
    """Modules with parameters after the blocks, in order: a pipeline's last stage."""
    auxiliary: str | None = None
    """Module with the parameters of auxiliary losses, next to those after the blocks; a network
    has it only if its arguments ask for one, and other formats do not know it."""
    auxiliary_blocks: Callable[[nn.Module], dict[str, nn.Module]] = lambda model: {}
    """Repeated blocks of the auxiliary module, in a network or a stage: in order, by name."""
    flops_per_unit: Callable[[Args, int], int]
    """(arguments, sequence length) to forward and backward FLOPs of one unit, such as a token."""
    flops_of: Callable[[Args, int, str], float] | None = None
    """(arguments, sequence length, name of a module) to its part in `flops_per_unit`; None: a
    parameter costs 6, and blocks share the rest equally."""
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """Module names, `*` for any block, to their role in tensor parallelism."""
    optional: Collection[str] = ()
    """Patterns of `tensor_plan` that match no module of some networks."""
    tensor_splits: Callable[[Args], TensorSplits] = lambda args: TensorSplits({}, {})
    """Sizes that must be divisible by the tensor-parallel degree, if there is a `tensor_plan`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Overrides of the inferred optimizer role, by parameter name, with `*` as above."""
    heads: Callable[[Args, str], tuple[int, int] | None] = lambda args, name: None
    """(arguments, parameter name) to the dim and number of its attention heads; None: no heads."""
    attention: Callable[[Args], AttentionShape | None] = lambda args: None
    """Sizes of its `SelfAttention`; None: it has none."""
    experts: Callable[[Args], ExpertShape | None] = lambda args: None
    """Its experts; None: it has none."""
    tied: Callable[[Args], bool] = lambda args: False
    """Whether the output uses the weights of the embedding."""
    queries_and_keys: tuple[str, str] | None = None
    """Names of the query and key linears in the module of each `SelfAttention`, if logits grow
    with their weights; None: they do not, as with normalized queries and keys."""
    shrink: Callable[[Args, MinShape], Args] = lambda args, _: args
    """Arguments to those of a network of the same structure that trains in seconds on a CPU."""
    formats: Mapping[str, WeightFormat[Args]] = field(default_factory=dict)
    """Other formats of its weights: "hf" for Hugging Face, "meta" for Meta's own."""
    task: str = "next_token"
    """Training task: a key of `torchtitan.tasks.TASKS`."""
    shapes: Callable[[Args, int], SampleShapes] = shapes_of_tokens
    """(arguments, sequence length) to the shapes of a sample, for a pipeline's messages."""
    open_vocabulary: Collection[str] = ()
    """Flavors whose vocabulary grows to the size of the tokenizer's, unless the recipe sets it."""
    settings: type[ModelConfig] = TextConfig
    """Settings class of the section `[model]` for this family."""

    def all_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks to recompute, compile and gather separately, auxiliary last."""
        return {**self.blocks(model), **self.auxiliary_blocks(model)}

    def ends(self, args: Args) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the modules before and after all blocks that are needed only there: none if the
        output uses the weights of the embedding."""
        return ((), ()) if self.tied(args) else (self.before_blocks, self.after_blocks)

    def args(self, config: ModelConfig) -> Args:
        """Return the arguments in effect: the flavor's, with the sizes set in the recipe."""
        return config.over(self.flavors[config.flavor])

    def with_sizes(self, key: str, description: str) -> str:
        """Name the values of a size in the description of its key: `default: 256 in debugmodel`."""
        flavors: dict[str, list[str]] = {}
        for flavor, args in self.flavors.items():
            value = self.settings.sizes_of(args)[key]
            flavors.setdefault("none" if value is None else show(value), []).append(flavor)
        named = "; ".join(f"{value} in {', '.join(names)}" for value, names in flavors.items())
        values = next(iter(flavors)) if len(flavors) == 1 else named
        return description.replace("default: the flavor's", f"default: {values}")

    def with_flavor(self, name: str, args: Args) -> Self:
        """Return the family with an additional or replaced flavor."""
        return replace(self, flavors={**self.flavors, name: args})

    def initial(self, args: Args, name: str) -> InitialWeight:
        """Return the initial value of a parameter, by its growth as in `models.width`."""
        usual, (inputs, outputs) = self.init_std(args, name), self.growth(args, name)
        if isinstance(usual, str) or inputs == 1:
            return usual
        return usual / (inputs if outputs == 1 else math.sqrt(inputs))

    def unmatched(self, model: nn.Module) -> list[str]:
        """Return the patterns of `tensor_plan` that match no module of a whole network.

        Modules of auxiliary losses are only in the networks of recipes that add them.
        """
        names = [name for name, _ in model.named_modules()]
        return [
            pattern
            for pattern in self.tensor_plan
            if pattern not in self.optional
            and not (self.auxiliary and _within(pattern, (self.auxiliary,)))
            and not any(fnmatchcase(name, pattern) for name in names)
        ]

    def role(self, name: str, ndim: int) -> str:
        """Return the optimizer role of a parameter: a name in `roles`, or one of these.

        "embedding" is before the blocks and "head" after them, "norm" is any vector but a "bias",
        and "matrix" is everything else.
        """
        for pattern, role in self.roles.items():
            if fnmatchcase(name, pattern):
                return role
        module, _, last = name.rpartition(".")
        planned = {role for p, role in self.tensor_plan.items() if fnmatchcase(module, p)}
        if ndim < 2:
            return "bias" if last == "bias" and not planned & {"norm", "head_norm"} else "norm"
        if "embedding" in planned or _within(name, self.before_blocks):
            return "embedding"
        return "head" if _within(name, self.after_blocks) else "matrix"


def tensor_roles(module: nn.Module, plan: Mapping[str, TensorRole]) -> dict[str, TensorRole]:
    """Return the tensor-parallel role of each submodule that has one, by name."""
    return {
        name: role
        for name, _ in module.named_modules()
        for pattern, role in plan.items()
        if fnmatchcase(name, pattern)
    }


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


class _NothingDrawn(TorchFunctionMode):
    """Mode that skips the random initialization of torch's layers."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def build_empty(
    build: Callable[[Args, int], nn.Module],
    args: Args,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build the network on the meta device, without memory, with parameters of `dtype`.

    Its weights are drawn later, by name. Drawing them here too would change nothing, but torch
    imports its compiler to draw on the meta device, which takes a second.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _NothingDrawn():
            return build(args, seq_len)
    finally:
        torch.set_default_dtype(usual)


class ParameterCounts(NamedTuple):
    """Numbers of parameters; `embedding` is the part of `total` in token embeddings."""

    total: int
    embedding: int


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of a whole network, not a pipeline stage; it may be on "meta"."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return ParameterCounts(
        total=sum(parameter.numel() for parameter in model.parameters()),
        embedding=sum(module.weight.numel() for module in embeddings),
    )


BLOCK = 2**20
"""Approximate elements per block. Changing it changes the weights of every seed.

Small blocks waste little where a rank owns part of one; large ones need few generators.
"""


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, Tensor]], rule: Callable[[str], InitialWeight], seed: int
) -> None:
    """Overwrite `parameters` (name, plain tensor or `DTensor`) in place, the same on every layout.

    Every weight is a function of (seed, parameter name, position in the whole parameter) alone: a
    parameter is divided into blocks of rows, and each block has its own generator, whose state is a
    hash. A rank draws only the blocks it owns a part of, so any layout starts bit-identical to one
    rank, with no seed checkpoint. Weights are drawn in fp32 on the CPU, so the device and dtype of
    a parameter affect only the final rounding.

    Names must be those of the plain model, without wrappers; `rule` returns how each one starts.
    """
    for name, parameter in parameters:
        initial = rule(name)
        if is_dtensor(parameter):
            local, (_, offset) = parameter.to_local(), local_extent(parameter)
        else:
            local, offset = parameter, (0,) * parameter.ndim
        if isinstance(initial, str):
            local.fill_({"ones": 1.0, "zeros": 0.0}[initial])
        else:
            fill_normal(local, offset, parameter.shape, initial, f"{seed}/{name}")


def fill_normal(
    local: Tensor, offset: tuple[int, ...], shape: torch.Size, std: float, stream: str
) -> None:
    """Fill `local`, the part at `offset` of a parameter of `shape`, from the named stream."""
    rows, *rest = shape
    block_rows = max(1, BLOCK // torch.Size(rest).numel())
    first, last = offset[0], offset[0] + local.shape[0]
    columns = [slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True)]
    for start in range(first - first % block_rows, last, block_rows):
        stop = min(start + block_rows, rows)
        generator = generator_of(f"{stream}/{start // block_rows}")
        block = torch.empty(stop - start, *rest, device="cpu", dtype=torch.float32)
        block.normal_(0.0, std, generator=generator)
        begin, end = max(first, start), min(last, stop)
        mine = block[begin - start : end - start][:, *columns]
        local[begin - first : end - first].copy_(mine)
