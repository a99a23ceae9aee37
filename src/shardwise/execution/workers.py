"""Runs a list of tasks on several threads, which stop together when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from shardwise.storage.contract import ReadPolicy

Task = TypeVar("Task")
Tool = TypeVar("Tool")

_LOOK_S = 0.1
"""How often the waiting thread looks whether there is a reason to leave."""


def computing(policy: ReadPolicy, processors: int) -> int:
    """Return the number of workers that compute at once; if reads cross a network, as many as read."""
    return policy.concurrency if policy.is_remote else max(1, min(policy.concurrency, processors))


class Workers(Generic[Task, Tool]):
    """Threads, each with a tool of its own, that take tasks in their order.

    The threads are daemons: one that hangs in a read of a dead file system does not keep the process alive.

    Args:
        carry_out: what is done with a task, on a thread that has the tool.
        tools: one for each thread.
        check: called by the waiting thread now and then; what it raises ends the work.
    """

    def __init__(
        self, carry_out: Callable[[Task, Tool], None], tools: Sequence[Tool], check: Callable[[], None]
    ) -> None:
        self._carry_out = carry_out
        self._tools = tools
        self._check = check
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._stop = False
        self._failure: BaseException | None = None
        self._at_work = 0

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry out all tasks. The first error of any is raised; the others' current tasks are waited for.

        When ``check`` raises, nobody is waited for.
        """
        pending = iter(tasks)
        tools = self._tools[: max(1, min(len(self._tools), len(tasks)))]
        self._at_work = len(tools)
        for number, tool in enumerate(tools):
            threading.Thread(
                target=self._serve, args=(pending, tool), name=f"shardwise-worker-{number}", daemon=True
            ).start()
        try:
            with self._finished:
                while self._at_work:
                    self._finished.wait(_LOOK_S)
                    self._check()
        finally:
            self._stop = True
        if self._failure is not None:
            raise self._failure

    def _serve(self, pending: object, tool: Tool) -> None:
        try:
            while not self._stop:
                with self._lock:
                    task: Task | None = next(pending, None)  # type: ignore[call-overload]
                if task is None:
                    break
                self._carry_out(task, tool)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                self._stop = True
        with self._finished:
            self._at_work -= 1
            self._finished.notify_all()


class Ahead(Generic[Task]):
    """The value of a function that a thread of its own has begun to work out.

    The thread is a daemon, as those of :class:`Workers` are.
    """

    def __init__(self, function: Callable[[], Task]) -> None:
        self._function = function
        self._value: list[Task] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="shardwise-ahead", daemon=True)
        self._thread.start()

    def value(self, check: Callable[[], None]) -> Task:
        """Wait for the value, or raise what the function raised; ``check`` is called meanwhile."""
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            check()
        if self._failure is not None:
            raise self._failure
        return self._value[0]

    def _work(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._failure = error
