"""The queue of tenants, pass by pass, until all have come to their ends or are asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.errors import DisagreementError, RankLostError, ShardwiseError
from shardwise.execution.ranks.collectives import naming_the_lost
from shardwise.execution.ranks.world import World
from shardwise.observing.phases import phase
from shardwise.report.save_report import SaveReport
from shardwise.tenants.report import Ended, TenantReport
from shardwise.tenants.trainee import Trainee
from shardwise.tenants.turns import next_pass, queue_after
from shardwise.training.stopping import StopRequest


class TurnLoop:
    """Many tenants of one bank, trained in turns. See [Note: Turns].

    Args:
        world: the ranks.
        bank: with these tenants.
        trainees: in the order of their first turns.
        tokens_per_pass: the most of a rank, padding included.
        stop: asked on any rank, it lets all tenants come to the ends of their steps, and keep their states.
        when_stuck: as of :func:`~shardwise.training.loop.train`.
    """

    def __init__(
        self,
        world: World,
        bank: AdapterBank,
        trainees: Sequence[Trainee],
        *,
        tokens_per_pass: int,
        stop: StopRequest,
        when_stuck: Callable[[RankLostError], object] = lambda error: None,
    ) -> None:
        self.world = world
        self.bank = bank
        self.trainees = {trainee.name: trainee for trainee in trainees}
        self.tokens_per_pass = tokens_per_pass
        self.stop = stop
        self.when_stuck = when_stuck
        self.passes = 0
        self.is_stopping = False
        self._names = tuple(self.trainees)
        self._queue = list(self._names)
        self._failure: Exception | None = None
        self._ended: dict[str, TenantReport] = {}

    def go(self) -> list[TenantReport]:
        """Train them all; what became of each, in their order. Collective: yes.

        Raises:
            RankLostError: a rank is lost, or has run out of memory.
            StorageError: metrics cannot be written.
            ShardwiseError: the base itself has failed.
        """

        def stuck(lost: RankLostError) -> None:
            self.when_stuck(_with_newest(lost))

        try:
            with naming_the_lost(self.world, lambda: f"in pass {self.passes + 1}", stuck, self.stop.has_come):
                self._train()
        except RankLostError as lost:
            raise _with_newest(lost) from lost
        return [self._ended[name] for name in self._names]

    def _train(self) -> None:
        for name in list(self._queue):
            self._do(name, lambda trainee: trainee.catch_up(self.bank))
        while self._queue:
            self._hear()
            queue = [name for name in self._queue if not self.is_stopping or self.trainees[name].is_in_window]
            if not queue:
                break
            self._pass(queue)
        for name in list(self._queue):
            self._do(name, lambda trainee: trainee.keep(self.bank))
        for name in list(self._queue):
            self._end(name, Ended.STOPPED)
        self._hear()

    def _pass(self, queue: Sequence[str]) -> None:
        """Those whose turn it is go through the base; of these, those whose windows are full take their steps."""
        taken = next_pass([self.trainees[name].waiting() for name in queue], self.tokens_per_pass)
        self._queue = queue_after(self._queue, taken)
        try:
            with phase("pass"):
                told = self.bank.forward_backward([(name, self.trainees[name].rows()) for name in taken])
        except (RankLostError, DisagreementError):
            raise
        except ShardwiseError as error:
            if len(taken) > 1:  # each of them alone, or none: it is not of one's rows
                raise
            self._fail(taken[0], error)
            return
        self.passes += 1
        for name, cause in told.failures.items():
            self._fail(name, cause)
        for name in told.tenants:
            trainee = self.trainees[name]
            trainee.note(told.tenants[name])
            if trainee.is_due:
                with phase("step"):
                    self._do(name, lambda trainee: trainee.take_step(self.bank))

    def _do(self, name: str, what: Callable[[Trainee], object]) -> None:
        """Something of one tenant's, after which it may be at its end; if it fails, it ends alone."""
        trainee = self.trainees[name]
        try:
            what(trainee)
            saved = trainee.leave(self.bank) if trainee.is_done else None
        except (RankLostError, DisagreementError):
            raise
        except ShardwiseError as error:
            self._fail(name, error)
        else:
            if saved is not None:
                self._end(name, Ended.TRAINED, saved=saved)

    def _fail(self, name: str, error: ShardwiseError) -> None:
        self.bank.remove(name)
        self._end(name, Ended.FAILED, cause=str(error))

    def _end(self, name: str, ended: Ended, *, cause: str = "", saved: SaveReport | None = None) -> None:
        """A tenant leaves the queue, and what it has read is forgotten."""
        trainee = self.trainees.pop(name)
        self._queue.remove(name)
        self._ended[name] = trainee.report(ended, cause, saved)
        self._failure = self._failure or trainee.failure

    def _hear(self) -> None:
        """Whether anybody is asked to stop; what a listener has raised is everybody's. Collective: yes."""

        def tell() -> bool:
            failures = (trainee.failure for trainee in self.trainees.values())
            if failure := self._failure or next(filter(None, failures), None):
                raise failure
            return self.stop.is_made

        self.is_stopping = self.world.all_reduce(tell, any)


def _with_newest(lost: RankLostError) -> RankLostError:
    return RankLostError(f"{lost}. The same command goes on from the newest checkpoint of each tenant")
