"""Reads untrusted pickles without executing their code.

A pickle is a program for a small stack machine: Python's own imports and calls any name in it. Here it runs on a
subclass of the pure Python unpickler, with only the operations that torch writes, and a closed vocabulary of
globals: each stands for a plain value, a record, or a pure function of this module. All others are refused by name,
and no option allows more. The C unpickler with a ``find_class`` is not enough: nested tuples as keys crash it, memo
indexes use all memory, and states change objects that were found.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.joining import MAX_DIMS
from shardwise.storage.names import shown
from shardwise.tensors import DType, Strided

Global: TypeAlias = tuple[str, str]
"""(module, name)."""

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """A value that is not used, by the name of its type."""

    kind: str


@dataclass(slots=True, eq=False)
class Record:
    """An object of another library's class: the name of the class, and the state in the pickle."""

    name: str
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of a tuple of arguments. It raises a ValueError, whose text is shown, for invalid ones."""

    name: str
    call: Callable[[tuple[object, ...]], object]


Vocabulary: TypeAlias = Mapping[Global, object]
"""The globals that a pickle may name: values, and each :class:`Function`."""


def read_pickle(content: bytes, vocabulary: Vocabulary, *, what: str) -> object:
    """Return the object of a pickle. ``what`` names it in messages (file and part of it).

    Dicts, lists, tuples, strings and numbers are unchanged. Other dict keys are replaced by an :class:`Other`. The
    result may refer to itself, and be nested as deeply as the pickle is long.

    Raises :class:`FormatError` for invalid pickles and globals outside of the vocabulary, never another exception.
    """
    machine = _Machine(io.BytesIO(content), vocabulary)
    try:
        return machine.load()
    except Exception as error:
        if isinstance(error, _UnknownGlobalError):
            text = (
                f"it refers to {shown(str(error))}, which does not belong to a file of tensors and is never run. "
                "Save the state dict alone (torch.save(model.state_dict(), ...)), or as safetensors"
            )
        else:
            cause = str(error) if type(error) is ValueError else f"it cannot be decoded ({error!r:.200})"
            text = f"{ascii(cause)[1:-1]}. The file is damaged or of another format: download or write it again"
        raise FormatError(f"{what}: {text}") from error


class _UnknownGlobalError(Exception):
    """A global that is not in the vocabulary."""


class _Machine(pickle._Unpickler):
    # Attributes that the type checker does not find in the unpickler.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}
    stack: list[Any]
    append: Callable[[object], None]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[object]]

    def __init__(self, content: io.BytesIO, vocabulary: Vocabulary) -> None:
        super().__init__(content, encoding="utf-8")
        self.vocabulary = vocabulary

    def find_class(self, module: str, name: str) -> Any:
        key = _PYTHON_2.get(module, module), name
        if key not in self.vocabulary:
            raise _UnknownGlobalError(".".join(key))
        return self.vocabulary[key]

    def load_global(self) -> None:
        module, name = (self.readline()[:-1].decode() for _ in range(2))
        self.append(self.find_class(module, name))

    def load_persistent(self) -> None:
        self.append(_storage(self.stack.pop()))

    def load_call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or not isinstance(function, Function):
            raise ValueError("it calls what cannot be called")
        try:
            self.append(function.call(arguments))
        except ValueError as error:
            raise ValueError(f"{function.name}: {error}") from error

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict, such as a state dict's versions
            raise ValueError("it gives a state to an object that has none")

    def load_items(self) -> None:
        items = self.pop_mark()
        self.set_items(items[::2], items[1::2])

    def load_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key], [value])

    def set_items(self, keys: list[object], values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(keys) != len(values):
            raise ValueError("it sets items of an object that is not a dict")
        for key, value in zip(keys, values, strict=True):
            # Exact types, whose hashes are known to be cheap.
            if type(key) is str:
                key.encode()  # halves of surrogates raise
            elif type(key) is not int and type(key) is not Record:
                key = Other(type(key).__name__)
            if key in target:
                raise ValueError(f"a dict has the key {shown(str(key))} twice")
            target[key] = value

    def load_list_items(self) -> None:
        items = self.pop_mark()
        self.extend_list(items)

    def load_list_item(self) -> None:
        self.extend_list([self.stack.pop()])

    def extend_list(self, items: list[object]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to an object that is not a list")
        self.stack[-1].extend(items)

    def load_set(self) -> None:
        self.append(Other("set"))

    def load_set_items(self) -> None:
        self.pop_mark()  # a set would hash them


_INHERITED = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST EMPTY_TUPLE EMPTY_DICT TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET STACK_GLOBAL"
)
for _name in _INHERITED.split():
    _code = getattr(pickle, _name)[0]
    _Machine.dispatch[_code] = pickle._Unpickler.dispatch[_code]
_Machine.dispatch |= {
    pickle.GLOBAL[0]: _Machine.load_global,
    pickle.BINPERSID[0]: _Machine.load_persistent,
    pickle.REDUCE[0]: _Machine.load_call,
    pickle.NEWOBJ[0]: _Machine.load_call,
    pickle.BUILD[0]: _Machine.load_build,
    pickle.SETITEM[0]: _Machine.load_item,
    pickle.SETITEMS[0]: _Machine.load_items,
    pickle.APPEND[0]: _Machine.load_list_item,
    pickle.APPENDS[0]: _Machine.load_list_items,
    pickle.EMPTY_SET[0]: _Machine.load_set,
    pickle.ADDITEMS[0]: _Machine.load_set_items,
}


_MAX_SIZE = 2**63 - 1

DTYPES: dict[str, DType] = {
    "bool": DType.BOOL,
    **{
        f"{sign}int{bits}": DType[f"{kind}{bits}"]
        for sign, kind in (("", "I"), ("u", "U"))
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": DType[f"F{bits}"] for bits in (16, 32, 64)},
    "float8_e4m3fn": DType.F8_E4M3,
    "float8_e4m3fnuz": DType.F8_E4M3FNUZ,
    "float8_e5m2": DType.F8_E5M2,
    "float8_e5m2fnuz": DType.F8_E5M2FNUZ,
    "float8_e8m0fnu": DType.F8_E8M0,
    "bfloat16": DType.BF16,
    "complex64": DType.C64,
}
"""torch's names of the dtypes that can be loaded."""

_STORAGES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
}


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of torch's storages. One without a dtype counts bytes."""

    dtype: DType | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A persistent id: the name of a member of the archive, and its size."""

    name: str
    dtype: DType | None
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensor:
    """A tensor of torch: strided elements of a storage, counted in elements of ``dtype``."""

    storage: Storage
    dtype: DType
    strided: Strided


def _sizes(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS:
        raise ValueError(f"{what} is not a tuple of sizes")
    if not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value):
        raise ValueError(f"{what} has numbers that are not 0..{_MAX_SIZE}")
    return value


def _size(arguments: tuple[object, ...]) -> object:
    if len(arguments) != 1 or not isinstance(arguments[0], tuple):
        raise ValueError("it takes one tuple")
    return _sizes(arguments[0], "its argument")


def _storage(value: object) -> object:
    if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
        raise ValueError("a persistent id is not that of a storage")
    _, kind, name, _, count = value
    if not isinstance(kind, StorageType) or not isinstance(name, str):
        raise ValueError("a persistent id is not that of a storage")
    if type(count) is not int or not 0 <= count <= _MAX_SIZE:
        raise ValueError("a storage has no size")
    return Storage(name, kind.dtype, count * (kind.dtype.itemsize if kind.dtype else 1))


def _tensor(storage: object, offset: object, size: object, stride: object, dtype: object) -> PickledTensor:
    if not isinstance(storage, Storage):
        raise ValueError("a tensor has no storage")
    if not isinstance(dtype, DType):
        named = dtype.kind if isinstance(dtype, Other) else "of nothing"
        raise ValueError(f"a tensor has the dtype {named}, which cannot be loaded")
    if type(offset) is not int or not 0 <= offset <= _MAX_SIZE:
        raise ValueError("a tensor has no offset")
    sizes, strides = _sizes(size, "a tensor's shape"), _sizes(stride, "a tensor's strides")
    if len(sizes) != len(strides):
        raise ValueError("a tensor has another number of strides than of dimensions")
    return PickledTensor(storage, dtype, Strided(offset, sizes, strides))


def _rebuild(arguments: tuple[object, ...], count: int) -> object:
    """Return a tensor from ``count`` arguments. The arguments after them must be empty."""
    if not count <= len(arguments) <= count + 1:
        raise ValueError(f"it takes {count} arguments")
    if any(arguments[count:]):
        raise ValueError("a tensor is conjugated or negated, which only its reader would do")
    storage, offset, size, stride = arguments[:4]
    own = storage.dtype if isinstance(storage, Storage) else None
    return _tensor(storage, offset, size, stride, own if count == 6 else arguments[6])


def _rebuild_parameter(arguments: tuple[object, ...]) -> object:
    if not 3 <= len(arguments) <= 4 or not isinstance(arguments[0], PickledTensor):
        raise ValueError("it takes a tensor")
    return arguments[0]


def _rebuild_from_type(arguments: tuple[object, ...]) -> object:
    """Return a tensor with attributes from (function, class, arguments, attributes)."""
    if len(arguments) != 4 or not isinstance(arguments[0], Function) or not isinstance(arguments[2], tuple):
        raise ValueError("it takes a function, a class, arguments and a state")
    if not arguments[0].name.startswith("torch._utils._rebuild_tensor"):
        raise ValueError(f"it calls {arguments[0].name}, which makes no tensor")
    if arguments[1] is not _TENSOR_CLASS:
        raise ValueError("a tensor is of a class that is not of torch")
    return arguments[0].call(arguments[2])


def _ordered_dict(arguments: tuple[object, ...]) -> object:
    if arguments:
        raise ValueError("it is given items, as by Python 2")
    return {}


def _other(_arguments: tuple[object, ...], kind: str) -> object:
    return Other(kind)


def _record(_arguments: tuple[object, ...], name: str) -> object:
    return Record(name)


def _first(arguments: tuple[object, ...]) -> object:
    return arguments[0] if len(arguments) == 1 else None


def _functions(calls: Mapping[Global, Callable[[tuple[object, ...]], object] | str]) -> Vocabulary:
    """Return functions by global. A string is the kind of a result that is not used."""
    return {
        key: Function(".".join(key), partial(_other, kind=call) if isinstance(call, str) else call)
        for key, call in calls.items()
    }


_TENSOR_CLASS = Other("Tensor")

_UNKNOWN = ("complex32", "complex128", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "bits8", "bits16")
_SCALARS: dict[Global, object] = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): Other(name) for name in _UNKNOWN},
}

TORCH_FILE: Vocabulary = {
    **_SCALARS,
    **{("torch", f"{name}Storage"): StorageType(DTYPES[dtype]) for name, dtype in _STORAGES.items()},
    ("torch", "UntypedStorage"): StorageType(None),
    ("torch.storage", "UntypedStorage"): StorageType(None),
    ("torch", "Tensor"): _TENSOR_CLASS,
    ("torch._tensor", "Tensor"): _TENSOR_CLASS,
    ("torch.nn.parameter", "Parameter"): _TENSOR_CLASS,
    **_functions(
        {
            ("collections", "OrderedDict"): _ordered_dict,
            ("torch", "Size"): _size,
            ("torch", "device"): "device",
            ("torch._utils", "_rebuild_tensor_v2"): partial(_rebuild, count=6),
            ("torch._utils", "_rebuild_tensor_v3"): partial(_rebuild, count=7),
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
            ("_codecs", "encode"): "bytes",
            **{("builtins", name): name for name in ("bytearray", "set", "complex")},
        }
    ),
}
"""Globals of files of tensors."""

_DCP = "torch.distributed.checkpoint.metadata"
_OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"

_RECORDS = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta"),
)
_CLASSES: tuple[Global, ...] = (
    *((_DCP, name) for name in _RECORDS),
    (_OLD_DCP, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)

DISTRIBUTED_METADATA: Vocabulary = {
    **_SCALARS,
    **_functions(
        {
            ("collections", "OrderedDict"): _ordered_dict,
            ("torch", "Size"): _size,
            ("torch.serialization", "_get_layout"): _first,
            (_DCP, "_MEM_FORMAT_ENCODING"): "memory format",
            (_OLD_DCP, "MEM_FORMAT_ENCODING"): "memory format",
            **{
                (module, f"{kind}Path"): "path"
                for module in ("pathlib", "pathlib._local")
                for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
            },
            ("builtins", "set"): "set",
            **{key: partial(_record, name=".".join(key)) for key in _CLASSES},
        }
    ),
}
"""Globals of ``.metadata`` of ``torch.distributed.checkpoint``."""
