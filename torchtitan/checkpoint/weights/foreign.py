"""Translation of weights between our names and another format's, one tensor at a time.

`ForeignWeights` presents another format under our names, `Translated` ours under the other's. The
first is a `TensorSource`, so code that reads a checkpoint of ours also reads other weights, whole
or the block that a rank needs. Both refuse weights that do not match the network, and report every
tensor that is missing, unexpected or of another shape. The names are part of a model's spec
(`torchtitan.models.spec.WeightFormat`); the layout of files is implemented one level up.
"""

import itertools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.ranges import Kind, Sizes, TensorSource
from torchtitan.checkpoint.weights.network import Network, in_slices
from torchtitan.config import ConfigError, RecipeError
from torchtitan.logging import logger
from torchtitan.models.spec import TensorShare

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_REPORTED = 10
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts that `torch.compile`, DDP, FSDP and recomputation put into the names of parameters."""


def unwrapped(where: object, found: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Return the names of tensors by those that they have without wrappers, which must differ.

    A `model.` in front is that of a wrapper if only without it the name is in `wanted`.
    """
    names = {name: ".".join(p for p in name.split(".") if p not in WRAPPERS) for name in found}
    depths = {name: _depth(plain, wanted) for name, plain in names.items()}
    # Tensors that are not wanted, or only hold those that are, are as deep as the others.
    usual = Counter(depth for depth in depths.values() if depth is not None).most_common(1)
    plain: dict[str, str] = {}
    for name, short in names.items():
        depth = depths[name]
        for _ in range((usual[0][0] if usual else 0) if depth is None else depth):
            short = short.removeprefix("model.")
        if short in plain:
            raise ConfigError(f"{where}: {plain[short]} and {name} are both {short}; remove one")
        plain[short] = name
    if changed := next(((name, short) for short, name in plain.items() if name != short), None):
        logger.warning("%s: names are read without wrappers: %s is %s", where, *changed)
    return plain


def _depth(name: str, wanted: Collection[str]) -> int | None:
    """Return how often a wrapper put `model.` in front of a name; None if it is not wanted."""
    depth = 0
    while name not in wanted:
        if not name.startswith("model."):
            return None
        name, depth = name.removeprefix("model."), depth + 1
    return depth


class ForeignWeights(TensorSource):
    """Weights in a folder of another format, under our names."""

    def __init__(
        self, folder: Path, network: Network, kind: str, found: Mapping[str, Kind | str]
    ) -> None:
        """Raise ConfigError, with everything that does not match, unless these are of `network`.

        `kind` is a key of `ModelSpec.formats`; `found` has dtype and shape of each tensor, or why
        it cannot be read, by foreign name.
        """
        self.network, self.format = network, network.format(kind)
        shapes = {f"model.{name}": shape for name, shape in network.parameters().items()}
        self._names = {ours: self.format.name(ours.removeprefix("model.")) for ours in shapes}
        for name, (pattern, advice) in itertools.product(found, self.format.unreadable.items()):
            if re.fullmatch(pattern, name):
                raise ConfigError(f"{folder}: {name}: {advice}")
        constants = self.format.constants(network.args)
        known = {
            n: k
            for n, k in found.items()
            if n not in constants and not re.fullmatch(self.format.computed, n)
        }
        self._views: dict[str, tuple[str, Sizes]] = {}
        known = self._unfused(known)
        self._kinds = fitting(folder, network, known, *network.tensors(kind))
        self.kinds = {
            ours: (self._kinds[theirs.replace("*", "0")][0], shapes[ours])
            for ours, theirs in self._names.items()
        }
        for theirs, ours in self.format.repeated(network.args).items():
            original = self.format.name(ours)
            if theirs in known and not torch.equal(self._whole(theirs), self._whole(original)):
                why = f"must equal {original} in {network}, whose output is tied to its embedding"
                raise ConfigError(f"{folder}: {theirs} {why}")
        for theirs, constant in constants.items():
            if theirs in found and not self._holds(theirs, found[theirs], constant):
                raise ConfigError(f"{folder}: {theirs} differs from the fixed values of {network}")

    def _unfused(self, found: Mapping[str, Kind | str]) -> dict[str, Kind | str]:
        """Replace each tensor that holds others by these, unless some of them are there too."""
        kinds = dict(found)
        for name, kind in found.items():
            end = next((end for end in self.format.fused if name.endswith(end)), None)
            if end is None or isinstance(kind, str) or len(kind[1]) != 3:
                continue
            (dtype, (count, rows, columns)), parts = kind, self.format.fused[end]
            size, stem = rows // len(parts), name.removesuffix(end)
            views = {
                stem + part.replace("*", str(index)): (name, (index, number * size, 0))
                for number, part in enumerate(parts)
                for index in range(count)
            }
            if size * len(parts) == rows and not views.keys() & found.keys():
                self._views |= views
                kinds |= dict.fromkeys(views, (dtype, (size, columns)))
                del kinds[name]
        return kinds

    def _holds(self, theirs: str, kind: Kind | str, constant: Tensor) -> bool:
        """Whether a foreign tensor equals `constant`, within its dtype's precision."""
        if isinstance(kind, str) or kind[1] != tuple(constant.shape):
            return False
        block = self._block(theirs, (0,) * constant.ndim, kind[1])
        return torch.allclose(block.double(), constant.to(block.dtype).double(), atol=1e-6)

    def part(self, name: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        theirs, dtype = self._names[name], self.kinds[name][0]
        if 0 in sizes:
            return torch.empty(sizes, dtype=dtype)
        if share := self.format.share(name.removeprefix("model.")):
            return share.of(self._block(theirs, *share.block(offsets, sizes)))
        if "*" in theirs:
            indices = range(offsets[0], offsets[0] + sizes[0])
            slices = (theirs.replace("*", str(index)) for index in indices)
            found = [self._viewed(each, offsets[1:], sizes[1:]) for each in slices]
            return torch.stack(found).to(dtype)
        rows = self.format.rows(self.network.args, name.removeprefix("model."))
        if rows is None:
            return self._block(theirs, offsets, sizes)
        # Rows that are read together are near each other in the other format, in the same heads.
        rows = rows[offsets[0] : offsets[0] + sizes[0]]
        first, last = int(rows.min()), int(rows.max())
        near = self._block(theirs, (first, *offsets[1:]), (last + 1 - first, *sizes[1:]))
        return near[rows - first]

    def _viewed(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """Read a block of a tensor, which may be in another one."""
        if theirs not in self._views:
            return self._block(theirs, offsets, sizes)
        whole, (index, *start) = self._views[theirs]
        begin = (first + more for first, more in zip(start, offsets, strict=True))
        return self._block(whole, (index, *begin), (1, *sizes))[0]

    def _whole(self, theirs: str) -> Tensor:
        shape = self._kinds[theirs][1]
        return self._block(theirs, (0,) * len(shape), shape)

    @abstractmethod
    def _block(self, theirs: str, offsets: Sizes, sizes: Sizes) -> Tensor:
        """Read a non-empty block of a tensor, by its foreign name."""


class Translated:
    """Our weights in another format, with its names, order of rows and dtype."""

    def __init__(
        self, source: TensorSource, network: Network, kind: str, dtype: torch.dtype | None = None
    ) -> None:
        """Open `source` for output in `dtype`; None: each tensor keeps its own."""
        self.source, self.network, self.dtype = source, network, dtype
        self.format = network.format(kind)
        self._kinds: dict[str, Kind] = {}
        self._reads: dict[str, Callable[[], Tensor]] = {}
        self._last: tuple[str, Tensor] | None = None
        shares: dict[str, list[tuple[TensorShare, str]]] = {}
        found = weights_of(source, network)
        for ours, (own, shape) in found.items():
            name = self.format.name(ours)
            if share := self.format.share(ours):
                shares.setdefault(name, []).append((share, ours))
                self._kinds[name] = own, share.whole(shape)
                self._reads[name] = partial(self._joined, self._kinds[name], shares[name])
                continue
            for index, (theirs, size) in enumerate(in_slices(name, shape)):
                self._kinds[theirs] = own, size
                is_whole = size == shape
                read = partial(self._rows, ours) if is_whole else partial(self._slice, ours, index)
                self._reads[theirs] = read
        if self.format.must_repeat:
            for theirs, ours in self.format.repeated(network.args).items():
                self._kinds[theirs], self._reads[theirs] = found[ours], partial(self._rows, ours)
        for theirs, constant in self.format.constants(network.args).items():
            of_weights = next((own for own, _ in found.values()), constant.dtype)
            self._kinds[theirs] = of_weights, tuple(constant.shape)
            self._reads[theirs] = partial(constant.to, of_weights)

    def shapes(self) -> dict[str, Kind]:
        """Return dtype and shape by foreign name, in the order of the network."""
        return {name: (self.dtype or own, shape) for name, (own, shape) in self._kinds.items()}

    def read(self, theirs: str) -> Tensor:
        """Read a whole tensor by its foreign name."""
        return cast(theirs, self._reads[theirs](), self.dtype)

    def _joined(self, kind: Kind, shares: Sequence[tuple[TensorShare, str]]) -> Tensor:
        whole = torch.empty(kind[1], dtype=kind[0])
        for share, ours in shares:
            share.of(whole).copy_(self._read(ours))
        return whole

    def _slice(self, ours: str, index: int) -> Tensor:
        if self._last is None or self._last[0] != ours:  # the slices are read in turn
            self._last = ours, self._read(ours)
        return self._last[1][index]

    def _rows(self, ours: str) -> Tensor:
        tensor, rows = self._read(ours), self.format.rows(self.network.args, ours)
        return tensor if rows is None else tensor[rows.argsort()]

    def _read(self, ours: str) -> Tensor:
        weight = self.source.read(f"model.{ours}")
        return self.network.spec.without_base(self.network.args, ours, weight)


def weight_kinds(source: TensorSource) -> dict[str, Kind]:
    """Return dtype and shape of all weights, by our name without `model.` in front."""
    prefix, kinds = "model.", source.shapes()
    return {n.removeprefix(prefix): kind for n, kind in kinds.items() if n.startswith(prefix)}


def weights_of(source: TensorSource, network: Network) -> dict[str, Kind]:
    """Return the parameters of `network`, verified to be in `source`; no auxiliary ones."""
    left_out = f"{network.spec.auxiliary}."
    kinds = weight_kinds(source)
    found = {name: kind for name, kind in kinds.items() if not name.startswith(left_out)}
    return fitting("the checkpoint", network, found, network.parameters())


def cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a tensor to `dtype`, contiguous; raise ConfigError if a value becomes infinite."""
    result = tensor.to(dtype or tensor.dtype).contiguous()
    if dtype == torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
        raise ConfigError(
            f"--dtype: got float16, but {name} has values beyond its maximum, 65504; use bfloat16"
        )
    return result


def fitting(
    where: object,
    network: Network,
    found: Mapping[str, Kind | str],
    wanted: Mapping[str, Sizes],
    optional: Mapping[str, Sizes] | None = None,
) -> dict[str, Kind]:
    """Return the tensors of `found` in the order of `wanted`; or raise all that does not match."""
    shapes = {**wanted, **(optional or {})}
    missing = [f"missing: {name}" for name in wanted if name not in found]
    problems = [f"unexpected: {name}" for name in found if name not in shapes]
    fits: dict[str, Kind] = {}
    for name in (name for name in shapes if name in found):
        kind = found[name]
        if isinstance(kind, str):
            problems.append(f"{name}: {kind}")
        elif kind[1] != shapes[name]:
            problems.append(f"{name}: has shape {kind[1]}; wanted {shapes[name]}")
        elif kind[0] not in DTYPES:
            problems.append(f"{name}: has dtype {kind[0]}; allowed: {', '.join(map(str, DTYPES))}")
        else:
            fits[name] = kind
    if missing or problems:
        # Names that differ have two sides.
        shown = missing[: max(MAX_REPORTED // 2, MAX_REPORTED - len(problems))]
        shown += problems[: MAX_REPORTED - len(shown)]
        rest = len(missing) + len(problems) - len(shown)
        lines = (f"  {line}" for line in [*shown, *([f"and {rest} more"] if rest else [])])
        raise RecipeError([f"{where}: not the weights of {network}:", *lines])
    return fits
