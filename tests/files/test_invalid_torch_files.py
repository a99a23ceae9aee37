"""Files of torch that lie, or bring a program along: refused with a FormatError that names them; nothing is run."""

import collections
import contextlib
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.files.building import one_line_of
from tests.files.torch_building import Called, Id, Touch, archive, pickled, saved, storage, tensor, torch_file
from tests.support.memory_storage import MemoryReader
from tests.support.speed import slowness

from shardwise.core.errors import FormatError
from shardwise.files.pickles import read_pickle
from shardwise.files.torch_files import read_torch_file

SOUND = saved({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, 2).t(), "c": torch.zeros(3000), "n": 3})


def refusal(content: bytes) -> str:
    return one_line_of(content, "some.bin", read_torch_file)


# Programs


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_program_is_named_and_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "was run"
    for value in (Touch(trace), {"a": tensor(), "b": Touch(trace)}, {Touch(trace): 1}, [Touch(trace)]):
        message = refusal(torch_file(pickled(value, protocol)))
        assert "posix.system, which does not belong to a file of tensors and is never run" in message
    assert not trace.exists()


@pytest.mark.parametrize(
    "name",
    [
        *("torch.storage _load_from_bytes", "torch._utils _rebuild_sparse_tensor"),
        *("torch._utils _rebuild_wrapper_subclass", "torch._utils _rebuild_device_tensor_from_numpy"),
        *("torch.distributed.tensor DTensor", "torch serialization.os.system", "torch.serialization os.system"),
        *("collections OrderedDict.fromkeys", "builtins eval", "__builtin__ eval", "__main__ Model", " "),
    ],
)
def test_no_global_is_looked_up(name: str) -> None:
    module, _, attribute = name.partition(" ")
    for code in (
        b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b".",
        b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(attribute)])
        + attribute.encode() + b"\x93.",
    ):  # fmt: skip
        assert "which does not belong to a file of tensors" in refusal(torch_file(code))


def test_a_state_changes_no_function_and_no_class() -> None:
    for target in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ctorch\nTensor\n", b"]"):
        code = b"\x80\x02" + target + b"}X\x01\0\0\0xK\x01sb."
        assert "it sets the state of an object that has none" in refusal(torch_file(code))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (b"", "it cannot be decoded"),
        (b"\x80\x02", "some.bin: archive/data.pkl: it c"),
        (b"\x80\x02NN.", "it holds a NoneType"),
        (b"\x80\x63.", "unsupported pickle protocol: 99"),
        (b"\x80\x02N)R.", "it calls an object that is not a function"),
        (b"\x80\x02Nr\xff\xff\xff\xff0}.", "some.bin"),  # a memo of one, wherever it is
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "some.bin: archive/data.pkl: it c"),
        (b"\x80\x02X\x03\0\0\0\xed\xa0\x80.", "it holds a str"),
        (b"\x80\x02ctorch", "it refers to torc"),
        (b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n.", "the shard of one rank. Write it by"),
        (b"\x80\x02NNa.", "it cannot be decoded"),
        (b"\x80\x02}(K\x01NK\x01Nu.", "a dict has the key 1 twice"),
        (b"(i__main__\nX\n.", "some.bin: archive/data.pkl: it c"),
        (b"\x80\x02NQ.", "a persistent id does not describe a storage"),
    ],
)  # fmt: skip
def test_a_pickle_that_is_no_pickle(code: bytes, words: str) -> None:
    if code.endswith(b"0}."):
        read_torch_file(MemoryReader({"some.bin": torch_file(code)}), "some.bin")
    else:
        assert words in refusal(torch_file(code))


def test_deep_and_endless_nests_end_soon() -> None:
    start = time.process_time()
    deep = b"\x80\x02}X\x01\0\0\0a" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    assert "nested too deeply" in refusal(torch_file(deep))
    tuples = b"\x80\x02)" + b"\x85" * 100_000 + b"."
    assert "it holds a tuple" in refusal(torch_file(tuples))
    key = b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."
    read_torch_file(MemoryReader({"some.bin": torch_file(key)}), "some.bin")  # a key that is never hashed
    pairs = b")" + b"q\x01h\x01\x86" * 60  # a tuple of two, each of two of two...
    read_torch_file(MemoryReader({"some.bin": torch_file(b"\x80\x02}" + pairs + b"Ns.")}), "some.bin")
    assert "it calls an object that is not a function" in refusal(torch_file(b"\x80\x02" + pairs + b")R."))
    assert "it calls an object that is not a function" in refusal(torch_file(b"\x80\x02" + pairs + b"NR."))
    record = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R" + pairs + b"b"
    assert "a dict has the key of type Record twice" in refusal(
        torch_file(b"\x80\x02" + record + b"q\x020}h\x02Nsh\x02Ns.")
    )
    endless: dict[str, Any] = {}
    endless["a"] = endless
    assert "nested too deeply" in refusal(torch_file(endless))
    doubling: dict[str, Any] = {"x": 1}
    for _ in range(60):
        doubling = {"a": doubling, "b": doubling}
    assert "nested too deeply" in refusal(torch_file(doubling))
    assert time.process_time() - start < 10 * slowness()


def test_large_objects_of_few_bytes_are_not_made() -> None:
    tracemalloc.start()
    for code in (
        b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x01\x85R0",
        b"Nr\xff\xff\xff\xff0",
        b"\x96" + b"\xff" * 7 + b"\x7f0",
    ):
        with contextlib.suppress(FormatError):
            read_torch_file(MemoryReader({"some.bin": torch_file(b"\x80\x05" + code + b"}.")}), "some.bin")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_items_given_to_an_ordered_dict_are_not_lost() -> None:
    assert "it cannot be decoded" in refusal(torch_file(Called(collections.OrderedDict, [["a", 1]])))


# Tensors


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor((2, 3)), "a: it reaches to element 5 of a storage of 4"),
        (tensor((2, 2), (3, 1)), "reaches to element 5"),
        (tensor(offset=1), "reaches to element 5"),
        (tensor((2**40,), (1,)), "reaches to element"),
        (tensor((2**40,), (0,)), "its elements share memory"),
        (tensor((2, 2), (1, 1)), "its elements share memory"),
        (tensor((2, 2), (2,)), "1 strides for 2 dimensions"),
        (tensor((-1,), (1,)), "an invalid offset, shape or strides"),
        (tensor((2**63,), (1,)), "an invalid offset, shape or strides"),
        (tensor((2,), (-1,)), "an invalid offset, shape or strides"),
        (tensor([2, 2]), "an invalid offset, shape or strides"),
        (tensor((1,) * 100, (1,) * 100), "an invalid offset, shape or strides"),
        (tensor(offset=-1), "an invalid offset, shape or strides"),
        (tensor(of=storage(numel=5)), "has 16 bytes, not 20"),
        (tensor(of=storage(kind=torch.DoubleStorage)), "bytes, not 32"),
        (tensor(of=storage("1")), "it has no member archive/data/1"),
        (tensor(of=storage("0", -1)), "a persistent id does not describe a storage"),
        (tensor(of=Id("storage", "FloatStorage", "0", "cpu", 4)), "a persistent id does not describe a storage"),
        (tensor(of=Id("module", 1, "0", "cpu", 4)), "a persistent id does not describe a storage"),
        (tensor(of="0"), "a tensor has no storage"),
        (tensor(extra=({"neg": True},)), "conjugated or negated"),
        (tensor(extra=(1, 2, 3)), "it cannot be decoded"),
        (Called(torch._utils._rebuild_tensor_v2), "it cannot be decoded"),
    ],
)
def test_invalid_tensors_are_refused(value: object, words: str) -> None:
    assert words in refusal(torch_file({"a": value}))


def test_one_storage_of_two_sizes() -> None:
    small = tensor((2,), (1,), of=storage(numel=2))
    for first, second in ((small, tensor()), (tensor(), small)):
        assert "its storage has 16 bytes, not 8" in refusal(torch_file({"a": first, "b": second}))


def test_a_call_within_a_call() -> None:
    inner: Any = (torch._tensor._rebuild_from_type_v2, torch.Tensor, (), {})
    outer = Called(
        torch._tensor._rebuild_from_type_v2, torch._tensor._rebuild_from_type_v2, torch.Tensor, inner, {}
    )
    assert "is not rebuilt from a tensor" in refusal(torch_file({"a": outer}))


# Archives


def test_a_bomb_is_not_unpacked() -> None:
    content = archive({"data.pkl": b"\0" * 50_000_000}, method=zipfile.ZIP_DEFLATED)
    start = time.process_time()
    assert "is compressed" in refusal(content)
    assert time.process_time() - start < 5 * slowness()


def test_a_member_twice() -> None:
    made = torch_file({"a": tensor()}, {"data/0": bytes(16), "data/1": bytes(16)})
    assert "it has the member archive/data/1 twice" in refusal(made.replace(b"archive/data/0", b"archive/data/1"))


@pytest.mark.parametrize("keep", [0, 1, 21, 22, 100, 1000, len(SOUND) // 2, len(SOUND) - 1])
def test_a_file_cut_short(keep: int) -> None:
    refusal(SOUND[:keep])


# Whatever it is


OPCODES = [bytes([code]) for code in range(256)]


@given(st.lists(st.sampled_from(OPCODES) | st.binary(max_size=6), max_size=60))
def test_random_programs_raise_nothing_else(parts: list[bytes]) -> None:
    with contextlib.suppress(FormatError):
        read_pickle(b"\x80\x02" + b"".join(parts) + b".", what="x")
