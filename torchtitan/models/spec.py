"""What the rest of the library may ask about a model.

A model file holds a network and nothing else; its spec holds the facts that training needs but
the network does not. Everything outside `torchtitan.models` reads the facts and never the network,
so a new model is two files and one line in `torchtitan.models.MODELS`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.models.settings import ModelConfig, TextConfig

InitialWeight = float | Literal["ones", "zeros"]
"""How a parameter starts: normal with this standard deviation, or all ones, or zeros."""

TensorRole = Literal[
    "embedding", "norm", "head_norm", "whole", "input_gather", "colwise", "rowwise", "logits"
]
"""What a module is to tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053):

    embedding     a table split on the vocabulary
    norm          works on each token alone, so on any part of the sequence
    head_norm     normalises each head of attention alone: (batch, sequence, heads, features)
    whole         every rank has all of it, and computes the same
    input_gather  a module whose input is made whole once, for the "colwise" inside it
    colwise       a linear split by its outputs
    rowwise       a linear split by its inputs, whose results add up over ranks
    logits        the last linear, split on the vocabulary
"""


class ModelArgs(Protocol):
    """What every model's arguments have.

    Of text they also have `vocab_size`, and with a `tensor_plan` what `tensor_splits` asks for.
    """

    @property
    def n_layers(self) -> int: ...
    @property
    def dim(self) -> int: ...


class SampleShapes(NamedTuple):
    """Shapes of one sample in a network; of a sequence, its positions are in the first dim."""

    inputs: tuple[int, ...]
    hidden: tuple[int, ...]
    """Between two blocks."""
    outputs: tuple[int, ...]
    input_dtype: torch.dtype = torch.int64
    others: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """What blocks hand on, by patterns of their names, where it is not `hidden`."""

    beside: int = 0
    """How many hidden states more the stages of a pipeline hand on in training, for what its last
    one makes auxiliary losses of; they follow in the dim of samples."""

    def after(self, module: str) -> tuple[int, ...]:
        """The hidden states that a block, or what is before all blocks, hands on."""
        found = (shape for pattern, shape in self.others.items() if fnmatchcase(module, pattern))
        return next(found, self.hidden)


def shapes_of_tokens(args: Any, seq_len: int) -> SampleShapes:
    """Of a network that maps token ids to logits."""
    return SampleShapes((seq_len,), (seq_len, args.dim), (seq_len, args.vocab_size))


class TensorSplits(NamedTuple):
    """What tensor ranks have to divide, by what it is called."""

    heads: Mapping[str, int]
    dims: Mapping[str, int]
    """Of the matrices whose inputs are split; FSDP divides what is left."""


def splits_of_queries_and_keys(args: Any) -> TensorSplits:
    """Of a network with grouped queries."""
    heads = {"heads": args.n_heads, "key/value heads": args.n_kv_heads}
    return TensorSplits(heads, {"dim": args.dim})


class MinShape(NamedTuple):
    """What a small model must still have, so that a layout of the large one fits it."""

    n_layers: int
    tensor_ranks: int
    """They divide the heads and the features."""
    vocab_size: int


Args = TypeVar("Args", bound=ModelArgs)


@dataclass(frozen=True, kw_only=True)
class WeightFormat(Generic[Args]):
    """How other software describes, names and orders the weights of a family of models."""

    config: Callable[[Args, int | None], dict[str, Any]]
    """(arguments, longest sequence if known) to what its config file says of them."""
    args: Callable[[Mapping[str, Any]], Args]
    """What its config file says to arguments; a RecipeError names all that we do not have."""
    name: Callable[[str], str]
    """Our name of a parameter to the one there."""
    architecture: str | None = None
    """What its config file calls the family, where it does."""
    rows: Callable[[Args, str], Tensor | None] = lambda args, name: None
    """(arguments, our name) to which row there each of our rows is; None: the same."""
    repeated: Callable[[Args], Mapping[str, str]] = lambda args: {}
    """Tensors that may stand there although they repeat another: their name there to our name of
    the parameter they repeat."""
    must_repeat: bool = False
    """Whether those have to stand there."""
    constants: Callable[[Args], Mapping[str, Tensor]] = lambda args: {}
    """Tensors there that are no parameters of ours: written, and where they stand, compared."""
    has_tokens: bool = True
    """Whether its config file names the tokens that begin and end a text."""
    computed: str = "(?!)"
    """Pattern of tensors there that follow from the config, and are not read."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Generic[Args]):
    """The facts about one family of models."""

    name: str
    flavors: Mapping[str, Args]
    """Arguments of each size, by the name a recipe calls it."""
    build: Callable[[Args, int], nn.Module]
    """(arguments, longest sequence) to a network that maps the inputs of its task's batches, with
    their context by keyword, to what the task's loss takes. Of text it maps tokens, `positions` in
    the sequence and, if asked to keep them apart, `documents`, all (B, S), to logits (B, S, V);
    with `targets` as well, by its `LinearLoss`, to the sum of their losses."""
    blocks: Callable[[nn.Module], dict[str, nn.Module]]
    """The repeating blocks a network, or a pipeline stage cut from it, has: in order, by name."""
    init_std: Callable[[Args, str], InitialWeight]
    """(arguments, parameter name) to how that parameter starts."""
    before_blocks: tuple[str, ...]
    """Modules with parameters that work before the blocks, in order: a pipeline's first stage."""
    after_blocks: tuple[str, ...]
    """Modules with parameters that work after the blocks, in order: a pipeline's last stage."""
    auxiliary: str | None = None
    """A module beside those after the blocks, with what auxiliary losses take; a network has it
    only where its arguments ask for one, and other formats do not know it."""
    auxiliary_blocks: Callable[[nn.Module], dict[str, nn.Module]] = lambda model: {}
    """What of that is like the blocks, of a network or a stage: in order, by name."""
    flops_per_unit: Callable[[Args, int], int]
    """(arguments, sequence length) to floating-point operations, forward and backward, of what the
    task counts: a token, say."""
    flops_of: Callable[[Args, int, str], float] | None = None
    """(arguments, sequence length, name of a module) to its part in `flops_per_unit`; None: a
    parameter costs 6, and blocks share what else there is in equal parts."""
    kept_by_block: Callable[[Args, int, str], float] = lambda args, itemsize, name: 0.0
    """(arguments, bytes of a computed element, name of a block) to the bytes of each position of
    a sample that the block keeps for its backward, its input among them; 0: that is not known. Of
    `auxiliary`, to what is kept around each of its blocks."""
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """Module names, `*` for any block, to what they are to tensor parallelism."""
    tensor_splits: Callable[[Args], TensorSplits] = splits_of_queries_and_keys
    """What has to come out even where there is a `tensor_plan`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Parameter names, with `*` as above, to what they are to an optimizer, where `role` errs."""
    heads: Callable[[Args, str], tuple[int, int] | None] = lambda args, name: None
    """(arguments, parameter name) to the dim along which its heads of attention lie, and how many
    there are; None: it has none."""
    head_dim: Callable[[Args], int] = lambda args: args.dim // args.n_heads  # type: ignore[attr-defined]
    """Elements of a head of its `SelfAttention`; default: the dim over the number of heads."""
    tied: Callable[[Args], bool] = lambda args: False
    """Whether the output multiplies with the weights of the embedding."""
    queries_and_keys: tuple[str, str] | None = None
    """What the linears are called that make them, beside each `SelfAttention`, where logits grow
    with their weights; None: they do not, as where queries and keys are normalised."""
    shrink: Callable[[Args, MinShape], Args] = lambda args, _: args
    """Arguments to those of a network of the same structure that trains in seconds on a CPU."""
    formats: Mapping[str, WeightFormat[Args]] = field(default_factory=dict)
    """Other formats of its weights: "hf" for Hugging Face, "meta" for Meta's own."""
    task: str = "next_token"
    """What it is trained to do: a key of `torchtitan.tasks.TASKS`."""
    shapes: Callable[[Args, int], SampleShapes] = shapes_of_tokens
    """(arguments, sequence length) to the shapes of a sample, for a pipeline's messages."""
    open_vocabulary: Collection[str] = ()
    """Flavors whose vocabulary grows with the tokenizer, where the recipe does not set it."""
    settings: type[ModelConfig] = TextConfig
    """Of the section `[model]` where a recipe names this family."""

    def all_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """What is recomputed, compiled and gathered by itself: blocks, those of losses last."""
        return {**self.blocks(model), **self.auxiliary_blocks(model)}

    def args(self, config: ModelConfig) -> Args:
        """The arguments in effect: the flavor's, but for the sizes that the recipe says."""
        return config.over(self.flavors[config.flavor])

    def with_flavor(self, name: str, args: Args) -> Self:
        """The family with one flavor more, or another in the place of one."""
        return replace(self, flavors={**self.flavors, name: args})

    def role(self, name: str, ndim: int) -> str:
        """What a parameter is to an optimizer: a name in `roles`, or one of these.

        "embedding" works before the blocks and "head" after them, "norm" is any vector but a
        "bias", and "matrix" is all else.
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
    """The role of each module inside that has one, by its name."""
    return {
        name: role
        for name, _ in module.named_modules()
        for pattern, role in plan.items()
        if fnmatchcase(name, pattern)
    }


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


class _NothingDrawn(TorchFunctionMode):
    """Leaves out the draws by which torch's layers start."""

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
    """The network on the meta device, with parameters of `dtype`: shapes and names, no memory.

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
    """Count a whole network (not a pipeline stage); one on the meta device will do."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return ParameterCounts(
        total=sum(parameter.numel() for parameter in model.parameters()),
        embedding=sum(module.weight.numel() for module in embeddings),
    )
