"""One round from start to end, and all that a run remembers between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedlens.algorithm.channel import begin as begin_channel
from fedlens.algorithm.channel import decode, told_of
from fedlens.algorithm.secure import SecureSum
from fedlens.algorithm.slots import Received
from fedlens.config.names import TRUST, refuse_taken
from fedlens.core import Cohort, Facts, Gathered, Memory, Tree, keys, tree_map
from fedlens.core.federation import Federation
from fedlens.core.trees import copies, copy_tensors, moved, stack
from fedlens.network.network import Network
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.client_memory import ClientMemory, Room
from fedlens.rounds.cohorts import Asked, BelowQuorum, Call, Gathering, Reports, ask, gathering
from fedlens.rounds.download import DIFFERENCE, bytes_saved, held, sent_next
from fedlens.rounds.engine import Engine, Unreported
from fedlens.rounds.reports import Clock, Reporting
from fedlens.rounds.traffic import bytes_sent, num_bytes, sum_of_bytes
from fedlens.rounds.uploads import MEASURED, NORM, PEAK, Uploads
from fedlens.rounds.work import Part, Shared, Work, exact_model

COMBINE, COUNTS = keys.purpose("combine"), keys.purpose("label counts")
_PARTS = ("params", "buffers", "told")  # the parts of what clients are sent


@dataclass(frozen=True)
class State:
    """All that a run remembers between rounds, and all that a checkpoint holds."""

    round: int
    params: Tree
    buffers: Tree
    server: Memory  # [1, ...] what `advance` remembers
    told: Memory  # what the server sends besides the model
    clients: ClientMemory
    combining: Memory = field(default_factory=dict)  # what `combine` and the channel remember
    download: dict[str, Any] = field(default_factory=dict)  # see `download`
    time: float = 0.0  # of the virtual clock, if there is one
    in_training: Tree = field(default_factory=dict)  # [M] each: see `cohorts`
    versions: Mapping[int, Any] = field(default_factory=dict)
    """What these clients were sent when they started, the model included, by round."""


class Outcome(NamedTuple):
    """What a round did, for the record."""

    train_loss: Tensor  # of local training, the mean over examples; NaN, if it is private
    batches: int  # of the client that took the most
    examples: int  # processed by all clients together
    clients: Sequence[int]  # that took part; a client that was drawn twice is listed twice
    bytes_up: int
    bytes_down: int
    scalars: Mapping[str, Tensor]  # what the algorithm measured
    reports: Reports  # which clients reported, and why others that were asked did not
    trust: Tensor | None = None  # [C] how much each counts, if `combine` finds this out


def begin(
    network: Network, program: ClientProgram, federation: Federation, device: torch.device
) -> State:
    params = {name: p.to(device) for name, p in network.params.items()}
    buffers = {name: b.to(device) for name, b in network.buffers.items()}
    server = program.algorithm.advance.init({n: p.double()[None] for n, p in params.items()})
    told: Memory = {}
    for tell in program.algorithm.tell:
        told |= tell.init(params, federation)
    channel = program.algorithm.channel
    kept = begin_channel(channel, params)
    told |= told_of(channel, kept)
    combining = program.algorithm.combine.init(params)
    combining |= {name: tree for name, tree in kept.items() if name not in told}
    return State(0, params, buffers, server, told, ClientMemory(), combining=combining)


@dataclass(frozen=True)
class RoundInput:
    """What one experiment needs for a round: its program, federation, state, seed and clock."""

    program: ClientProgram
    federation: Federation
    state: State
    seed: int
    clock: Clock | None = None
    chosen_by: int | None = None  # the seed by which clients are selected, if it is another one
    room: Room = Room()  # for what clients remember

    def call(self, elsewhere: Reporting | None) -> Call:
        state = self.state
        return Call(
            algorithm=self.program.algorithm,
            federation=self.federation,
            seed=self.seed,
            round=state.round,
            clock=self.clock,
            time=state.time,
            in_training=state.in_training,
            elsewhere=elsewhere,
            chosen_by=self.chosen_by,
        )


def run_round(
    program: ClientProgram,
    federation: Federation,
    engine: Engine,
    state: State,
    seed: int,
    clock: Clock | None = None,
) -> tuple[State, Outcome]:
    """Run one round. `state` is not modified."""
    (after,) = run_rounds(program, engine, [RoundInput(program, federation, state, seed, clock)])
    return after


def run_rounds(
    program: ClientProgram,
    engine: Engine,
    experiments: Sequence[RoundInput],
    on_uploads: Callable[[int, Work], None] = lambda *_: None,
) -> list[tuple[State, Outcome]]:
    """Run a round of each of G experiments; the engine trains their clients as one cohort.

    `program` is their programs as one, see `ClientProgram.joint`. `on_uploads` is called whenever
    uploads arrive, with the number of clients so far and with the work of all. Invalid updates are
    found when all clients have trained: then these train again without the clients that sent them,
    which gives the same updates of the others, and the shares that are right without those clients.
    """
    gathered = _gatherings(experiments, engine.reporting)
    reports = [_named(g, one.reports) for g, one in enumerate(gathered)]
    while True:
        models = [_models(*each) for each in zip(experiments, reports, strict=True)]
        works = [_work(*each) for each in zip(experiments, reports, models, strict=True)]
        shared, exact = _shared(experiments, models)
        if engine.reporting is not None:  # clients elsewhere, each with what it has
            shared = shared._replace(difference=experiments[0].state.download.get(DIFFERENCE, {}))
        uploads = [Uploads() for _ in experiments]
        work, done = Work.joint(works), 0
        try:
            for part in engine.map(program, shared, work) if len(work) else ():
                uploads[part.group].add(part)
                done += part.num_clients
                on_uploads(done, work)
            wholes = [one.whole() for one in uploads]
            rejected = [_rejected(*each) for each in zip(experiments, wholes, strict=True)]
        except Unreported as error:  # raised only if there is one experiment
            rejected = [dict(error.rows)]
        if not any(rejected):
            break
        for g, rows in enumerate(rejected):
            if rows:
                reports[g] = _named(g, partial(gathered[g].without, reports[g], rows))
    wholes = [_opened(*each) for each in zip(experiments, works, wholes, strict=True)]
    exacts = [{n: t[g : g + 1] for n, t in exact.items()} for g in range(len(works))]
    device = next(iter(exact.values())).device
    of_all = moved(torch.cat([work.cohort.size_shares for work in works]), device)  # in one copy
    shares = torch.split(of_all, [*map(len, works)])
    rooms = [one.room.on(device).divided(len(works)) for one in experiments]
    each = zip(experiments, reports, works, wholes, exacts, shares, rooms, strict=True)
    return [_move(*one) for one in each]


def _gatherings(experiments: Sequence[RoundInput], elsewhere: Reporting | None) -> list[Gathering]:
    """For each experiment, the object that gathers the reports of its round."""
    calls = [one.call(elsewhere) for one in experiments]
    if any(call.algorithm.pace is not None for call in calls):
        return [gathering(call, None) for call in calls]
    asked = ask([(call, call.select(call.num_asked)) for call in calls])
    return [gathering(*each) for each in zip(calls, asked, strict=True)]


T = TypeVar("T")


def _named(number: int, function: Callable[[], T]) -> T:
    """Call `function`; if too few clients report, put the experiment's number into the error."""
    try:
        return function()
    except BelowQuorum as error:
        error.experiment = number
        raise


def _models(experiment: RoundInput, reports: Reports) -> dict[int, Memory]:
    """The models that the reporting clients started from, by their round, oldest first."""
    state = experiment.state
    known = {**state.versions, state.round: _model(state)}
    return {number: known[number] for number in sorted({f.version for f in reports.arrived})} or {
        state.round: known[state.round]
    }


def _model(state: State) -> dict[str, Any]:
    params = held(state.download, state.params)
    return {"params": params, "buffers": state.buffers, "told": state.told}


def _shared(
    experiments: Sequence[RoundInput], models: Sequence[Mapping[int, Memory]]
) -> tuple[Shared, Tree]:
    """What clients are sent, and the models [G, ...] in float64 that servers update."""
    sent = [model for versions in models for model in versions.values()]
    params, buffers, told = (stack([one[part] for one in sent]) for part in _PARTS)
    exact = exact_model(params | buffers)
    pace = experiments[0].program.algorithm.pace
    states = [one.state for one in experiments]
    if pace is None and not any(state.download for state in states):
        return Shared(params, buffers, exact, told), exact
    now = exact_model(stack([state.params | state.buffers for state in states]))
    assert pace is None or len(states) == 1, "asynchronous rounds are those of one experiment"
    if pace is not None and pace.since == "now":
        exact = {name: t.expand(len(sent), *t.shape[1:]).contiguous() for name, t in now.items()}
    return Shared(params, buffers, exact, told), now


def _work(experiment: RoundInput, reports: Reports, models: Mapping[int, Memory]) -> Work:
    """The work and the share of each client that reports; other clients play no role."""
    algorithm, federation = experiment.program.algorithm, experiment.federation
    state = experiment.state
    clients, client_keys, holdings, plan = reports.reported
    counts = federation.label_counts(holdings)
    cohort = _cohort(experiment, reports.reported, counts)
    group, memory, device = None, [], next(iter(state.params.values())).device
    if reports.arrived:
        versions = torch.tensor([one.version for one in reports.arrived])
        cohort = cohort._replace(staleness=state.round - versions)
        group = torch.searchsorted(torch.tensor(list(models)), versions)
    if group is None or len(models) == 1:
        (model,) = models.values()
        memory = state.clients.take(clients, partial(_first, experiment, model), device)
        group = None
    else:
        for client, model in zip(clients, map([*models.values()].__getitem__, group), strict=True):
            first = partial(_first, experiment, model)
            memory += state.clients.take(client[None], first, device)
    return Work(
        plan=plan,
        keys=client_keys,
        facts=Facts(holdings.sizes, counts),
        memory=memory,
        shares=algorithm.weigh(cohort).double(),
        cohort=cohort,
        cohort_sizes=(len(clients),),
        rounds=(state.round,),
        group=group,
    )


def _first(experiment: RoundInput, model: Mapping[str, Any]) -> Memory:
    return experiment.program.memory(*(model[part] for part in _PARTS))


def _rejected(experiment: RoundInput, uploads: Part) -> dict[int, str]:
    """The rows of uploads that are rejected, each with the reason."""
    if experiment.clock is None or NORM not in uploads.scalars:
        return {}
    reporting = experiment.clock.reporting
    reasons = map(reporting.rejects, uploads.scalars[NORM].tolist())
    return {row: reason for row, reason in enumerate(reasons) if reason is not None}


def _opened(experiment: RoundInput, work: Work, uploads: Part) -> Part:
    """The sums as numbers, if they are secure; a ValueError for what no client may send."""
    secure = experiment.program.algorithm.combine
    if not isinstance(secure, SecureSum) or not len(work):
        return uploads
    peaks = uploads.scalars.get(PEAK, torch.zeros(0)).tolist()
    for client, peak in zip(work.cohort.clients.tolist(), peaks, strict=False):
        if (why := secure.refused(peak)) is not None:
            raise ValueError(
                f"in round {experiment.state.round + 1} client {client} would send {why}: choose a "
                "larger clip, or a smaller local.lr"
            )
    extra = {name: secure.opened(tree, len(work)) for name, tree in uploads.extra.items()}
    extra[MEASURED] = secure.opened(uploads.extra[MEASURED], 1.0)
    return uploads._replace(update=secure.opened(uploads.update, secure.total), extra=extra)


def _move(
    experiment: RoundInput,
    reports: Reports,
    work: Work,
    uploads: Part,
    exact: Tree,
    size_shares: Tensor,
    room: Room,
) -> tuple[State, Outcome]:
    """The server's half of an experiment's round; `exact` is its model [1, ...] in float64.

    It launches few kernels: a GPU's queue holds about a thousand launches, and if it is full, the
    host waits for the clients' kernels, which were queued before.
    """
    algorithm, state = experiment.program.algorithm, experiment.state
    cohort, device = work.cohort, next(iter(state.params.values())).device
    update, combining = uploads.update, state.combining
    if not uploads.combined:
        # Moved without waiting: a plain copy of each would wait for the work queued on the GPU.
        shares, there = moved((work.shares, cohort), device)
        there = there._replace(clients=cohort.clients)
        key = keys.root(experiment.seed, COMBINE, state.round)
        given = Received(update, shares, there, experiment.program.layout, combining, key)
        update, combining = algorithm.combine.update(given)
    trust = combining.get(TRUST, {}).get(TRUST)
    combining = {name: tree for name, tree in combining.items() if name != TRUST}
    if not len(work):  # nobody took part: what they would have sent is zeros
        sent = experiment.program.leaving(exact)
        update = {name: t.new_zeros(t.shape[1:]) for name, t in sent.items()}
    update, decoded, kept = decode(
        algorithm.channel, update, combining | state.told, experiment.seed, state.round, cohort
    )
    # Tensors of clients' own, which nobody sent, do not move.
    own = {name: t.new_zeros(t.shape[1:]) for name, t in exact.items() if name not in update}
    update = {**update, **own}
    told = state.told | told_of(algorithm.channel, kept)
    combining = combining | {name: tree for name, tree in kept.items() if name not in told}
    extra = dict(uploads.extra)
    means: dict[str, Tensor] = extra.pop(MEASURED, {})
    gathered = Gathered(cohort, extra, update)

    # Not in place: the next round may overwrite the update, and a server may keep its grads.
    negative = torch._foreach_neg([update[name].unsqueeze(0) for name in state.params])
    grads = dict(zip(state.params, negative, strict=True))
    memory = copies(state.server)
    start = {name: exact[name] for name in state.params}
    new, server = algorithm.advance.update(grads, memory, start, gathered)
    params = tree_map(torch.empty_like, state.params)
    copy_tensors({name: new[name].squeeze(0) for name in params}, params)
    buffers = {
        name: (exact[name].squeeze(0) + update[name]).to(b.dtype)
        if b.is_floating_point()
        else torch.maximum(b, uploads.counters.get(name, b))
        for name, b in state.buffers.items()
    }
    model = state.params | state.buffers
    if algorithm.covered:
        means = {}
    elif not means:
        means = {
            name: (t.double() * size_shares).sum()
            for name, t in uploads.scalars.items()
            if name != NORM
        }
        means |= {name: t.double().mean() for name, t in uploads.channel_scalars.items()}
    means |= decoded
    for measure in algorithm.measures:
        measured = measure(state.params, params)
        refuse_taken(measured)
        means |= measured
    outcome = Outcome(
        train_loss=means.pop("loss", size_shares.new_full((), torch.nan)),  # or nobody took part
        batches=max(work.plan.steps.tolist(), default=0),
        examples=int(work.plan.counts.sum()),
        clients=cohort.clients.tolist(),
        bytes_up=bytes_sent(experiment.program, model, extra) * reports.num_sent_up,
        bytes_down=(num_bytes(model) + sum_of_bytes(state.told)) * reports.num_sent_down
        - bytes_saved(state.download, state.params, cohort.clients),
        scalars=means,
        reports=reports,
        trust=trust,
    )
    for tell in algorithm.tell if len(work) else ():
        told = told | tell.update(told, gathered)
    clients = state.clients.put(cohort.clients, uploads.keep, cohort.sizes, room, state.round + 1)
    left = set(reports.in_training["version"].tolist()) if reports.in_training else set()
    known = {**state.versions, state.round: _model(state)}
    after = State(
        round=state.round + 1,
        params=params,
        buffers=buffers,
        server=server,
        told=told,
        combining=combining,
        clients=clients,
        download=sent_next(
            *(algorithm.download, state.download, state.params, params, cohort.clients),
            *(experiment.program.layout, experiment.seed, state.round),
        ),
        time=reports.time,
        in_training=dict(reports.in_training),
        versions={number: model for number, model in known.items() if number in left},
    )
    return after, outcome


def _cohort(experiment: RoundInput, reported: Asked, counts: Tensor) -> Cohort:
    algorithm, federation = experiment.program.algorithm, experiment.federation
    state, private = experiment.state, algorithm.objective.private
    clients, _, holdings, plan = reported
    sizes = holdings.sizes.numpy()
    total = int(sizes.sum())
    size_shares = torch.from_numpy(sizes / max(total, 1))
    label_shares = None
    if "label_counts" in algorithm.discloses:
        if private is not None:
            own = keys.fold(keys.root(experiment.seed, COUNTS), clients)
            counts = private.noisy_counts(counts, own)
        totals = counts.sum(0)
        shares = counts.double() / totals.clamp(min=1)
        label_shares = torch.where(totals > 0, shares, size_shares[:, None])
    if algorithm.weigh.over == "seen":
        total = state.clients.num_examples_with(clients, holdings.sizes)
    elif algorithm.weigh.over == "population":
        total = federation.num_examples(state.round)
    return Cohort(
        clients=clients,
        sizes=holdings.sizes,
        steps=plan.steps,
        size_shares=size_shares,
        label_shares=label_shares,
        num_clients=federation.num_clients,
        num_examples=total,
    )
