"""Sends tasks to workers, local or remote, and yields their answers in order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

TRIES = 3  # attempts at a task whose worker is lost


class HasTasks(Protocol):
    given: deque[tuple[int, Any]]  # unanswered tasks, each with its number, oldest first


W = TypeVar("W", bound=HasTasks)  # a worker
T_contra = TypeVar("T_contra", contravariant=True)  # a task
A_co = TypeVar("A_co", covariant=True)  # an answer
T = TypeVar("T")
A = TypeVar("A")


class Transport(Protocol[W, T_contra, A_co]):
    """The workers and how to reach them: what differs between processes and actors."""

    @property
    def workers(self) -> Sequence[W]: ...

    @property
    def num_waiting(self) -> int:
        """How many tasks may be in progress or have an answer that waits for its turn."""
        ...

    def send(self, worker: W, number: int, task: T_contra) -> None:
        """Send a task to a worker, and append it to the worker's `given`."""
        ...

    def receive(self, waits: bool) -> tuple[Mapping[int, A_co], Sequence[W]]:
        """The answers that have arrived, by task number, and the workers that are lost.

        If there are none and `waits` is true, it blocks, at least for a while.
        """
        ...

    def replace(self, worker: W, times: int) -> None:
        """Continue without a lost worker; raise an error if its task was lost TRIES times."""
        ...


def answers_in_order(
    transport: Transport[W, T, A], tasks: Sequence[T], order: list[int]
) -> Iterator[A]:
    """Yield the answers in the order of `tasks`, which are sent to workers in another `order`.

    A worker gets its next task before it finishes one, so that it does not wait for this process;
    but the last tasks go to the workers that finish first. The tasks of a lost worker are sent to
    others, with the same results.
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
            # One at a time: a worker may become idle while the caller adds the answer up.
            yield done.pop(turn)
            turn += 1
        answers, gone = transport.receive(waits=not has_come)
        done.update(answers)
        for worker in gone:
            numbers = [number for number, _ in worker.given]
            order[:0] = numbers
            lost.update(numbers[:1])  # the task it was working on
            transport.replace(worker, lost[numbers[0]])
