"""Evaluation of the server's model, on whole data sets and by client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedlens.algorithm.pieces.losses import Loss
from fedlens.config.experiment import Experiment
from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import HostCopy, moved
from fedlens.data.places import Counted
from fedlens.engines import Engine
from fedlens.engines.graphs import aside
from fedlens.evaluation.intervals import FEWEST, Interval, bootstrap
from fedlens.evaluation.measures import PARTS, SUCCESS, measure_name
from fedlens.evaluation.metrics import (
    Tally,
    accuracy_by_client,
    chosen,
    from_counts,
    from_logits,
    is_right,
    metrics,
    of_labels,
    spread,
)
from fedlens.rounds import State
from fedlens.setup import Setup
from fedlens.setup.assemble import SUCCESS_ON
from fedlens.setup.data import ClientTests

T = TypeVar("T")

BATCH, PIXELS = 250, 2**21  # maximum images and pixels of a batch: CPU caches hold it
GPU_BATCH, GPU_PIXELS = 4000, 2**23  # on a GPU: fewer kernel launches


class Twin(NamedTuple):
    """The result of the centralised twin of a run (see `twin.py`)."""

    accuracy: float
    cached: bool  # whether it was read from the cache
    by_client: tuple[float, ...] | None = None  # accuracies on clients' tests; NaN without one


class ClientAccuracies(NamedTuple):
    """The accuracy of models on each client's test examples; NaN if a client has none."""

    federated: Tensor  # [K] of the run: a client's own model, if it has one
    fine_tuned: Tensor | None = None  # [K]
    local_only: Tensor | None = None  # [K]
    centralised: Tensor | None = None  # [K] the twin, one model for all clients
    fedavg: Tensor | None = None  # [K] the one model of FedAvg with the same settings
    fedavg_fine_tuned: Tensor | None = None  # [K]
    elsewhere: Tensor | None = None  # [K] clients' own models on the test examples of others
    unseen: Tensor | None = None  # [K] bool: whether a client adapted a model that it never trained


class Details(NamedTuple):
    """An evaluation in detail."""

    part: str | None  # the primary part
    confusion: Tensor | None  # [L, L + 1] true label, prediction; the last column is "no label"
    client_accuracy: Tensor | None  # [K] on each client's test examples
    client_tested: Tensor | None  # [K] number of these examples
    tested: int | None = None  # examples, if they may have several labels
    by_label: dict[str, dict[str, float]] | None = None  # likewise

    def plain(self) -> dict[str, Any]:
        """The fields that are present, ready for JSON."""
        found = {k: v for k, v in self._asdict().items() if v is not None}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in found.items()}


class Measured(NamedTuple):
    """What was measured on a part of the data."""

    tally: Tally
    chosen: dict[str, Tensor]  # from logits: [] each, or [L] of several labels an image


Unread = tuple[dict[str, Measured], Tensor | None]
"""What was measured by part; and for clients' tests, which examples are classified correctly."""


class Answers(NamedTuple):
    """The predictions of a model on a part."""

    tally: Tally
    correct: Tensor  # [N] bool
    logits: Tensor | None  # [N, outputs], with `keep_logits`


def primary_part(experiment: Experiment) -> str:
    """The part by which a run is compared with others: test, else validation, else train."""
    return next(part for part in PARTS if part in experiment.evaluate.on)


class Evaluation:
    """All measures of an experiment's model after a round."""

    def __init__(
        self, setup: Setup, engine: Engine, state: State, tell: Counted = lambda *_: None
    ) -> None:
        """`tell` is called with the number of images tested, over all parts, and the total."""
        self.setup, self.engine, self.state, self.tell = setup, engine, state, tell
        self.metrics = chosen(setup.experiment)
        self._counts: HostCopy | None = None

    def begin(self) -> HostCopy:
        """Start the evaluation; on a GPU, on its own stream beside the work launched next."""
        with aside(self.setup.device):
            self._counts = HostCopy(self._counted())
        return self._counts

    def _counted(self) -> Unread:
        setup, engine, state, tell = self.setup, self.engine, self.state, self.tell
        loss, num_classes = setup.program.algorithm.objective.loss, setup.dataset.num_classes
        reads_logits = any(metric.reads_logits for metric in self.metrics)
        measured, answers = {}, {}
        done, total = 0, sum(map(len, setup.parts.values()))
        for part, examples in setup.parts.items():
            # A recorder may keep this function: it holds no Evaluation, so no model.
            told = lambda count, before=done: tell(before + count, total)  # noqa: E731
            keep = reads_logits or examples.multi_label
            found = answer(engine, state, examples, num_classes, loss, keep, told)
            done += len(examples)
            values = {}
            if found.logits is not None:  # the next evaluation may overwrite them
                labels = examples.wanted(slice(None), num_classes)
                values = from_logits(self.metrics, found.logits, labels)
            measured[part] = Measured(found.tally, values)
            answers[part] = found.correct
        correct, tests = None, setup.client_tests
        if tests is not None and engine.reporting is None:  # a fleet's clients are asked in `read`
            if tests.part == "test" and setup.program.algorithm.personal is None:
                correct = answers["test"]  # `read` selects those of clients
            else:
                correct = correct_answers(setup, engine, state)
        return measured, correct

    def _values(self, tally: Tally, chosen: dict[str, Tensor]) -> dict[str, float]:
        read = {name: float(value.nanmean()) for name, value in chosen.items()}
        return metrics(tally) | from_counts(self.metrics, tally) | read

    def intervals(
        self, times: int, watch: Callable[[dict[str, int]], None] | None = None
    ) -> dict[str, Interval]:
        """Bootstrap intervals: of the primary part over examples, of clients over clients."""
        setup, seed = self.setup, self.setup.experiment.seed
        found: dict[str, Interval] = {}
        with aside(setup.device):  # on the stream where evaluations have their buffers
            if setup.parts:
                part, num_classes = primary_part(setup.experiment), setup.dataset.num_classes
                examples, loss = setup.parts[part], setup.program.algorithm.objective.loss
                _, _, kept = answer(self.engine, self.state, examples, num_classes, loss, True)
                assert kept is not None, "they were to be kept"
                logits, labels = kept.clone(), examples.wanted(slice(None), num_classes)
                losses = loss(logits.unsqueeze(0), examples.labels.unsqueeze(0)).squeeze(0)

                def measured(drawn: Tensor) -> dict[str, float]:
                    drawn = drawn.to(labels.device)
                    some = logits[drawn], labels[drawn]
                    tally = Tally.of(*some, num_classes, losses[drawn])
                    return self._values(tally, from_logits(self.metrics, *some))

                by_example = bootstrap(measured, len(labels), times, seed, watch)
                found |= {measure_name(part, name): ends for name, ends in by_example.items()}
            details = self.read(None)[1]
            if details.client_accuracy is not None and details.client_tested is not None:
                both = torch.stack([details.client_accuracy, details.client_tested.double()])
                both = both[:, ~both[0].isnan()]
                if both.shape[1] >= FEWEST:
                    over = bootstrap(lambda k: spread(*both[:, k]), both.shape[1], times, seed)
                    found |= {f"client_accuracy_{name}": ends for name, ends in over.items()}
        return found

    def read(self, twin: Twin | None) -> tuple[dict[str, float], Details]:
        """The measures, by their names in `measures`, and the details. Waits for the evaluation."""
        measured, correct = (self._counts or self.begin()).read()
        found: dict[str, float] = {}
        for part, (tally, chosen_ones) in measured.items():
            values = self._values(tally, chosen_ones)
            if part == SUCCESS_ON:
                found[SUCCESS] = values["accuracy"]
            else:
                found |= {measure_name(part, key): value for key, value in values.items()}
        primary = primary_part(self.setup.experiment) if measured else None
        if twin is not None:
            assert primary is not None, "a twin is compared on some part: evaluate.on was checked"
            own = found[measure_name(primary, "accuracy")]
            found["relative_accuracy"] = own / twin.accuracy if twin.accuracy else math.nan
        by_client, tested = None, None
        if self.setup.client_tests is not None:
            part, held = self.setup.client_tests
            if correct is None:
                model = self.state.params | self.state.buffers
                by_client = self.engine.client_accuracy(model, self.state.clients.rows)
                assert by_client is not None, "a fleet can ask its clients"
            else:
                if part == "test" and self.setup.program.algorithm.personal is None:
                    correct = correct[held.index]
                by_client = accuracy_by_client(correct, held)
            if self.setup.unseen is not None:  # they adapt the final model: see `alone`
                by_client = by_client.index_fill(0, self.setup.unseen, math.nan)
            tested = held.sizes
            found |= {f"client_accuracy_{key}": v for key, v in spread(by_client, tested).items()}
        if primary is None:
            return found, Details(None, None, by_client, tested)
        tally, chosen_ones = measured[primary]
        if tally.confusion.ndim == 2:
            return found, Details(primary, tally.confusion, by_client, tested)
        about = of_labels(tally, chosen_ones, self.setup.dataset.classes)
        num_tested = int(tally.confusion[0].sum())
        return found, Details(primary, None, by_client, tested, num_tested, about)


def evaluate(
    engine: Engine, state: State, examples: Examples, num_classes: int, loss: Loss
) -> Tally:
    """The tally of the server's model on examples; `metrics` reads it."""
    return answer(engine, state, examples, num_classes, loss).tally


def answer(
    engine: Engine,
    state: State,
    examples: Examples,
    num_classes: int,
    loss: Loss,
    keep_logits: bool = False,
    tell: Callable[[int], None] = lambda _: None,
) -> Answers:
    """The same with the prediction of each example; `tell` is called with the number done."""
    batch = batch_of(engine, examples)
    batches = [slice(start, start + batch) for start in range(0, len(examples), batch)]

    def tally(model: Tree) -> Answers:
        tallies, correct, kept = [], [], []
        for which, logits in zip(batches, engine.predict(model, examples, batches), strict=True):
            labels = examples.wanted(which, num_classes)
            losses = loss(logits.unsqueeze(0), examples.labels[which].unsqueeze(0)).squeeze(0)
            tallies.append(Tally.of(logits, labels, num_classes, losses))
            correct.append(is_right(logits, labels))
            if keep_logits:
                kept.append(logits.detach())
            tell(min(which.stop, len(examples)))
        found = torch.cat(kept) if kept else None
        return Answers(reduce(add, tallies), torch.cat(correct), found)

    key = "evaluate", id(examples), num_classes, loss, keep_logits
    return _recorded(engine, key, tally, state.params | state.buffers)


def correct_answers(setup: Setup, engine: Engine, state: State) -> Tensor:  # [n] bool
    """For each example that clients are tested on, whether it is classified correctly.

    A client with a model of its own is tested with that.
    """
    tests = setup.client_tests
    assert tests is not None, "who asks for it was checked"
    examples, held_out = tested_examples(setup, tests), tests.holdings
    if setup.program.algorithm.personal is None:
        key, model = ("clients", id(examples), id(held_out)), state.params | state.buffers
        return _recorded(engine, key, judge(engine, examples, held_out.index), model)
    rows = [held_out.members(client).to(examples.labels.device) for client in range(len(held_out))]
    own = partial(model_of, setup, state)
    return _right(
        examples, rows, engine.predict_each(own, examples, rows, batch_of(engine, examples))
    )


def _right(examples: Examples, rows: Sequence[Tensor], answers: Iterable[Tensor]) -> Tensor:
    """Which of some examples [n] are classified correctly, by their logits, part by part."""
    found = [torch.zeros(0, dtype=torch.bool, device=examples.labels.device)]
    for some, logits in zip(rows, answers, strict=True):
        found.append(is_right(logits, examples.wanted(some, logits.shape[1])))
    return torch.cat(found)


def model_of(setup: Setup, state: State, client: int) -> Tree:
    """The model that a client is measured by: its own, if it keeps anything of it."""
    algorithm, model = setup.program.algorithm, state.params | state.buffers
    row = None if algorithm.personal is None else state.clients.rows.get(client)
    return model if row is None else algorithm.model_of(model, moved(row, setup.device))


def judge(engine: Engine, examples: Examples, index: Tensor) -> Callable[[Tree], Tensor]:
    """A function that returns which of these examples a model classifies correctly."""
    index = index.to(examples.labels.device)
    batches = [some for some in torch.split(index, batch_of(engine, examples)) if len(some)]

    return lambda model: _right(examples, batches, engine.predict(model, examples, batches))


def tested_by_client(setup: Setup, model: Tree) -> Tensor:  # [K]; NaN without test examples
    """The accuracy of one model on each client's test examples."""
    assert setup.client_tests is not None, "who asks for it was checked"
    examples, held = tested_examples(setup, setup.client_tests), setup.client_tests.holdings
    return accuracy_by_client(judge(setup.engine, examples, held.index)(model).cpu(), held)


def tested_examples(setup: Setup, tests: ClientTests) -> Examples:
    """The examples that the indices in `tests` refer to."""
    return setup.parts["test"] if tests.part == "test" else setup.federation.examples


def _recorded(engine: Engine, key: object, function: Callable[[Tree], T], model: Tree) -> T:
    """`function(model)`, replayed from a capture if the engine has one."""
    recorder = engine.evaluation_recorder
    result = None if recorder is None else recorder(key, function, model)
    return function(model) if result is None else result


def batch_of(engine: Engine, examples: Examples) -> int:
    """How many images are evaluated together."""
    height, width = examples.images.shape[2:]
    workers_on_gpu = any(device.type == "cuda" for device in engine.worker_devices)
    on_gpu = examples.images.is_cuda or workers_on_gpu
    most, pixels = (GPU_BATCH, GPU_PIXELS) if on_gpu else (BATCH, PIXELS)
    return min(max(pixels // (height * width), 1), most)
