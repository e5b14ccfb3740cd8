"""Tasks handed out to workers, wherever they are, and their answers in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

TRIES = 3  # of a task whose worker is gone


class HasTasks(Protocol):
    given: deque[tuple[int, Any]]  # the numbers of tasks that it has not answered, oldest first


W = TypeVar("W", bound=HasTasks)  # a worker
T_contra = TypeVar("T_contra", contravariant=True)  # a task
A_co = TypeVar("A_co", covariant=True)  # an answer
T = TypeVar("T")
A = TypeVar("A")


class Transport(Protocol[W, T_contra, A_co]):
    """The workers, and the way to them: what differs between processes and actors."""

    @property
    def workers(self) -> Sequence[W]: ...

    @property
    def num_waiting(self) -> int:
        """How many tasks may be in work or have an answer that waits for its turn."""
        ...

    def send(self, worker: W, number: int, task: T_contra) -> None:
        """Give a task to a worker, and note that it has it."""
        ...

    def receive(self, waits: bool) -> tuple[Mapping[int, A_co], Sequence[W]]:
        """Answers that have come, by the numbers of their tasks, and workers that are gone.

        If there are none it waits, for a while at least, or not at all.
        """
        ...

    def replace(self, worker: W, times: int) -> None:
        """Go on without a worker that is gone, unless it is the last of so many TRIES."""
        ...


def answers_in_order(
    transport: Transport[W, T, A], tasks: Sequence[T], order: list[int]
) -> Iterator[A]:
    """The answers to tasks, in their order; they are handed out in another one.

    A worker has its next task before it is done with one, so that it need not wait for this
    process; but the last tasks are for those that are done first. The tasks of a worker that is
    gone are given to others: they are the same, and so is what comes of them.
    """
    done: dict[int, A] = {}
    lost: Counter[int] = Counter()  # how often a task was lost with its worker
    turn = 0
    while turn < len(tasks):
        in_work = sum(len(worker.given) for worker in transport.workers)
        while order and in_work + len(done) < transport.num_waiting:
            worker = min(transport.workers, key=lambda one: len(one.given))
            if len(worker.given) >= (2 if len(order) > len(transport.workers) else 1):
                break
            number = order.pop(0)
            transport.send(worker, number, tasks[number])
            in_work += 1
        has_come = turn in done
        if has_come:
            # One at a time: while it is added up, a worker may have become idle.
            yield done.pop(turn)
            turn += 1
        answers, gone = transport.receive(waits=not has_come)
        done.update(answers)
        for worker in gone:
            numbers = [number for number, _ in worker.given]
            order[:0] = numbers
            lost.update(numbers[:1])  # the one it was at work on
            transport.replace(worker, lost[numbers[0]])
