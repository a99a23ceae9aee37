"""Which rows each step takes: the same on any number of ranks, and from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.data.batches import Batch, Batches, BatchLayout, Padded
from shardwise.training.data.read_once import TrainData
from shardwise.training.data.train_data import RowOrder
from shardwise.training.options import Epochs, TrainOptions


class StepSampler:
    """Which rows a rank takes: one item for each step, with the row numbers of each of its micro-batches.

    The rows are shuffled anew in every epoch, by ``seed`` and epoch alone (and, of several data sets, taken by
    their weights: [Note: Weights] in ``train_data.py``). A step takes the next rows of that order and deals
    them to the ranks in turn, so which rows it takes depends on how many there are in all, not on how ranks and
    micro-batches share them. The last step of an epoch takes what is left. Every rank has the same
    number of steps, and the same number of micro-batches in each; where rows run out, a micro-batch is empty.

    It has a position, which is that of all ranks together: steps given, epoch, and rows taken of that. From the
    same position any number of ranks goes on with the same rows.
    """

    def __init__(self, rows: int | RowOrder, options: TrainOptions, *, rank: int = 0, size: int = 1) -> None:
        self.order = RowOrder(rows) if isinstance(rows, int) else rows
        self.row_count = self.order.count
        self.options = options
        self.rank = rank
        self.size = size
        self.step = 0
        self.epoch = 0
        self.taken = 0

    @property
    def rows_per_step(self) -> int:
        return self.options.rows_per_rank * self.size

    def __len__(self) -> int:
        """Steps in all, those before the position among them."""
        duration = self.options.duration
        if not isinstance(duration, Epochs):
            return duration.count
        of_epoch = -(-(self.row_count - self.taken) // self.rows_per_step)
        later = max(0, duration.count - self.epoch - 1) * -(-self.row_count // self.rows_per_step)
        return self.step + (of_epoch + later if self.epoch < duration.count else 0)

    def __iter__(self) -> Iterator[list[list[int]]]:
        """From the position on. The position is behind a step as soon as it is given."""
        order: list[int] = []
        total = len(self)
        while self.step < total:
            if self.taken == 0 or not order:
                order = self.order.of_epoch(self.options.seed, self.epoch)
            rows = order[self.taken : self.taken + self.rows_per_step]
            self.step += 1
            self.taken += len(rows)
            if self.taken == self.row_count:
                self.epoch, self.taken = self.epoch + 1, 0
            yield self._deal(rows)

    def _deal(self, rows: Sequence[int]) -> list[list[int]]:
        of_rank = rows[self.rank :: self.size]
        most = len(rows[:: self.size])
        return [
            list(of_rank[start : start + self.options.batch_size])
            for start in range(0, most, self.options.batch_size)
        ]


_IDENTITY = ("rows", "digest", "seed", "weights")
"""What a position is one in; without the last where each row comes once."""


class StepLoader:
    """The micro-batches of every step of this rank, with a position that can be kept and taken up again."""

    def __init__(
        self, data: TrainData, options: TrainOptions, layout: BatchLayout, *, rank: int, size: int
    ) -> None:
        self.data = data
        self.batches = Batches(data, layout)
        self.sampler = StepSampler(self.batches.order, options, rank=rank, size=size)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[Batch]]:
        for step in self.sampler:
            yield [self.batches.make(rows) for rows in step]

    @property
    def path(self) -> str:
        """What is read, for messages."""
        return self.data.path

    @property
    def layout(self) -> BatchLayout:
        """How rows become batches."""
        return self.batches.layout

    @property
    def epochs_done(self) -> float:
        return self.sampler.epoch + self.sampler.taken / self.sampler.row_count

    def name_rows(self, lines: Sequence[int]) -> str:
        """Rows by their places in the data."""
        return self.data.name_rows(lines)

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every rank, and what it is a position in."""
        sampler = self.sampler
        return {"step": sampler.step, "epoch": sampler.epoch, "taken": sampler.taken, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is one in other data, or in another order of them.
        """
        _require_same(self.data, dict.fromkeys(_IDENTITY) | self._identity(), state_dict)
        step, epoch, taken = (state_dict.get(name, -1) for name in ("step", "epoch", "taken"))
        if min(step, epoch, taken) < 0 or taken >= self.sampler.row_count:
            raise ConfigError(
                f"{self.data.path}: {dict(state_dict)} is no position in it; the checkpoint is damaged"
            )
        self.sampler.step, self.sampler.epoch, self.sampler.taken = step, epoch, taken

    def _identity(self) -> dict[str, int]:
        of_mixing = self.sampler.order.identity
        return {
            "rows": self.sampler.row_count,
            "digest": self.data.examples.digest,
            "seed": self.sampler.options.seed,
            **({} if of_mixing is None else {"weights": of_mixing}),
        }


def require_same_rows(data: TrainData, seed: int, position: Mapping[str, object], rows: int | None = None) -> None:
    """Refuse a position in other rows, or in another order of them, as far as it is known without batches.

    ``rows`` is how many items there are, where that is known by now.

    Raises:
        ConfigError: naming what differs.
    """
    known = {} if rows is None else {"rows": rows}
    _require_same(data, {**known, "digest": data.examples.digest, "seed": seed}, position)


def _require_same(data: TrainData, here: Mapping[str, int | None], there: Mapping[str, object]) -> None:
    others = [name for name in here if there.get(name) != here[name]]
    if others:
        told = ", ".join(f"{name} {there.get(name)} then and {here[name]} now" for name in others)
        raise ConfigError(
            f"{data.path}: the position is one in other data ({told}); resume with the same data, tokenizer, "
            "max_length, packing, weights and seed, or begin anew in another output folder"
        )


_PADDED = Padded()


def step_loader(data: TrainData, options: TrainOptions, layout: BatchLayout = _PADDED) -> StepLoader:
    """The micro-batches of every step of this rank. Collective: no; the ranks are those of the default group."""
    world = World.current()
    return StepLoader(data, options, layout, rank=world.rank, size=world.size)
