"""The benchmark's own arithmetic."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks import meter
from benchmarks.checkpoints import SHAPES, write


def test_checksums_of_the_pieces_add_up_to_that_of_the_whole() -> None:
    elements = np.random.default_rng(0).integers(0, 1 << 16, size=(1 << 20) + 12345, dtype=np.uint16)
    whole = meter.checksum(elements, 0)
    for cut in (1, 4097, (1 << 20) - 1, 1 << 20, len(elements) - 1):
        pieces = meter.checksum(elements[:cut], 0) + meter.checksum(elements[cut:], cut)
        assert pieces % (1 << 64) == whole


def test_a_checksum_knows_the_places_of_elements() -> None:
    elements = np.arange(1, 100, dtype=np.uint32)
    swapped = elements.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    assert meter.checksum(swapped, 0) != meter.checksum(elements, 0)
    assert meter.checksum(elements, 1) != meter.checksum(elements, 0)


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_is_written_once_and_finite(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shape = SHAPES[name].tiny()
    folder = write(shape, tmp_path)
    files = meter.files_of(folder)
    assert (len(files) > 1) == (SHAPES[name].nbytes > SHAPES[name].file_bytes)
    tensors = {key: tensor for path in files for key, tensor in load_file(path).items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shape.tensors()
    assert sum(tensor.nbytes for tensor in tensors.values()) == shape.nbytes
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    if shape.stores_head:
        assert tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])
    written = files[0].stat().st_mtime_ns
    assert write(shape, tmp_path) == folder
    assert files[0].stat().st_mtime_ns == written
