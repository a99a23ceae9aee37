"""Which rows an epoch takes of one or several data sets, and in which order.

[Note: Weights] Without weights an epoch takes each row of each data set once. With them it takes as many rows as
all have together, dealt to the data sets by their weights, to the nearest row (what is left over goes to the
largest remainders). A data set that gives more rows than it has is gone through again within the epoch, each time
in another order; one that gives fewer goes on in the next epoch where it has stopped. So over a training all rows
of one data set come equally often, but for one. Everything follows from seed, epoch, and the numbers of rows; ranks
have no part in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OnceEach:
    """Every row comes once in an epoch."""


@dataclass(frozen=True, slots=True)
class ByWeight:
    """Each data set gives its share of an epoch's rows.

    Attributes:
        weights: of the data sets, of any sum.
        counts: of their rows, one data set after the other.
    """

    weights: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """How many rows of each data set an epoch takes."""
        total = sum(self.counts)
        exact = [weight * total / sum(self.weights) for weight in self.weights]
        whole = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
        for number in by_remainder[: total - sum(whole)]:
            whole[number] += 1
        return tuple(whole)


Mixing: TypeAlias = OnceEach | ByWeight
EVERY_ROW: Final = OnceEach()


def mixing_of(counts: Sequence[int], weights: Sequence[float | None]) -> Mixing:
    """How data sets of so many rows are mixed; all of the weights are numbers, or none is.

    Raises:
        ConfigError: a data set would not give a single row.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return EVERY_ROW
    mixing = ByWeight(tuple(given), tuple(counts))
    for weight, share, count in zip(given, mixing.shares, counts, strict=True):
        if not share or not count:
            raise ConfigError(
                f"data.train: of the data set with the weight {weight:g} an epoch of {sum(counts)} rows would take "
                f"none (it has {count} rows to learn); give it a greater weight, or leave it out"
            )
    return mixing


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of every epoch, by their numbers."""

    count: int
    """Of rows in an epoch."""
    mixing: Mixing = EVERY_ROW

    @property
    def identity(self) -> int | None:
        """A number that is another for other shares; None where each row comes once."""
        if isinstance(self.mixing, OnceEach):
            return None
        return zlib.crc32(repr((self.mixing.shares, self.mixing.counts)).encode())

    def of_epoch(self, seed: int, epoch: int) -> list[int]:
        """All rows of an epoch, in order: the same for the same arguments."""
        shuffle = np.random.default_rng([seed, epoch])
        if isinstance(self.mixing, OnceEach):
            return list(shuffle.permutation(self.count).tolist())
        shares, counts = self.mixing.shares, self.mixing.counts
        firsts = np.cumsum([0, *counts])
        parts = [
            _drawn(seed, number, count, epoch * share, share) + firsts[number]
            for number, (count, share) in enumerate(zip(counts, shares, strict=True))
        ]
        return list(shuffle.permutation(np.concatenate(parts)).tolist())


def _drawn(seed: int, number: int, count: int, start: int, share: int) -> NDArray[np.int64]:
    """Rows ``start <= i < start + share`` of a data set that is gone through again and again."""
    drawn: list[NDArray[np.int64]] = []
    while share:
        turn, at = divmod(start, count)
        order = np.random.default_rng([seed, number, turn]).permutation(count)[at : at + share]
        drawn.append(order)
        start, share = start + len(order), share - len(order)
    return np.concatenate([np.empty(0, dtype=np.int64), *drawn])


def held_out_rows(
    hashes: Sequence[NDArray[np.uint64]], fraction: float, seed: int
) -> list[NDArray[np.bool_]] | None:
    """Of the rows of each data set which are held out, by what is in them; None where no two differ.

    Of all rows that differ a fraction is held out, to the nearest row but at least one, and not all. Which ones is
    as good as drawn: those whose hashes, mixed with the seed, are least. So another order of rows changes nothing.
    """
    different = np.unique(np.concatenate(hashes))
    if len(different) < 2:
        return None
    count = min(max(round(fraction * len(different)), 1), len(different) - 1)
    chosen = different[np.argsort(_mixed(different, seed), kind="stable")[:count]]
    return [np.isin(own, chosen) for own in hashes]


def _mixed(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Other numbers, which are all over the place (the finaliser of splitmix64)."""
    mixed = hashes ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
