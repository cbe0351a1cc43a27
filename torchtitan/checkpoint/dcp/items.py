"""Items written by `torch.save`, as views of the file: a zip archive with a pickle and the bytes.

`torch.load` reads a whole tensor to return a part of it. The archive is not compressed, though, so
a tensor's bytes are in the file as they are, and reading a block takes only its own bytes. The
pickle describes only their layout, and is read as data: nothing in it is imported, called or
trusted. A pickle names classes and functions, and calls them. Here each name must be in the
format's list, and maps to a stub class, which keeps its arguments and does nothing else; so for any
file, the result is tuples, dicts and objects without behaviour.
"""

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from io import RawIOBase
from typing import Any, NamedTuple

import torch

from torchtitan.checkpoint.manifest import BLOCK, Damaged
from torchtitan.checkpoint.ranges import Files, Sizes
from torchtitan.config import ConfigError

MALFORMED = (
    *(pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError),
    *(OverflowError, MemoryError, RecursionError),
)
"""Errors that `pickle` raises for malformed bytes."""


class Inert:
    """Stub of a pickled object: its arguments and its state."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Inert":
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    """Unpickler that knows the given names and dtypes, and creates `Inert` stubs and tuples."""

    def __init__(
        self,
        data: bytes,
        where: object,
        names: Collection[str],
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        """Open a pickle at `where`; `names` are module.name; `storage` maps persistent ids."""
        super().__init__(io.BytesIO(data))
        self.where, self.names, self.storage = where, names, storage
        # Created for each pickle, so that none affects the classes of another.
        self.kinds: dict[str, Any] = {"torch.Size": tuple}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stub of a class or function; the real one is never imported."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full == "builtins.getattr":
            return self._member
        if full not in self.names:
            raise self._refusal(full)
        return self.kinds.setdefault(full, type(name, (Inert,), {}))

    def _member(self, kind: Any, name: Any) -> Inert:
        """Return an enum member, which Python 3.11.0 to 3.11.3 pickles by name, others by value."""
        if not any(kind is known for known in self.kinds.values() if known is not tuple):
            raise self._refusal("builtins.getattr")
        member: Inert = kind(name)
        return member

    def _refusal(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: refused: it names {name}, which is not part of this format; other "
            "programs that read such a file may execute arbitrary code. Nothing was executed"
        )

    def persistent_load(self, pid: Any, /) -> Any:
        """Return a tensor's storage, if the pickle may have any."""
        if self.storage is None:
            raise pickle.UnpicklingError("persistent id")
        return self.storage(pid)

    def read(self) -> Any:
        """Return the content; raise ConfigError if it names anything unknown."""
        try:
            return self.load()
        except ConfigError:
            raise
        except MALFORMED as error:
            raise Damaged(f"{self.where}: damaged: {error}") from None

    def is_a(self, value: Any, name: str) -> bool:
        """Whether a value is a stub of the class module.name."""
        return name in self.kinds and isinstance(value, self.kinds[name])


STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": None,
}
_TYPED, _UNTYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
NAMES = {*STORAGES, _TYPED, _UNTYPED, "collections.OrderedDict"}


class Storage(NamedTuple):
    """Reference to the bytes of a tensor in its pickle."""

    dtype: torch.dtype | None
    key: str


class Item(NamedTuple):
    """Part of a file, written by `torch.save`."""

    file: str
    offset: int
    length: int


class TensorLayout(NamedTuple):
    """Location and layout of a tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: Sizes
    strides: Sizes
    begin: int
    """Offset of the first byte in the file."""

    @property
    def length(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ItemRecord(NamedTuple):
    """Part of an item, as listed in the directory at its end."""

    begin: int
    """Offset of the first byte in the file."""
    size: int
    crc: int
    """CRC-32 of its bytes; 0 in all records of an item saved without checksums."""


class ItemFile(RawIOBase):
    """File interface to an item."""

    def __init__(self, files: Files, item: Item) -> None:
        self.files, self.item, self.at = files, item, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.at = max(0, offset + (0, self.at, self.item.length)[whence])
        return self.at

    def readinto(self, buffer: Any, /) -> int:
        end = min(self.at + len(buffer), self.item.length)
        count = max(0, end - self.at)
        begin = self.item.offset + self.at
        buffer[:count] = self.files.read(self.item.file, begin, begin + count)
        self.at += count
        return count


def records(files: Files, item: Item, where: str) -> dict[str, ItemRecord]:
    """Return the records of an item; raise Damaged unless `torch.save` wrote it, uncompressed."""
    found = {}
    try:
        for about in zipfile.ZipFile(ItemFile(files, item)).infolist():
            # After the header of a record, which ends with two fields of variable length.
            header = item.offset + about.header_offset
            lengths = files.read(item.file, header + 26, header + 30)
            begin = header + 30 + sum(struct.unpack("<HH", lengths))
            name = about.filename.partition("/")[2]
            found[name] = ItemRecord(begin, about.file_size, about.CRC)
            if about.compress_type != zipfile.ZIP_STORED:
                raise Damaged(f"{where}: damaged: {name} is compressed")
            if begin + about.file_size > item.offset + item.length:
                raise Damaged(f"{where}: damaged: {name} extends beyond the file")
    except ConfigError:
        raise
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError) as error:
        raise Damaged(f"{where}: damaged: not what torch.save writes: {error}") from None
    return found


def changed_records(files: Files, item: Item, where: str) -> list[str] | None:
    """Return the names of records whose bytes have changed; None without checksums."""
    found = records(files, item, where)
    if not any(record.crc for record in found.values()):
        return None
    changed = []
    for name, record in found.items():
        crc, end = 0, record.begin + record.size
        for begin in range(record.begin, end, BLOCK):
            crc = zlib.crc32(files.read(item.file, begin, min(begin + BLOCK, end)), crc)
        if crc != record.crc:
            changed.append(name)
    return changed


def layout_of(files: Files, item: Item, where: str) -> TensorLayout:
    """Return the layout of the plain tensor in an item at `where`; refuse anything else."""
    found = records(files, item, where)

    def content(name: str) -> bytes:
        begin, size, _ = found[name]
        return bytes(files.read(item.file, begin, begin + size))

    try:
        layout, storage = _described(content("data.pkl"), item.file, where)
        order, data = content("byteorder"), found[f"data/{storage.key}"]
    except KeyError as error:
        raise Damaged(f"{where}: damaged: it has no {error}") from None
    if order != b"little":
        raise ConfigError(f"{where}: written on a machine with byte order {order!r}")
    last = sum((n - 1) * stride for n, stride in zip(layout.shape, layout.strides, strict=True))
    count = math.prod(layout.shape)
    end = layout.begin + (last + 1) * layout.dtype.itemsize if count else 0
    if max(end, count * layout.dtype.itemsize) > data.size:
        raise Damaged(f"{where}: damaged: it ends before its tensor does")
    return layout._replace(begin=data.begin + layout.begin)


def _described(pickled: bytes, file: str, where: str) -> tuple[TensorLayout, Storage]:
    """Parse the pickle; the layout's `begin` is relative to the storage."""

    def storage_of(pid: Any) -> Storage:
        kind, key = (pid[1], pid[2]) if isinstance(pid, tuple) and len(pid) == 5 else (None, None)
        names = [name for name, made in unpickler.kinds.items() if made is kind]
        if not names or names[0] not in STORAGES or not isinstance(key, str):
            raise Damaged(f"{where}: damaged: a storage is {pid!r:.80}")
        return Storage(STORAGES[names[0]], key)

    unpickler = InertUnpickler(pickled, where, NAMES, storage_of)
    found = unpickler.read()
    args: Sequence[Any] = found.args if isinstance(found, Inert) else ()
    is_typed = unpickler.is_a(found, _TYPED)
    if not (is_typed or unpickler.is_a(found, _UNTYPED)) or len(args) < 6 + (not is_typed):
        raise ConfigError(f"{where}: not a plain tensor, but {type(found).__name__}")
    storage, offset, shape, strides = args[:4]
    dtype = storage.dtype if is_typed and isinstance(storage, Storage) else args[6]
    if (
        not isinstance(storage, Storage)
        or not isinstance(dtype, torch.dtype)
        or not all(isinstance(sizes, tuple) for sizes in (shape, strides))
        or not all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *strides))
        or len(shape) != len(strides)
    ):
        raise Damaged(f"{where}: damaged: its tensor is invalid")
    if any(args[7 - is_typed :]):
        raise ConfigError(f"{where}: conjugate or negative views of tensors are not supported")
    return TensorLayout(file, dtype, shape, strides, offset * dtype.itemsize), storage
