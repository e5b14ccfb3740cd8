"""Runs in progress, and the loop over their rounds, which trains them to their end.

A run has its state and its records. It writes a record after each round, and checkpoints now and
then; after the last round also the model, its details and the summary. `Stopping` ends it early by
its records, and says which model was the best.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from fedlens.config.experiment import Experiment
from fedlens.config.names import BY_CLIENT, TRUST
from fedlens.config.protection import protects_examples
from fedlens.core import Tree
from fedlens.core.trees import HostCopy
from fedlens.engines import Engine
from fedlens.engines.graphs import aside
from fedlens.engines.trainer import TorchSettings
from fedlens.evaluation.calibration import calibration
from fedlens.evaluation.evaluate import ClientAccuracies, Details, Evaluation, Twin
from fedlens.evaluation.measures import OF_MODEL, PARTS, measure_name
from fedlens.network.low_rank import merged
from fedlens.privacy.ledger import LimitReached
from fedlens.rounds import RoundInput, State, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.client_memory import REMEMBERED, Room
from fedlens.rounds.cohorts import BelowQuorum
from fedlens.rounds.work import Work
from fedlens.runs.folder import Checkpoint, Mark, Records, RunFolder
from fedlens.runs.progress import Watch, inform
from fedlens.runs.records import CHOSEN_BY, Record, is_number, merit
from fedlens.runs.result import Result, by_name
from fedlens.runs.spending import Spending
from fedlens.runs.summary import (
    final,
    gains,
    personal_measures,
    scheduled,
    stopped_round,
    summary,
    who_failed,
)
from fedlens.setup import Setup
from fedlens.storage import free_memory, run_files
from fedlens.storage.words import count_of

CHECKPOINT_SECONDS = 10.0  # minimum between two checkpoints: a crash repeats the rounds since
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)  # how a file system refuses to be written to
SAVING_SHARE = 0.03  # of the time at most goes into saving: the clients' memory may be large


def train(setup: Setup, watch: Watch | None = None) -> Result:
    """Run a setup without a run folder and without a twin."""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    (result,) = run_to_end([ActiveRun(setup, Checkpoint(state), watch=watch)])
    return result


def room_of_clients() -> int:
    """How many bytes of what clients remember a run keeps in memory, a GPU's not counted."""
    return int(REMEMBERED * free_memory.available())


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
            raise run_files.Unwritable(f"{error.filename}: {error.strerror}") from error
        if isinstance(error, ValueError) and any(run.folder for run in runs):
            raise run_files.RunFailed(
                str(error)
            ) from error  # an error that no check could find before
        raise
    finally:
        setup.engine.on_step = None  # it refers to a run
        setup.engine.close()
        for run in runs:
            run.close()
    return [run.result for run in runs]


FEW_CLIENTS = 20  # up to this many, the records have the accuracy of each
TOLD_SECONDS = 1.0  # minimum between two progress reports within a round


class Whole(NamedTuple):
    """A run after its last complete round: one value, so that an interrupt cannot split it."""

    state: State
    mark: Mark | None  # the end of the records in their file, if there is one
    best: Tree | None  # the best model so far, if it is kept


class ActiveRun:
    """A run in progress: its state, its records so far, and the folder that they are written to."""

    def __init__(
        self,
        setup: Setup,
        saved: Checkpoint,
        folder: RunFolder | None = None,
        *,
        twin: Twin | None = None,
        watch: Watch | None = None,
        by_client: Callable[..., ClientAccuracies | None] | None = None,
    ) -> None:
        self.setup, self.folder, self.records = setup, folder, list(saved.records)
        self.watch, self.twin, self.by_client = watch, twin, by_client
        self.room = Room()
        if folder is not None:
            self.room = Room(host=room_of_clients(), store=folder.store_client)
        self.newest_state = state = saved.state  # after all started rounds, even unfinished ones
        self.file = Records(folder, saved.content) if folder else None
        self._whole = Whole(state, self.file.mark if self.file else None, saved.best)
        diverged = not math.isfinite(float(sums_of_models([state]))) or _has_diverged(self.records)
        self.status = "diverged" if diverged else "running"
        self.reason = ""  # why it stopped early, if it did
        self.details: dict[str, Any] = {}  # of the final model
        self.client_accuracy: dict[str, float] = {}  # of the final model
        self.closer: dict[str, Any] = {}  # further entries of the summary, of the final model
        self.start_time = self.record_time = self.told_time = time.perf_counter()
        self.client_time = self.start_time  # when the client that trains began
        self.num_earlier_records = len(self.records)
        self.earlier_summary = folder.summary(len(self.records)) if folder else {}
        spent = sum(r["seconds"] + r.get("evaluation_seconds", 0.0) for r in self.records)
        earlier = self.earlier_summary
        self.earlier_seconds = earlier["seconds"]["total"] if earlier else spent
        self.last_round = setup.experiment.rounds  # or fewer, by the limit of a ledger
        self.spending = None if setup.experiment.privacy is None else Spending(setup)
        if self.spending is not None:
            self.spending.resume(len(self.records))
        self.stopping = Stopping(setup.experiment)
        # The time of an interrupted run is ignored here: if stop.seconds has passed, the run stops
        # after its next round, which is then evaluated.
        seconds = self.earlier_seconds if earlier.get("status") in run_files.OVER else 0.0
        for record in self.records:
            self.stopping.spend(record, seconds)
            self.stopping.judge(record)
        self._end_if_told()

    def _end_if_told(self) -> None:
        """Finish the run if a stopping rule of the experiment holds."""
        if self.stopping.reason and self.status == "running":
            self.status, self.reason = "finished", self.stopping.reason

    @property
    def state(self) -> State:
        """The state after the last complete round."""
        return self._whole.state

    @property
    def is_over(self) -> bool:
        return self.status != "running" or self.state.round >= self.last_round

    @property
    def has_rounds_to_start(self) -> bool:
        return not self.is_over and self.newest_state.round < self.last_round

    @property
    def num_batches(self) -> int:
        """Batches of the client with the most batches in each round, summed over rounds."""
        return int(self.records[-1]["batches_total"]) if self.records else 0

    @property
    def round_input(self) -> RoundInput:
        setup = self.setup
        return RoundInput(
            setup.program_of(self.newest_state.round),
            setup.federation,
            self.newest_state,
            setup.drawn_by,
            setup.clock,
            # Whose turns these are is known in advance: what examples cost depends on it.
            setup.experiment.seed if protects_examples(setup.experiment) else None,
            self.room,
        )

    def is_evaluated(self, state: State) -> bool:
        return self.setup.experiment.evaluate.is_due(state.round, self.last_round)

    def order_round(self) -> bool:
        """Whether the next round may run; what it releases is then in the ledger, if it has one."""
        if self.spending is None:
            return True
        round = self.newest_state.round
        try:
            self.reason = self.spending.order(round)
            self.last_round = round + 1 if self.reason else self.last_round
        except LimitReached as error:  # another run has spent what was left
            self.reason, self.last_round = str(error), round
        return round < self.last_round

    def record_round(
        self, state: State, record: Record, is_finite: bool, evaluation: Evaluation
    ) -> None:
        """End a round: evaluate the model if an evaluation is due, and write the record."""
        experiment, trained = self.setup.experiment, time.perf_counter()
        best = self._whole.best
        if self.spending is not None:
            self.spending.count(state.round - 1)
        self.stopping.spend(record, self.earlier_seconds + trained - self.start_time)
        if not is_finite or _has_diverged([record]):
            self.status = "diverged"
        elif self.is_evaluated(state) or self.stopping.reason:
            measured, details = evaluation.read(self.twin)
            record |= measured
            if self.spending is not None:
                record["epsilon"] = self.spending.epsilon()
            shares = details.plain().get(BY_CLIENT, ())
            if 0 < len(shares) <= FEW_CLIENTS:
                record[BY_CLIENT] = [x if math.isfinite(x) else None for x in shares]
            if self.stopping.judge(record) and experiment.evaluate.best:
                best = self._tensors_of(state)
            self._end_if_told()
            if self.status == "finished" or state.round == self.last_round:
                self._write_details(details)
            record["evaluation_seconds"] = time.perf_counter() - trained
        if self.file is not None:
            self.file.append(record)
        self.records.append(record)
        self._whole = Whole(state, self.file.mark if self.file else None, best)
        inform(self.watch, record)
        self.record_time = self.told_time = time.perf_counter()

    def tell_trained(self, num_workers: int, done: int, work: Work) -> None:
        """Report at intervals how many clients of a round have trained, and the share of images.

        Workers may be further than is known here, so the share is reported only after two clients
        per worker.
        """
        if not self._is_time_to_tell():
            return
        record: Record = {"trained": done, "of": len(work)}
        if len(work.cohort_sizes) == 1 and done >= 2 * num_workers:
            images = work.plan.counts.sum(1)
            record["share"] = float(images[:done].sum() / images.sum().clamp(min=1))
        inform(self.watch, record)

    def tell_step(self, work: Work, client: int, taken: int) -> None:
        """How many steps the client that trains has taken, now and then, of how many."""
        now = time.perf_counter()
        if taken == 1:
            self.client_time = now
        # Of clients that are soon done, their number says more.
        if now - self.client_time < TOLD_SECONDS or not self._is_time_to_tell():
            return
        steps, images = int(work.plan.steps[client]), work.plan.counts.sum(1)
        record: Record = {"stepped": taken, "of": steps}
        if len(work.cohort_sizes) == 1:
            done = images[:client].sum() + images[client] * taken / steps
            record["share"] = float(done / images.sum().clamp(min=1))
        inform(self.watch, record)

    def tell_tested(self, done: int, total: int) -> None:
        """Report at intervals how many images of a round's evaluation are done."""
        if self._is_time_to_tell():
            inform(self.watch, {"tested": done, "of": total})

    def _is_time_to_tell(self) -> bool:
        now = time.perf_counter()
        is_time = now - self.told_time >= TOLD_SECONDS
        self.told_time = now if is_time else self.told_time
        return is_time

    def finish(self, keep_state: bool = True) -> None:
        """Write the model, the summary and, with `keep_state`, the last checkpoint."""
        status = "finished" if self.status == "running" else self.status
        if status == "finished" and unsound_losses(self.records):
            status = "invalid"
        self.status = status
        if keep_state and self.has_news(status):  # otherwise it is already saved
            self.save()
        elif self.file is not None:
            self.file.sync()
        if self.folder is not None:
            self.closer["sha256"] = self.folder.save_model(merged(self.tensors), self._best_model)
        if status == "finished" and self.has_news(status):
            self._look_closer()
        self.write_summary(status)
        if self.folder is not None and not keep_state:
            self.folder.remove_states()

    def _write_details(self, details: Details) -> None:
        names = self.setup.federation.described().names
        self.details = details.plain()
        self.client_accuracy = by_name(self.details.get(BY_CLIENT), names)
        if self.folder is not None:
            self.folder.write(run_files.EVALUATION, run_files.to_json(self.details) + "\n")

    def _look_closer(self) -> None:
        """Compute what the final model alone gets: intervals, and a comparison by client."""
        setup, asked = self.setup, self.setup.experiment.evaluate
        ended = len(self.records) == self.num_earlier_records  # resumed after its last round
        if ended and setup.engine.reporting is None:
            self._write_details(Evaluation(setup, setup.engine, self.state).read(self.twin)[1])
        if self.folder is not None and self.details:
            models = {run_files.MODEL: self.tensors, run_files.BEST: self._whole.best}
            with aside(setup.device):  # on the stream where evaluations have their buffers
                self.details["calibration"] = {
                    file: about._asdict()
                    for file, model in models.items()
                    if model is not None and (about := calibration(setup, setup.engine, model))
                }
            self.folder.write(run_files.EVALUATION, run_files.to_json(self.details) + "\n")
        if times := asked.bootstrap:
            again = Evaluation(setup, setup.engine, self.state)
            self.closer["intervals"] = again.intervals(times, self.watch)
        by_client = self.by_client if setup.client_tests else None
        if by_client and (found := by_client(setup, self.state, self.twin, self.watch)):
            self.closer |= gains(found, setup.experiment.seed)
            if setup.is_personal or found.unseen is not None:
                self.closer["final"] = final(self.records) | personal_measures(found)
            if self.folder is not None:
                known = {k: v.tolist() for k, v in found._asdict().items() if v is not None}
                self.folder.write(run_files.CLIENTS, run_files.to_json(known) + "\n")

    def end_early(self, error: BelowQuorum) -> None:
        """Stop the run because too few clients reported, as the experiment demands."""
        if self.status != "running":  # a round that finished meanwhile has ended the run
            return
        self.status, self.reason = "stopped", str(error)
        self.closer["stopped_round"] = stopped_round(self.state.round + 1, error.reports)

    def save(self) -> None:
        """Write the checkpoint after the records that it depends on are on disk."""
        state, mark, best = self._whole
        if self.folder is not None and self.file is not None and mark is not None:
            self.file.sync()
            self.folder.save_state(state, mark, best)

    def stop(self, error: BaseException) -> None:
        """Save the last complete round, and discard the records of the round in progress."""
        del self.records[self.state.round :]
        # If saving fails (the disk may be full), the checkpoint before it is still there.
        with contextlib.suppress(OSError):
            self.save()
        with contextlib.suppress(OSError):
            self.write_summary("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def close(self) -> None:
        """Release the lock of the run folder."""
        if self.folder is not None:
            self.folder.close()

    def has_news(self, status: str) -> bool:
        """Whether the records or the status have changed since the run was resumed."""
        is_new = len(self.records) > self.num_earlier_records or "stopped_round" in self.closer
        return is_new or status != self.earlier_summary.get("status")

    def announce(self) -> None:
        """Write the status "running", unless the run has ended and its summary says so."""
        if not self.is_over or self.earlier_summary.get("status") not in run_files.OVER:
            self.write_summary("running")

    def write_summary(self, status: str) -> None:
        self.summary = self.earlier_summary
        if self.has_news(status):
            elapsed = self.earlier_seconds + time.perf_counter() - self.start_time
            stopped = self.closer.get("stopped_round")
            self.summary = summary(self.setup, status, self.records, elapsed, self.twin, stopped)
            self.summary |= {"reason": self.reason} if self.reason else {}
            self.summary |= {"privacy": self.spending.summary()} if self.spending else {}
            self.summary |= self.closer
        if self.folder is not None:
            self.folder.write_json(run_files.SUMMARY, self.summary)

    @property
    def tensors(self) -> Tree:
        """Those of the model, by the names that they have in training."""
        return self._tensors_of(self.state)

    def _tensors_of(self, state: State) -> Tree:
        return state.params | state.buffers | self.setup.network.frozen

    @property
    def _best_model(self) -> Tree | None:
        return None if self._whole.best is None else merged(self._whole.best)

    @property
    def result(self) -> Result:
        return Result(
            self.status,
            self.records,
            self.summary,
            self.tensors,
            self.folder.path if self.folder else None,
            self._best_model,
            self.client_accuracy,
        )


def unsound_losses(records: list[Record]) -> list[str]:
    """The losses of the last evaluation that are not finite, or at least `LARGEST_LOSS`."""
    last = next((one for one in reversed(records) if OF_MODEL.keys() & one.keys()), {})
    losses = {name: last.get(name, 0.0) for name in (measure_name(p, "loss") for p in PARTS)}
    return [
        name
        for name, loss in losses.items()
        if not is_number(loss) or loss >= run_files.LARGEST_LOSS
    ]


def _has_diverged(records: list[Record]) -> bool:
    """Whether the last training loss is not finite (None, if read from a file)."""
    last = records[-1] if records else {}
    return bool(last.get("clients")) and not is_number(last.get("train_loss", 0.0))


def sums_of_models(states: Sequence[State]) -> torch.Tensor:  # [G]
    """A number for each of G states with models of equal structure: finite if the model is.

    It sums absolute values: norms of many tensors need few kernel launches, and plain sums one
    per tensor.
    """
    sums = torch._foreach_norm(
        [
            tensor
            for state in states
            for tensor in (*state.params.values(), *state.buffers.values())
            if tensor.is_floating_point()
        ],
        1,
    )
    return torch.stack(sums).view(len(states), -1).double().sum(1)


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
            numbers += [] if outcome.trust is None else [outcome.trust]
        sums = sums_of_models([state for state, _ in self.results])
        self.numbers = HostCopy((torch.cat([number.double().view(-1) for number in numbers]), sums))
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
                    {TRUST: [*islice(numbers, len(outcome.trust))]}
                    if outcome.trust is not None
                    else {}
                ),
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


@dataclass
class Stopping:
    """Applies an experiment's stopping rules to records; the first that holds gives `reason`."""

    experiment: Experiment
    reason: str = ""  # for stopping, once a rule holds
    best: tuple[float, float] | None = None  # its merit
    best_round: int = 0
    num_since: int = 0  # evaluations since the best
    num_bytes: int = 0

    def spend(self, record: Mapping[str, Any], seconds: float) -> None:
        """Add the cost of a round; `seconds` is the time of the whole run so far."""
        stop = self.experiment.stop
        self.num_bytes += record["bytes_up"] + record["bytes_down"]
        if stop is None or self.reason:
            return
        spent = {
            "batches": (record["batches_total"], stop.batches),
            "bytes": (self.num_bytes, stop.bytes),
            "seconds": (seconds, stop.seconds),
        }
        for what, (amount, most) in spent.items():
            if most is not None and amount >= most:
                self.reason = f"stop.{what}: {_short(amount)} of {_short(most)} {what} are spent"
                return

    def judge(self, record: Mapping[str, Any]) -> bool:
        """Add a record's evaluation, if it has one; return whether its model is the best so far."""
        stop, found = self.experiment.stop, merit(record)
        is_best = found is not None and (self.best is None or found > self.best)
        if is_best:
            self.best, self.best_round, self.num_since = found, record["round"], 0
        elif CHOSEN_BY in record:
            self.num_since += 1
        if stop is None or self.reason:
            return is_best
        part = "validation" if CHOSEN_BY in record else "test"
        reached = record.get(measure_name(part, "accuracy"))
        if stop.accuracy is not None and is_number(reached) and reached >= stop.accuracy:
            self.reason = f"stop.accuracy: the {part} accuracy is {reached:.4g}"
        elif stop.patience is not None and self.num_since >= stop.patience:
            self.reason = (
                f"stop.patience: the validation accuracy was best in round {self.best_round}, "
                f"{count_of(self.num_since, 'evaluation')} ago"
            )
        return is_best


def _short(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"


@contextlib.contextmanager
def torch_settings(
    experiment: Experiment, device: torch.device, num_threads: int = 1
) -> Iterator[None]:
    """Set precision, threads and determinism for an experiment, and restore them afterwards."""
    before, threads = TorchSettings.here(), torch.get_num_threads()
    now = before._replace(
        matmul="high" if experiment.precision == "tf32" else "highest",
        tf32=experiment.precision == "tf32",
    )
    if experiment.deterministic:
        now = now._replace(deterministic=True, workspace=before.workspace or ":4096:8")
    try:
        # Beside a GPU, the CPU has only small operations: waking threads costs more than the work.
        torch.set_num_threads(1 if device.type == "cuda" else num_threads)
        now.apply()
        yield
    finally:
        torch.set_num_threads(threads)
        before.apply()
