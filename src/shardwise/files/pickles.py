"""Reads untrusted pickles of tensors without executing their code, and without torch.

A pickle is a program for a small stack machine. Here Python's unpickler runs it, limited to the operations that
torch and Python write, and to the names in ``_GLOBALS``: each stands for a plain value, or a function of this
module. All other names are refused, and no option allows more.

[Note: Why not torch.load]
``torch.load(weights_only=True)`` under ``FakeTensorMode`` runs no foreign code either, but takes any key and shows
any object in its messages. 200 bytes that nest tuples in tuples keep it busy forever, and no other thread runs
meanwhile; 3 MB of nested tuples as a key end the process; ``bytearray(2**40)`` uses all memory. The offsets that it
records follow from the rules of torch's writer, and are wrong if another program has written the archive again. It
refuses pickle protocols 4 and 5. In files of older versions it reads one header after the other, which over a
network are as many waits as storages. Python's unpickler in C has the first faults as well, and a large memo index
uses all memory. Its form in Python has none of them if keys, calls and states are checked.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeGuard

from shardwise.core.errors import FormatError
from shardwise.core.tensors import DType, Strided
from shardwise.files.checkpoint_index import invalid_file
from shardwise.files.join_entries import MAX_DIMS
from shardwise.files.urls import shown


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """A value that is not used, by the name of its type."""

    kind: str


@dataclass(slots=True, eq=False)
class Record:
    """An object of ``torch.distributed.checkpoint``: the name of its class, and the state in the pickle."""

    name: str
    state: object = None


@dataclass(frozen=True, slots=True)
class Storage:
    """A persistent id: the name of a member of the archive, and its size. One without a dtype has U8."""

    name: str
    dtype: DType
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PickledTensor:
    """A tensor of torch: strided elements of a storage, counted in elements of ``dtype``."""

    storage: Storage
    dtype: DType
    strided: Strided


def read_pickle(content: bytes, *, what: str) -> object:
    """Return the object of a pickle. ``what`` names it in messages (file and part of it).

    Dicts, lists, tuples, strings and numbers are unchanged. Other dict keys are replaced by an :class:`Other`. The
    result may refer to itself, and be nested as deeply as the pickle is long.

    Raises :class:`FormatError` for invalid pickles and globals that are not in the list, never another exception.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    except Exception as error:
        cause = str(error) if type(error) is ValueError else f"it cannot be decoded ({error!r:.200})"
        raise invalid_file(what, ascii(cause)[1:-1]) from error


def are_sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether a value is the shape of a tensor, or its strides or offsets."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )


class _Dict(dict[object, object]):
    """A dict whose keys have hashes that are known to be cheap."""

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is str:
            key.encode()  # halves of surrogates raise
        elif type(key) is not int and type(key) is not Record:
            key = Other(type(key).__name__)
        if key in self:
            # The text of an object may be endless: it may hold others, many times over.
            name = str(key) if type(key) in (str, int) else f"of type {type(key).__name__}"
            raise ValueError(f"a dict has the key {shown(name)} twice")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    # Attributes that the type checker does not find in the base class.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]
    stack: list[Any]
    append: Callable[[object], None]
    pop_mark: Callable[[], list[object]]

    def find_class(self, module: str, name: str) -> Any:
        key = f"{module}.{name}"
        # Never imported: the name is only looked up in the table.
        if key not in _GLOBALS:
            remedy = "Save the state dict alone (torch.save(model.state_dict(), ...)), or as safetensors"
            if key == "torch._utils._rebuild_wrapper_subclass":
                remedy = (
                    "It is of a DTensor, of which this is the shard of one rank. Write it by "
                    "torch.distributed.checkpoint, or merge the files of all ranks (verl.model_merger)"
                )
            raise FormatError(
                f"it refers to {shown(key)}, which does not belong to a file of tensors and is never run. {remedy}"
            )
        return _GLOBALS[key]

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            # torch writes ("storage", type, name, device, number of elements).
            case ("storage", DType() as dtype, str(name), _, int(count)) if 0 <= count < 2**63:
                return Storage(name, dtype, count * dtype.itemsize)
        raise ValueError("a persistent id does not describe a storage")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        # Only functions of this module are callable. Python's own error for others would show them, however nested.
        if not isinstance(arguments, tuple) or not callable(function):
            raise ValueError("it calls an object that is not a function")
        self.append(function(*arguments))

    load_newobj = load_reduce

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict, such as a state dict's versions
            raise ValueError("it sets the state of an object that has none")

    def load_empty_dictionary(self) -> None:
        self.append(_Dict())

    def load_empty_set(self) -> None:
        self.append(Other("set"))

    def load_additems(self) -> None:
        self.pop_mark()  # a set would hash them


_OPERATIONS = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE "
    "TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS BINPUT LONG_BINPUT MEMOIZE BINGET "
    "LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ BUILD"
)
_CODES = [getattr(pickle, name)[0] for name in _OPERATIONS.split()]
# Any other opcode is a KeyError, which read_pickle() turns into a FormatError.
_Unpickler.dispatch = {code: getattr(_Unpickler, pickle._Unpickler.dispatch[code].__name__) for code in _CODES}


def _rebuild_tensor(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    _requires_grad: object,
    _hooks: object,
    dtype: object,
    metadata: object = None,
) -> PickledTensor:
    # Arguments are untrusted, and each is checked before it is used in arithmetic.
    if not isinstance(storage, Storage):
        raise ValueError("a tensor has no storage")
    if not isinstance(dtype, DType):
        kind = dtype.kind if isinstance(dtype, Other) else type(dtype).__name__
        raise ValueError(f"a tensor has the dtype {kind}, which cannot be loaded")
    if metadata:
        raise ValueError("a tensor is conjugated or negated lazily, which is not supported")
    if not (type(offset) is int and are_sizes((offset,)) and are_sizes(sizes) and are_sizes(strides)):
        raise ValueError("a tensor has an invalid offset, shape or strides")
    if len(sizes) != len(strides):
        raise ValueError(f"a tensor has {len(strides)} strides for {len(sizes)} dimensions")
    return PickledTensor(storage, dtype, Strided(offset, sizes, strides))


def _rebuild_of_storage(*arguments: Any) -> PickledTensor:
    """Return a tensor of the dtype of its storage."""
    dtype = getattr(arguments[0], "dtype", None)
    with_dtype = *arguments[:6], dtype, *arguments[6:]
    return _rebuild_tensor(*with_dtype)


def _rebuild_from_type(function: object, _type: object, arguments: object, _state: object) -> PickledTensor:
    """Return a tensor that has attributes, without them."""
    if function not in (_rebuild_tensor, _rebuild_of_storage) or not isinstance(arguments, tuple):
        raise ValueError("a tensor with attributes is not rebuilt from a tensor")
    return function(*arguments)


def _ordered_dict() -> _Dict:
    return _Dict()


def _first(value: object, *_others: object) -> object:
    return value


def _other(kind: str, *_arguments: object) -> Other:
    return Other(kind)


_DTYPES = {
    "bool": DType.BOOL,
    **{f"int{bits}": DType[f"I{bits}"] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": DType[f"U{bits}"] for bits in (8, 16, 32, 64)},
    **{f"float{bits}": DType[f"F{bits}"] for bits in (16, 32, 64)},
    "float8_e4m3fn": DType.F8_E4M3,
    "float8_e4m3fnuz": DType.F8_E4M3FNUZ,
    "float8_e5m2": DType.F8_E5M2,
    "float8_e5m2fnuz": DType.F8_E5M2FNUZ,
    "float8_e8m0fnu": DType.F8_E8M0,
    "bfloat16": DType.BF16,
    "complex64": DType.C64,
}
_UNKNOWN = ("complex32", "complex128", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "bits8", "bits16")
_STORAGES = {
    "Bool": DType.BOOL,
    "Byte": DType.U8,
    "Char": DType.I8,
    "Short": DType.I16,
    "Int": DType.I32,
    "Long": DType.I64,
    "Half": DType.F16,
    "BFloat16": DType.BF16,
    "Float": DType.F32,
    "Double": DType.F64,
    "ComplexFloat": DType.C64,
    "Untyped": DType.U8,
}

_DCP = "torch.distributed.checkpoint"
_OLD_DCP = "torch.distributed._shard.sharded_tensor"
_RECORDS = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta"),
)

_GLOBALS: dict[str, object] = {
    "collections.OrderedDict": _ordered_dict,
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{f"torch.{name}": Other(name) for name in _UNKNOWN},
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": DType.U8,
    "torch.Tensor": Other("Tensor"),
    "torch._tensor.Tensor": Other("Tensor"),
    "torch.nn.parameter.Parameter": Other("Parameter"),
    "torch._utils._rebuild_tensor_v2": _rebuild_of_storage,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _first,
    "torch.serialization._get_layout": _first,
    "torch.device": partial(_other, "device"),
    "_codecs.encode": partial(_other, "bytes"),
    **{
        f"{module}.{name}": partial(_other, name)
        for module in ("builtins", "__builtin__")
        for name in ("bytearray", "set", "complex")
    },
    **{
        f"{module}.{name}Path": partial(_other, "path")
        for module in ("pathlib", "pathlib._local")
        for name in ("Posix", "Windows", "PurePosix", "PureWindows")
    },
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": partial(_other, "memory format"),
    f"{_OLD_DCP}.metadata.MEM_FORMAT_ENCODING": partial(_other, "memory format"),
    **{f"{_DCP}.metadata.{name}": partial(Record, name) for name in _RECORDS},
    f"{_OLD_DCP}.metadata.TensorProperties": partial(Record, "TensorProperties"),
    f"{_DCP}.filesystem._StorageInfo": partial(Record, "_StorageInfo"),
}
"""What each global in files of tensors, and in ``.metadata`` of ``torch.distributed.checkpoint``, stands for."""
