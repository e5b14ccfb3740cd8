"""Who is given which task when, and what becomes of the tasks of workers that are gone."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from fedlens.engines.dispatch import TRIES, answers_in_order


class FakeWorker:
    def __init__(self) -> None:
        self.given: deque[tuple[int, Any]] = deque()


class FakeTransport:
    """Tasks are names; the worker that has most of them answers one, or is gone over it."""

    def __init__(self, num_workers: int, num_waiting: int = 99, **deaths: int) -> None:
        self.workers = [FakeWorker() for _ in range(num_workers)]
        self.num_waiting, self.deaths = num_waiting, deaths  # how often, by task
        self.sent: list[str] = []
        self.most_given = 0

    def send(self, worker: FakeWorker, number: int, task: str) -> None:
        self.sent.append(task)
        worker.given.append((number, task))
        self.most_given = max(self.most_given, sum(len(one.given) for one in self.workers))

    def receive(self, waits: bool) -> tuple[dict[int, str], list[FakeWorker]]:
        worker = max(self.workers, key=lambda one: len(one.given))
        if not waits or not worker.given:
            return {}, []
        number, task = worker.given[0]
        if self.deaths.get(task):
            self.deaths[task] -= 1
            return {}, [worker]
        worker.given.popleft()
        return {number: task.upper()}, []

    def replace(self, worker: FakeWorker, times: int) -> None:
        if times == TRIES:
            raise ChildProcessError
        self.workers[self.workers.index(worker)] = FakeWorker()


def answers(transport: FakeTransport, tasks: str, order: list[int]) -> Iterator[str]:
    return answers_in_order(transport, list(tasks), order)


def test_answers_come_in_the_order_of_tasks_that_were_handed_out_in_another():
    transport = FakeTransport(2)
    assert "".join(answers(transport, "abcdef", [5, 3, 1, 0, 2, 4])) == "ABCDEF"
    assert "".join(transport.sent) == "fdbace"


def test_workers_have_two_tasks_each_but_for_the_last_ones():
    transport = FakeTransport(3)
    found = answers(transport, "abcdefgh", [*range(8)])
    next(found)
    # While more are left than there are workers, a second one is given.
    assert "".join(transport.sent) == "abcde"
    assert [len(worker.given) for worker in transport.workers] == [1, 2, 1]


def test_no_more_are_in_work_or_wait_for_their_turn_than_there_is_room_for():
    transport = FakeTransport(4, num_waiting=2)
    assert "".join(answers(transport, "abcdef", [*range(6)])) == "ABCDEF"
    assert transport.most_given == 2


def test_the_tasks_of_a_worker_that_is_gone_are_the_next_to_be_given():
    transport = FakeTransport(1, b=TRIES - 1)
    assert "".join(answers(transport, "abcd", [1, 0, 2, 3])) == "ABCD"
    assert "".join(transport.sent) == "bababacd"


def test_a_task_over_which_workers_are_always_lost_is_not_tried_for_ever():
    transport = FakeTransport(2, c=99)
    with pytest.raises(ChildProcessError):
        list(answers(transport, "abcd", [*range(4)]))
    assert transport.sent.count("c") == TRIES
