"""Who is given which task when, and what becomes of the tasks of workers that are gone."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from fedlens.engines.trainer import Result
from fedlens.engines.workers import TRIES, WorkerEngine


class FakeWorker:
    most_bytes = 0

    def __init__(self) -> None:
        self.given: deque[tuple[int, Any]] = deque()


class FakeWorkers(WorkerEngine[FakeWorker]):
    """Tasks are names; the worker that has most of them answers one, or is gone over it."""

    name = "fake"

    def __init__(self, num_workers: int, num_waiting: int = 99, **deaths: int) -> None:
        none: Any = None
        super().__init__(none, none)
        self.workers = [FakeWorker() for _ in range(num_workers)]
        self.num_waiting, self.deaths = num_waiting, deaths  # how often, by task
        self.sent: list[str] = []
        self.most_given = 0
        self.released: list[int] = []

    def start(self, program: Any, shared: Any, work: Any) -> None:
        raise NotImplementedError

    def begin(self, given: Any, work: Any) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def release(self, number: int) -> None:
        self.released.append(number)

    def send(self, worker: FakeWorker, number: int, task: Any) -> None:
        self.sent.append(task)
        worker.given.append((number, task))
        self.most_given = max(self.most_given, sum(len(one.given) for one in self.workers))

    def receive(self, waits: bool) -> tuple[dict[int, Result], list[FakeWorker]]:
        worker = max(self.workers, key=lambda one: len(one.given))
        if not waits or not worker.given:
            return {}, []
        number, task = worker.given[0]
        if self.deaths.get(task):
            self.deaths[task] -= 1
            return {}, [worker]
        worker.given.popleft()
        return {number: self.accept(Result(task.upper(), busy=1.0), worker)}, []

    def replace(self, worker: FakeWorker, times: int) -> None:
        if times == TRIES:
            raise ChildProcessError
        self.workers[self.workers.index(worker)] = FakeWorker()


def answers(workers: FakeWorkers, tasks: str, order: list[int]) -> Iterator[str]:
    named: list[Any] = [lambda name=name: name for name in tasks]
    for result in workers.results(named, order):
        yield result.value
    assert workers.released == [*range(len(tasks))]
    assert workers.busy_seconds == len(tasks)


def test_answers_come_in_the_order_of_tasks_that_were_handed_out_in_another():
    workers = FakeWorkers(2)
    assert "".join(answers(workers, "abcdef", [5, 3, 1, 0, 2, 4])) == "ABCDEF"
    assert "".join(workers.sent) == "fdbace"


def test_workers_have_two_tasks_each_but_for_the_last_ones():
    workers = FakeWorkers(3)
    found = answers(workers, "abcdefgh", [*range(8)])
    next(found)
    # While more are left than there are workers, a second one is given.
    assert "".join(workers.sent) == "abcde"
    assert [len(worker.given) for worker in workers.workers] == [1, 2, 1]


def test_no_more_are_in_work_or_wait_for_their_turn_than_there_is_room_for():
    workers = FakeWorkers(4, num_waiting=2)
    assert "".join(answers(workers, "abcdef", [*range(6)])) == "ABCDEF"
    assert workers.most_given == 2


def test_the_tasks_of_a_worker_that_is_gone_are_the_next_to_be_given():
    workers = FakeWorkers(1, b=TRIES - 1)
    assert "".join(answers(workers, "abcd", [1, 0, 2, 3])) == "ABCD"
    assert "".join(workers.sent) == "bababacd"


def test_a_task_over_which_workers_are_always_lost_is_not_tried_for_ever():
    workers = FakeWorkers(2, c=99)
    with pytest.raises(ChildProcessError):
        list(answers(workers, "abcd", [*range(4)]))
    assert workers.sent.count("c") == TRIES
