"""The loop over rounds: trains runs to their end, records them, and saves checkpoints."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from fedlens.core.trees import HostCopy
from fedlens.engines import Engine
from fedlens.evaluation.evaluate import Evaluation
from fedlens.rounds import RoundInput, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.cohorts import BelowQuorum
from fedlens.runs.active import ActiveRun, sums_of_models
from fedlens.runs.folder import Checkpoint
from fedlens.runs.result import Result
from fedlens.runs.settings import torch_settings
from fedlens.runs.summary import Record, scheduled, who_failed
from fedlens.runs.watching import Watch
from fedlens.setup import Setup
from fedlens.storage.run_files import RunFailed, Unwritable

CHECKPOINT_SECONDS = 10.0  # minimum between two checkpoints: a crash repeats the rounds since
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)  # how a file system refuses to be written to
SAVING_SHARE = 0.03  # of the time at most goes into saving: the clients' memory may be large


def train(setup: Setup, watch: Watch | None = None) -> Result:
    """Run a setup without a run folder and without a twin."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    (result,) = run_to_end([ActiveRun(setup, Checkpoint(state), watch=watch)])
    return result


def run_to_end(runs: Sequence[ActiveRun], keep_states: bool = True) -> list[Result]:
    """Train runs until all are over, on the engine of the first.

    If there are several, their clients train as one cohort: `points.py` selects such runs. Without
    `keep_states` finished runs keep no checkpoint, and cannot be resumed for more rounds.
    """
    unfinished, setup = list(runs), runs[0].setup
    checkpoints = Checkpoints(every_round=setup.engine.reporting is not None)
    started: deque[StartedRound] = deque()
    joined: list[ClientProgram] = []  # the programs that `program` joins
    program: ClientProgram | None = None
    try:
        for run in runs:
            run.announce()
        with torch_settings(setup.experiment, setup.device, setup.threads):
            while unfinished:
                training = [
                    run for run in unfinished if run.has_rounds_to_start and run.order_round()
                ]
                if training:
                    inputs = [run.round_input for run in training]
                    programs = [one.program for one in inputs]
                    if program is None or [*map(id, programs)] != [*map(id, joined)]:
                        like = next(iter(inputs[0].state.params.values()))
                        joined, program = programs, ClientProgram.joint(programs, like)
                    try:
                        started.append(StartedRound(program, setup.engine, training, inputs))
                    except BelowQuorum as error:
                        while started:  # earlier rounds still count
                            started.popleft().finish()
                        training[error.experiment].end_early(error)
                while started and (len(started) > rounds_ahead(setup) or not training):
                    started.popleft().finish()
                    checkpoints.save_if_due(unfinished)
                for run in [run for run in unfinished if run.is_over]:
                    run.finish(keep_states)
                    unfinished.remove(run)
    except BaseException as error:
        setup.engine.close()
        for run in unfinished:
            run.stop(error)
        if isinstance(error, OSError) and error.errno in DENIED and any(r.folder for r in runs):
            # Files were written before, so the command was not a mistake.
            raise Unwritable(f"{error.filename}: {error.strerror}") from error
        if isinstance(error, ValueError) and any(run.folder for run in runs):
            raise RunFailed(str(error)) from error  # an error that no check could find before
        raise
    finally:
        setup.engine.on_step = None  # it refers to a run
        setup.engine.close()
        for run in runs:
            run.close()
    return [run.result for run in runs]


class Checkpoints:
    """Saves the states of runs at intervals, which are longer if saving takes long.

    If clients keep their memory elsewhere (in a fleet), it saves after every round: such a client
    continues from its last accepted update, and drops older memory.
    """

    def __init__(self, every_round: bool = False) -> None:
        self.saved, self.took, self.every_round = time.perf_counter(), 0.0, every_round

    def save_if_due(self, runs: Sequence[ActiveRun]) -> None:
        now, pause = time.perf_counter(), self.took * (1 / SAVING_SHARE - 1)
        if not self.every_round and now - self.saved <= max(CHECKPOINT_SECONDS, pause):
            return
        for run in runs:
            run.save()
        self.saved = time.perf_counter()
        self.took = self.saved - now


def rounds_ahead(setup: Setup) -> int:
    """How many rounds are launched before the last one is read, so that a GPU stays busy."""
    return 1 if setup.device.type == "cuda" else 0


class StartedRound:
    """A round of several runs that was launched; a GPU may still be computing it."""

    def __init__(
        self,
        program: ClientProgram,
        engine: Engine,
        runs: Sequence[ActiveRun],
        inputs: Sequence[RoundInput],
    ) -> None:
        self.start_time, self.runs = time.perf_counter(), list(runs)
        lost = engine.num_lost
        # The progress of a stack is reported through its first run.
        told = partial(runs[0].tell_trained, engine.num_workers)
        engine.on_step = runs[0].tell_step if runs[0].watch is not None else None
        self.results = run_rounds(program, engine, inputs, told)
        self.workers_lost = engine.num_lost - lost
        numbers = []
        for run, (state, outcome) in zip(runs, self.results, strict=True):
            run.newest_state = state
            numbers += [outcome.train_loss, *outcome.scalars.values()]
        sums = sums_of_models([state for state, _ in self.results])
        self.numbers = HostCopy((torch.stack([number.double() for number in numbers]), sums))
        self.evaluations = []
        for run, (state, _) in zip(runs, self.results, strict=True):
            evaluation = Evaluation(run.setup, engine, state, run.tell_tested)
            if self.numbers.is_under_way and run.is_evaluated(state):
                evaluation.begin()  # before the GPU starts the next round
            self.evaluations.append(evaluation)

    def finish(self) -> None:
        """Record the round in all runs that have not ended since it started."""
        measured, sums = self.numbers.read()
        numbers = iter(measured.tolist())
        since = max(self.start_time, *(run.record_time for run in self.runs))
        seconds = time.perf_counter() - since
        ended = zip(
            self.runs, self.results, self.evaluations, sums.isfinite().tolist(), strict=True
        )
        for run, (state, outcome), evaluation, is_finite in ended:
            record: Record = {
                "round": state.round,
                "train_loss": next(numbers),
                "batches": outcome.batches,
                "batches_total": run.num_batches + outcome.batches,
                "examples": outcome.examples,
                "clients": outcome.clients,
                "bytes_up": outcome.bytes_up,
                "bytes_down": outcome.bytes_down,
                **scheduled(run.setup, state.round - 1),
                **{name: next(numbers) for name in outcome.scalars},
                **(
                    who_failed(run.setup, state, outcome.reports) if run.setup.some_may_fail else {}
                ),
                **({"workers_lost": self.workers_lost} if self.workers_lost else {}),
                "seconds": seconds / len(self.runs),
            }
            if run.setup.program.algorithm.covered:
                del record["train_loss"]
            if run.status == "running":
                run.record_round(state, record, is_finite, evaluation)
