"""Streams whose rows, and not files, are divided among ranks."""

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


def split_by_row(dataset: Any) -> Any:
    """Return a dataset that accelerate divides by rows, if it is a stream of the ``datasets`` library.

    accelerate would give each rank files of its own. Ranks would have different numbers of batches, and the rows of
    a step would depend on the number of ranks.
    """
    stream_class: Any = getattr(sys.modules.get("datasets"), "IterableDataset", ())
    return _StreamedRows(dataset) if isinstance(dataset, stream_class) else dataset


class _StreamedRows(IterableDataset[Any]):
    """Rows of a stream, in its order, without its files."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)
