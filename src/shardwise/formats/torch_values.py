"""What torch's own pickles may name, and what it means here: dtypes, sizes, storages and the tensors on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.formats.nested_dicts import MAX_DIMS
from shardwise.formats.pickles import Function, Global, Other, Vocabulary
from shardwise.tensors import DType, Strided

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
    """A class of torch's storages; without a dtype it counts bytes."""

    dtype: DType | None


@dataclass(frozen=True, slots=True)
class Storage:
    """A persistent id: the name of a record of the archive, and its size."""

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
        raise ValueError("a tensor has not as many strides as dimensions")
    return PickledTensor(storage, dtype, Strided(offset, sizes, strides))


def _rebuild(arguments: tuple[object, ...], count: int) -> object:
    """A tensor by ``count`` arguments, and what follows them, which must be empty."""
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
    """A tensor with attributes: (function, class, arguments, attributes)."""
    if len(arguments) != 4 or not isinstance(arguments[0], Function) or not isinstance(arguments[2], tuple):
        raise ValueError("it takes a function, a class, arguments and a state")
    if not arguments[0].name.startswith("torch._utils._rebuild_tensor"):
        raise ValueError(f"it calls {arguments[0].name}, which makes no tensor")
    if arguments[1] is not _TENSOR_CLASS:
        raise ValueError("a tensor is of a class that is not torch's")
    return arguments[0].call(arguments[2])


def _ordered_dict(arguments: tuple[object, ...]) -> object:
    if arguments:
        raise ValueError("it is given items, as by Python 2")
    return {}


def other(kind: str) -> Callable[[tuple[object, ...]], object]:
    """A function whose result is not used."""
    return lambda arguments: Other(kind)


_TENSOR_CLASS = Other("Tensor")

_UNKNOWN = ("complex32", "complex128", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "bits8", "bits16")
_SCALARS: dict[Global, object] = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): Other(name) for name in _UNKNOWN},
}

TORCH_FILE = Vocabulary(
    values={
        **_SCALARS,
        **{("torch", f"{name}Storage"): StorageType(DTYPES[dtype]) for name, dtype in _STORAGES.items()},
        ("torch", "UntypedStorage"): StorageType(None),
        ("torch.storage", "UntypedStorage"): StorageType(None),
        ("torch", "Tensor"): _TENSOR_CLASS,
        ("torch._tensor", "Tensor"): _TENSOR_CLASS,
        ("torch.nn.parameter", "Parameter"): _TENSOR_CLASS,
    },
    functions={
        ("collections", "OrderedDict"): _ordered_dict,
        ("torch", "Size"): _size,
        ("torch", "device"): other("device"),
        ("torch._utils", "_rebuild_tensor_v2"): lambda arguments: _rebuild(arguments, 6),
        ("torch._utils", "_rebuild_tensor_v3"): lambda arguments: _rebuild(arguments, 7),
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
        ("_codecs", "encode"): other("bytes"),
        ("builtins", "bytearray"): other("bytearray"),
        ("builtins", "set"): other("set"),
        ("builtins", "complex"): other("complex"),
    },
    persistent=_storage,
)
"""What a file of tensors, written by ``torch.save``, may name."""

_DCP = "torch.distributed.checkpoint.metadata"
_OLD_DCP = "torch.distributed._shard.sharded_tensor.metadata"

_RECORDS = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta"),
)

DISTRIBUTED_METADATA = Vocabulary(
    values=_SCALARS,
    functions={
        ("collections", "OrderedDict"): _ordered_dict,
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): lambda arguments: arguments[0] if len(arguments) == 1 else None,
        (_DCP, "_MEM_FORMAT_ENCODING"): other("memory format"),
        (_OLD_DCP, "MEM_FORMAT_ENCODING"): other("memory format"),
        **{
            (module, f"{kind}Path"): other("path")
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
        },
        ("builtins", "set"): other("set"),
    },
    records=frozenset((_DCP, name) for name in _RECORDS)
    | {(_OLD_DCP, "TensorProperties"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")},
)
"""What the ``.metadata`` of ``torch.distributed.checkpoint`` may name."""
