"""A worker process of the engine `processes`: it answers tasks until it is killed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fedlens.core import Memory
from fedlens.engines.engine import Which
from fedlens.engines.gpus import forked
from fedlens.engines.shared_memory import Positions, SharedBuffer
from fedlens.engines.trainer import Done, Sent, Trainer
from fedlens.trees import unstack
from fedlens.work import Work

NOWHERE: Positions = []
NOTHING: Memory = {}


class Begin(NamedTuple):
    """What the following tasks have in common. The worker sends no answer to it."""

    model: Positions
    rest: Memory  # trees of the model that did not fit in shared memory
    work: Work | None = None  # of the whole cohort, without memory
    numbers: Sequence[float] | None = None  # of the program in this round; None: unchanged


class Training(NamedTuple):
    """A task: train some clients of the cohort."""

    rows: slice
    slot: int  # holds the memory of clients, and what they send
    memory: Positions
    rest: Memory  # memory of clients that did not fit


class Predicting(NamedTuple):
    """A task: the logits of some examples."""

    examples: int  # the number of the worker's example set
    which: Which


class Answer(NamedTuple):
    """The answer to a task."""

    result: Any  # `Sent` without its trees, or logits
    trees: Positions = NOWHERE  # where the trees are in the slot
    rest: Memory = NOTHING  # trees that did not fit
    num_bytes: int = 0  # of the slot's input and all trees
    done: Done = Done(None)  # its cost, or its error


@dataclass
class Worker:
    """Created before the fork, so that the worker process has all of this without a copy."""

    trainer: Trainer
    model: SharedBuffer
    slots: Sequence[SharedBuffer]
    _begun: Begin = Begin([], {})

    def serve(self, pipe: Connection) -> None:
        forked()
        self.trainer.configure_process()
        while True:
            try:
                task = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(task, Begin):
                self._begun = task
                self.trainer.begin(merged(self.model.read(task.model), task.rest))
                if self.trainer.program is not None and task.numbers is not None:
                    self.trainer.program = self.trainer.program.with_numbers(task.numbers)
                continue
            try:
                pipe.send_bytes(pickle.dumps(self._answer(task)))
            except ConnectionError:  # the parent was killed, and reads nothing more
                os._exit(0)

    def _answer(self, task: Training | Predicting) -> Answer:
        if isinstance(task, Predicting):
            done = self.trainer.do(partial(self.trainer.predict, *task))
            answer = Answer(done.result)
        else:
            done = self.trainer.do(partial(self._train, task))
            answer = done.result or Answer(None)
        return answer._replace(done=done._replace(result=None))

    def _train(self, task: Training) -> Answer:
        slot, whole = self.slots[task.slot], self._begun.work
        assert whole is not None
        work, memory = whole.rows(task.rows), merged(slot.read(task.memory), task.rest)
        sent = self.trainer.train(replace(work, memory=unstack(memory, len(work))))
        return Answer(sent._replace(trees={}), *slot.write(sent.trees, after=task.memory))


def merged(one: Memory, other: Memory) -> Memory:
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in {**one, **other}}


def sent_by(answer: Answer, slot: SharedBuffer) -> Sent:
    """What a worker sent. Trees that fitted in the slot are views of its memory."""
    sent: Sent = answer.result
    return sent._replace(trees=merged(slot.read(answer.trees), answer.rest))
