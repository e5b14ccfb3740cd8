"""Models that clients train without the others: which clients does federated learning help?

Each client trains with the run's local settings on its own examples only: from the initial
weights (`evaluate.local_only`), with as many passes over its examples as the centralised twin makes
over all examples, or from the final model (`evaluate.fine_tune`). Its model is tested on the same
examples as the federated model is for that client. Clients train side by side in one cohort, each
as an experiment of its own, as in a sweep. A run whose clients have models of their own is compared
with clients alone and with FedAvg, as it is and tuned by each client (`evaluate.baselines`).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedlens.config.experiment import Evaluate
from fedlens.core import Tree
from fedlens.core.federation import Fixed
from fedlens.data.places import cache
from fedlens.evaluation.evaluate import (
    ClientAccuracies,
    Twin,
    correct_answers,
    judge,
    model_of,
    tested_by_client,
    tested_examples,
)
from fedlens.evaluation.metrics import accuracy_by_client
from fedlens.rounds import RoundInput, State, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.runs.loop import torch_settings, train
from fedlens.runs.progress import Watch, inform
from fedlens.runs.records import Record
from fedlens.runs.twin import key_of, plain_training, shares
from fedlens.setup import Setup, build
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import to_json

AT_ONCE = 64  # clients whose models are in memory together
PASSES = 5  # of each client that tunes FedAvg's model, if the run names no other number
ELSEWHERE = 2000  # examples at most on which the models of others are tested
BASELINES = ("fedavg", "fedavg_fine_tuned", "local_only")

logger = logging.getLogger(__name__)


def check_clients_are_tested(setup: Setup) -> None:
    evaluate, clients = setup.experiment.evaluate, setup.experiment.clients
    asked = {
        "evaluate.fine_tune": evaluate.fine_tune,
        "evaluate.local_only": evaluate.local_only,
        "clients.unseen": clients.unseen,
    }
    if setup.client_tests is None and any(asked.values()):
        remedy = "set clients.holdout, say to 0.2"
        if not isinstance(setup.federation.split, Fixed):  # such a split refuses a holdout
            partition = clients.partition.name
            remedy = f"choose another partition than {partition!r}, and set clients.holdout"
        key = next(key for key in asked if asked[key])
        raise ValueError(
            f"{key} compares models on what each client is tested on, which is nothing: {remedy}"
        )


def by_client(
    setup: Setup, final: State, twin: Twin | None, watch: Watch | None
) -> ClientAccuracies | None:
    """The accuracies by client that the experiment asks for, given the final state, if any.

    During training, `watch` is called after each pass with its number (`tuned` or `alone`), or each
    round of FedAvg (`baseline`), and the number of these (`of`).
    """
    experiment, evaluate = setup.experiment, setup.experiment.evaluate
    own, new = setup.program.algorithm.personal, setup.unseen
    compares = setup.is_personal and evaluate.baselines and experiment.privacy is None
    tune = own.tune if own is not None else 0
    trains = bool(evaluate.fine_tune or evaluate.local_only or tune)
    is_fleet = setup.engine.reporting is not None  # its server has no examples
    if is_fleet or not (trains or compares or new is not None or twin is not None):
        return None
    passes = tune or evaluate.fine_tune or PASSES
    models = partial(model_of, setup, final)
    tests = setup.client_tests
    assert tests is not None, "who asks for it was checked"
    right = correct_answers(setup, setup.engine, final).cpu()
    found = ClientAccuracies(accuracy_by_client(right, tests.holdings))
    if twin is not None and twin.by_client is not None:
        found = found._replace(centralised=torch.tensor(twin.by_client, dtype=torch.float64))
    if compares:
        found = found._replace(**_baselines(setup, final.round, passes, watch))
        held = tests.holdings.sizes
        forgot = [torch.nan if tune else _elsewhere(setup, k, models(k)) for k in range(len(held))]
        found = found._replace(elsewhere=torch.tensor(forgot, dtype=torch.float64))
    if not trains and new is None:
        return found
    with training_alone(setup, watch) as alone:
        if tune or new is not None:
            which = None if tune else new
            tuned = alone.accuracy(models, alone.last(passes), "tuned", which, found.elsewhere)
            found = found._replace(federated=torch.where(tuned.isnan(), found[0], tuned))
        if new is not None:
            is_new = torch.isin(torch.arange(len(tests.holdings)), new)
            found = found._replace(unseen=is_new)
        if count := evaluate.fine_tune:
            found = found._replace(fine_tuned=alone.accuracy(models, alone.last(count), "tuned"))
        if evaluate.local_only and not compares:
            found = found._replace(local_only=alone.accuracy(None, alone.passes, "alone"))
    return found


def _baselines(setup: Setup, rounds: int, passes: int, watch: Watch | None) -> dict[str, Any]:
    """FedAvg with the run's settings, tuned by each client, and clients alone.

    They depend on nothing that the algorithm changes, and are kept for the next run like twins.
    """
    experiment, asked = setup.experiment, setup.experiment.evaluate
    evaluate = Evaluate(every=rounds, on=asked.on, validation=asked.validation)
    described = replace(
        experiment, dataset=setup.dataset, rounds=rounds, algorithm=(), stop=None, evaluate=evaluate
    )
    base = build(described, beside=setup)

    file = cache() / "baselines" / f"{key_of(base, setup.client_tests, passes)}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        known = json.loads(file.read_bytes())
        return {name: torch.tensor(shares(known[name])).double() for name in BASELINES}

    def tell_round(record: Record) -> None:
        inform(watch, {"baseline": record["round"], "of": rounds})

    result = train(base, tell_round)
    if result.status != "finished":
        logger.warning("FedAvg %s with these settings: there is nothing to compare", result.status)
        return {}
    model = {name: t for name, t in result.tensors.items() if name not in setup.network.frozen}
    with training_alone(setup, watch, base) as alone:
        found = {
            "fedavg": tested_by_client(setup, model),
            "fedavg_fine_tuned": alone.accuracy(lambda _: model, alone.last(passes), "tuned"),
            "local_only": alone.accuracy(None, alone.passes, "alone"),
        }
    with contextlib.suppress(OSError):
        content = {name: t.tolist() for name, t in found.items()}
        write_atomically(file, to_json(content).encode())
    return found


def tuned_model(setup: Setup, model: Tree, client: int) -> Tree:
    """The model that a client tunes at the end of a run, from the one that it then has."""
    own = setup.program.algorithm.personal
    if own is None or not own.tune:
        return model
    with training_alone(setup) as alone:
        ((_, tuned),) = alone.models(torch.tensor([client]), lambda _: model, alone.last(own.tune))
    return tuned


def _tested(setup: Setup, index: Tensor, model: Tree) -> float:
    """The accuracy of a model on these of the clients' test examples; NaN if there are none."""
    assert setup.client_tests is not None, "who asks for it was checked"
    examples = tested_examples(setup, setup.client_tests)
    return float(judge(setup.engine, examples, index)(model).double().mean())


def _elsewhere(setup: Setup, client: int, model: Tree) -> float:
    """The accuracy of a client's model on the test examples of all others, or on some."""
    assert setup.client_tests is not None, "who asks for it was checked"
    held = setup.client_tests.holdings
    order = torch.randperm(len(held.index), generator=torch.Generator().manual_seed(0))[:ELSEWHERE]
    first, end = held.offsets[client], held.offsets[client + 1]
    return _tested(setup, held.index[order[(order < first) | (order >= end)]], model)


@contextlib.contextmanager
def training_alone(
    setup: Setup, watch: Watch | None = None, like: Setup | None = None
) -> Iterator[Alone]:
    """The clients of a run, for training by themselves with the settings of it, or of another."""
    plain = plain_training(like or setup)
    with (
        torch_settings(plain.experiment, plain.device, plain.threads),
        contextlib.closing(plain.engine),
    ):
        yield Alone(setup, plain, watch)


@dataclass(frozen=True)
class Alone:
    """Clients that train by themselves: side by side, each as an experiment of its own."""

    setup: Setup  # of their run
    plain: Setup  # of their training
    watch: Watch | None

    @property
    def passes(self) -> list[ClientProgram]:
        """As many passes as the centralised twin makes."""
        return [self.plain.program_of(number) for number in range(self.plain.experiment.rounds)]

    def last(self, count: int) -> list[ClientProgram]:
        """Passes with the last values of schedules, which continue the run."""
        return [self.plain.program_of(self.plain.experiment.rounds - 1)] * count

    def accuracy(
        self,
        starts: Callable[[int], Tree] | None,
        passes: list[ClientProgram],
        told_as: str,
        some: Tensor | None = None,
        elsewhere: Tensor | None = None,
    ) -> Tensor:  # [K]
        """Accuracy by client after `passes`, each from its own start or from the initial model.

        It is NaN for others than `some` clients, if these are given. In `elsewhere` [K], the
        accuracy on the others' examples is replaced by that of these models.
        """
        setup = self.setup
        assert setup.client_tests is not None, "who asks for it was checked"
        held, tested = setup.federation.everyone(0), setup.client_tests.holdings
        found = torch.full((len(held),), torch.nan, dtype=torch.float64)
        able = torch.nonzero((held.sizes > 0) & (tested.sizes > 0))[:, 0]
        able = able if some is None else able[torch.isin(able, some)]
        for client, model in self.models(able, starts, passes, told_as):
            found[client] = _tested(setup, tested.members(client), model)
            if elsewhere is not None:
                elsewhere[client] = _elsewhere(setup, client, model)
        return found

    def models(
        self,
        clients: Tensor,
        starts: Callable[[int], Tree] | None,
        passes: list[ClientProgram],
        told_as: str = "tuned",
    ) -> Iterator[tuple[int, Tree]]:
        """Each of these clients and its model after `passes` on its own."""
        plain, federation = self.plain, self.setup.federation
        held, seed = federation.everyone(0), plain.experiment.seed
        done, total = 0, len(passes) * -(-len(clients) // AT_ONCE)
        for some in torch.split(clients, AT_ONCE):
            each = [
                replace(federation, split=Fixed(held.take(one))) for one in torch.split(some, 1)
            ]
            states = [begin(plain.network, plain.program, one, plain.device) for one in each]
            if starts is not None:
                states = [_from(s, starts(k)) for s, k in zip(states, some.tolist(), strict=True)]
            for program in passes:
                inputs = [
                    RoundInput(program, one, state, seed)
                    for one, state in zip(each, states, strict=True)
                ]
                like = next(iter(states[0].params.values()))
                joint = ClientProgram.joint([program] * len(inputs), like)
                states = [state for state, _ in run_rounds(joint, plain.engine, inputs)]
                done += 1
                inform(self.watch, {told_as: done, "of": total})
            for state, client in zip(states, some.tolist(), strict=True):
                yield client, state.params | state.buffers


def _from(state: State, model: Tree) -> State:
    params, buffers = ({name: model[name] for name in t} for t in (state.params, state.buffers))
    return replace(state, params=params, buffers=buffers)
