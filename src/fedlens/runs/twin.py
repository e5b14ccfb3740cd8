"""The centralised twin of a run: its model, trained by one client that holds all examples.

The twin has the run's model, initial weights, seed, loss, augmentation and local settings, and
the examples of all clients, as clients see them. It is plain training for every algorithm: one
optimiser that is never reset, and no normalisation layers that stay local to clients.

Its budget equals the run's. The clients of all rounds are planned to process a number of examples:
rounds x cohort x the mean that a client processes in a round, where the mean weights each client by
its chance of being drawn. (In asynchronous rounds, the cohort is the number of updates per round.)
The twin makes as many passes over its examples as match that number, rounded, and at least one. A
schedule of local training is stretched over these passes.

Models that clients train without the others: which clients does federated learning help?

Each client trains with the run's local settings on its own examples only: from the initial
weights (`evaluate.local_only`), with as many passes over its examples as the centralised twin makes
over all examples, or from the final model (`evaluate.fine_tune`). Its model is tested on the same
examples as the federated model is for that client. Clients train side by side in one cohort, each
as an experiment of its own, as in a sweep. A run whose clients have models of their own is compared
with clients alone and with FedAvg, as it is and tuned by each client (`evaluate.baselines`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedlens.algorithm.pieces import BySize
from fedlens.config.experiment import Clients, Evaluate, Experiment, Named, Server
from fedlens.config.names import ANNEALS, LOSSES, OPTIMIZERS, SCHEDULES
from fedlens.config.schedules import names_in, value_at
from fedlens.core import Tree, keys
from fedlens.core.federation import Examples, Federation, Fixed, Holdings, Lasting, Pool
from fedlens.core.trees import bytes_of
from fedlens.data.partitions.altered import Altered
from fedlens.data.partitions.dealing import apply_partition
from fedlens.data.places import cache
from fedlens.evaluation.evaluate import (
    ClientAccuracies,
    Twin,
    correct_answers,
    judge,
    model_of,
    primary_part,
    tested_by_client,
    tested_examples,
)
from fedlens.evaluation.measures import measure_name
from fedlens.evaluation.metrics import accuracy_by_client
from fedlens.rounds import RoundInput, State, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.runs.loop import torch_settings, train
from fedlens.runs.progress import Watch, inform
from fedlens.runs.records import Record
from fedlens.setup import Setup, build
from fedlens.setup.data import ClientTests, divided, split_seed
from fedlens.storage.files import write_atomically
from fedlens.storage.run_files import to_json
from fedlens.version import __version__

FEWEST = 64  # minimum number of clients whose plans are drawn together
PLANNED = 1_000_000  # approximate examples in plans drawn together: there may be a million clients
CHUNK = 1024  # images read together
GIVEN_BY_CONTENT = ("dataset", "clients", "engine", "device", "weights", "weights_sha256")


def twin(experiment: Experiment, data: Path | None = None) -> Experiment:
    """The twin as an experiment, which can be run like any other: a round is one pass."""
    return _described(build(replace(experiment, engine="sequential"), data))


def accuracy(experiment: Experiment, data: Path | None = None, watch: Watch | None = None) -> float:
    """The accuracy of an experiment's twin, from the cache if it was trained before."""
    return trained(build(replace(experiment, engine="sequential"), data), watch).accuracy


def trained(setup: Setup, watch: Watch | None = None) -> Twin:
    """The twin of a setup, from the cache if it is there.

    During training, `watch` is called after each pass with its number (`twin`), the number of
    passes (`of`) and the loss (`train_loss`).
    """
    central = plain_training(setup, watch)
    described = replace(central.experiment, dataset=setup.experiment.dataset)
    file = cache() / "twins" / f"{key_of(central, setup.client_tests)}.json"
    measure = measure_name(primary_part(described), "accuracy")
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # else it is trained
        known = json.loads(file.read_bytes())
        own = shares(known["by_client"]) if setup.client_tests is not None else None
        return Twin(float(known["records"][-1][measure]), cached=True, by_client=own)

    def report_pass(record: Record) -> None:
        passes = {"twin": record["round"], "of": described.rounds}
        inform(watch, passes | {"train_loss": record["train_loss"]})

    result = train(central, report_pass)
    if result.status != "finished":
        raise ValueError(
            f"the centralised twin {result.status} in pass {len(result.records)} of "
            f"{described.rounds}: try a smaller local.lr, or set evaluate.twin = false"
        )
    own = None
    if setup.client_tests is not None:
        own = shares(tested_by_client(setup, result.tensors).tolist())
    content = {"experiment": described.plain(), "records": result.records, "by_client": own}
    with contextlib.suppress(OSError):  # without a writable cache it is trained every time
        write_atomically(file, to_json(content, indent=1).encode())
    return Twin(result.final[measure], cached=False, by_client=own)


def shares(values: Sequence[float | None]) -> tuple[float, ...]:
    """Accuracies by client; a client without test examples has NaN (null in a file)."""
    return tuple(math.nan if value is None else float(value) for value in values)


def plain_training(setup: Setup, watch: Watch | None = None) -> Setup:
    """The setup of plain training: the run's model, and one client with all examples."""
    return build(replace(_described(setup, watch), dataset=setup.dataset), beside=setup)


def together(
    pool: Pool,
    *,
    of: str | dict[str, Any],
    count: int | None = None,
    holdout: float = 0.0,
    seed: int = 0,
) -> Altered:
    """One client with all training examples of `count` clients of the partition `of`.

    It sees them as clients do. It has no test example of any client, by `holdout` and the `seed` of
    the split. If clients hold different examples in every round, it has all examples.
    """
    named = Named.of(of, "of")
    examples, pool = pool.examples, pool._replace(num_clients=count or 0)
    held = apply_partition(named.name, named.options, pool)
    if isinstance(held, Altered):
        examples, held = held.examples, held.held
    split = Fixed(held) if isinstance(held, Holdings) else held
    federation = Federation(examples, pool.num_classes, split)
    index = _held(federation)
    if holdout:  # in the clients' order: the twin of one client equals its local model
        everyone = federation.everyone(0)
        trained, tested = divided(everyone, holdout, seed, torch.arange(len(everyone)))
        index = _distinct(trained.index[~torch.isin(trained.index, tested.index)])
    return Altered(examples, Holdings.of([index]))


Schedule = Annotated[Named, SCHEDULES]


def stretched(round: int, of: int, *, schedule: Schedule, rounds: int) -> float:
    """The value of a schedule over `rounds` at the same fraction of the twin's `of` passes."""
    return value_at(schedule, round * rounds // of, rounds)


def _stretched(experiment: Experiment) -> dict[str, Any]:
    """The schedules of local training, stretched over the twin's passes, by name."""
    return {
        key.removeprefix("local."): Named(
            "fedlens.runs.twin:stretched", {"schedule": given, "rounds": experiment.rounds}
        )
        for key, given in experiment.schedules.items()
        if key.startswith("local.")
    }


def _described(setup: Setup, watch: Watch | None = None) -> Experiment:
    experiment = setup.experiment
    clients, asked = experiment.clients, experiment.evaluate
    of = {"name": clients.partition.name, **clients.partition.options}
    of = {name: value for name, value in of.items() if value is not None}
    together_as: dict[str, Any] = {"of": of, "count": clients.count}
    if clients.holdout:
        together_as |= {"holdout": clients.holdout, "seed": split_seed(experiment)}
    passes = max(round(_num_processed(setup, watch) / max(len(_held(setup.federation)), 1)), 1)
    return replace(
        experiment,
        rounds=passes,
        engine="processes" if setup.devices != (setup.device,) else "auto",
        norm="shared" if experiment.norm == "local" else experiment.norm,
        clients=Clients(
            count=1, partition=Named("fedlens.runs.twin:together", together_as), seed=clients.seed
        ),
        local=replace(
            experiment.local,
            epochs=1,
            steps=None,
            max_steps=None,
            reset=False,
            **_stretched(experiment),
        ),
        server=Server(),
        evaluate=Evaluate(every=passes, at=asked.at, on=asked.on, validation=asked.validation),
        stop=None,
        algorithm=(),
        faults=None,
        reporting=None,
        privacy=None,
    )


def _distinct(index: Tensor) -> Tensor:
    """Each index once, in order of first occurrence."""
    _, first = np.unique(index.numpy(), return_index=True)
    return index[torch.from_numpy(np.sort(first))]


def _held(federation: Federation) -> Tensor:
    """The examples that any client holds; all examples if clients hold other ones each round."""
    if not isinstance(federation.split, Lasting):
        return torch.arange(len(federation.examples))
    held = torch.zeros(len(federation.examples), dtype=torch.bool)
    for some in federation.parts(0):
        held[some.index] = True
        if held.all():  # a few thousand of a million clients may hold all examples
            break
    return held.nonzero()[:, 0]


def _num_processed(setup: Setup, watch: Watch | None) -> float:
    """How many examples the clients of all rounds are planned to process.

    A `Watching` also receives the number of clients counted so far.
    """
    experiment, federation = setup.experiment, setup.federation
    root = keys.fold(keys.root(experiment.seed), keys.purpose("twin"))
    algorithm, each = setup.program.algorithm, []
    largest = algorithm.draw.plan_size(int(federation.sizes(0).max()))
    at_once = max(PLANNED // max(largest, 1), FEWEST)
    count = federation.num_clients
    for clients in torch.split(torch.arange(count), at_once):
        if count > at_once:
            inform(watch, {"planned": int(clients[0]), "of": count})
        plan = algorithm.draw(federation.holdings(0, clients), keys.fold(root, clients))
        each.append(plan.counts.sum(1).double())
    processed = torch.cat(each)  # [K]
    by_size = isinstance(algorithm.select, BySize)  # large clients are then drawn more often
    chance = federation.sizes(0).double() if by_size else torch.ones_like(processed)
    mean = float(processed @ chance / chance.sum().clamp(min=1))
    pace = algorithm.pace
    updates = experiment.clients.cohort if pace is None else pace.buffer  # per round
    return experiment.rounds * updates * mean


def key_of(setup: Setup, tests: ClientTests | None, passes: int | None = None) -> str:
    """A hash of everything that the accuracy of a setup depends on, in all and by client.

    `passes` are those of baselines, whose clients are more than one: who holds what counts, too.
    """
    plain = setup.experiment.plain()
    settings = {name: value for name, value in plain.items() if name not in GIVEN_BY_CONTENT}
    network = setup.network
    content = {
        "settings": settings,
        "model": repr(network.module),
        "normalised": [network.mean, network.std, setup.dataset.num_classes],
        "device": setup.devices[0].type,
        "versions": [__version__, torch.__version__],
    }
    digest = hashlib.sha256(to_json(content).encode())
    for code in _code(setup):
        digest.update(code)
    for tree in (network.params, network.buffers, network.frozen):
        for name, tensor in tree.items():
            digest.update(name.encode())
            digest.update(bytes_of(tensor))
    if tests is not None:
        digest.update(bytes_of(tests.holdings.index))
        digest.update(bytes_of(tests.holdings.offsets))
    everyone = setup.federation.everyone(0)
    held = everyone.index
    if passes is not None:
        digest.update(to_json([passes, plain["clients"]]).encode())
        digest.update(bytes_of(everyone.offsets))
    for part in _contents(setup.federation.examples, held):
        digest.update(part)
    for examples in setup.parts.values():
        for part in _contents(examples, torch.arange(len(examples))):
            digest.update(part)
    return digest.hexdigest()[:32]


def _contents(examples: Examples, index: Tensor) -> Iterator[bytes | memoryview]:
    device = examples.labels.device
    yield f"{tuple(examples.images.shape[1:])} {examples.images.dtype}".encode()
    for some in torch.split(index, CHUNK):
        yield bytes_of(examples.read(some.to(device)))
        yield bytes_of(examples.labels[some.to(device)])


def _code(setup: Setup) -> Iterator[bytes]:
    """The source files of model, loss, optimiser and schedules: user code may change."""
    made_of: set[type | Callable[..., Any]] = {type(m) for m in setup.network.module.modules()}
    experiment = setup.experiment
    made_of.add(LOSSES.find(experiment.loss.name))
    made_of.add(OPTIMIZERS.find(experiment.local.optimizer.name))
    if experiment.local.anneal is not None:
        made_of.add(ANNEALS.find(experiment.local.anneal.name))
    for schedule in experiment.schedules.values():
        made_of |= {SCHEDULES.find(name) for name in names_in(schedule)}
    files = set()
    for part in made_of:
        with contextlib.suppress(TypeError, OSError):  # code from a console has no file
            files.add(inspect.getfile(part))
    for file in sorted(files):
        with contextlib.suppress(OSError):
            yield Path(file).read_bytes()


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
