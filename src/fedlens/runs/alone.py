"""Models that clients train without the others: which clients does federated learning help?

Each client trains with the run's local settings on its own examples only: from the initial
weights (`evaluate.local_only`), with as many passes over its examples as the centralised twin makes
over all examples, or from the final model (`evaluate.fine_tune`). Its model is tested on the same
examples as the federated model is for that client. Clients train side by side in one cohort, each
as an experiment of its own, as in a sweep.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedlens.core import Tree
from fedlens.core.federation import Federation, Fixed
from fedlens.evaluation.evaluate import ByClient, Twin, judge, personal_models, tested_examples
from fedlens.rounds import RoundInput, State, begin, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.runs.settings import torch_settings
from fedlens.runs.twin import plain_training
from fedlens.runs.watching import Watch, tell
from fedlens.setup import Setup

AT_ONCE = 64  # clients whose models are in memory together


def check_clients_are_tested(setup: Setup) -> None:
    evaluate = setup.experiment.evaluate
    asked = "fine_tune" if evaluate.fine_tune else "local_only"
    if (evaluate.fine_tune or evaluate.local_only) and setup.client_tests is None:
        remedy = "set clients.holdout, say to 0.2"
        if not isinstance(setup.federation.split, Fixed):  # such a split refuses a holdout
            partition = setup.experiment.clients.partition.name
            remedy = f"choose another partition than {partition!r}, and set clients.holdout"
        raise ValueError(
            f"evaluate.{asked} compares models on what each client is tested on, which is nothing: "
            f"{remedy}"
        )


def by_client(setup: Setup, final: State, twin: Twin | None, watch: Watch | None) -> ByClient:
    """The accuracies by client that the experiment asks for, given the final state.

    During training, `watch` is called after each pass with its number (`tuned` or `alone`) and the
    number of passes (`of`).
    """
    evaluate, clients = setup.experiment.evaluate, range(setup.federation.num_clients)
    models = [final.params | final.buffers] * len(clients)
    for client, model in personal_models(setup, final).items():
        models[client] = model
    federated = torch.stack([_tested(setup, client, models[client]) for client in clients])
    tuned = alone = central = None
    if twin is not None and twin.by_client is not None:
        central = torch.tensor(twin.by_client, dtype=torch.float64)
    if not (evaluate.fine_tune or evaluate.local_only):
        return ByClient(federated, centralised=central)
    plain = plain_training(setup)
    with torch_settings(plain.experiment, plain.device, plain.threads):
        try:
            if evaluate.fine_tune:  # with the last values of schedules: it continues the run
                program = plain.program_of(plain.experiment.rounds - 1)
                tuned = _accuracy(
                    setup, plain, models, [program] * evaluate.fine_tune, "tuned", watch
                )
            if evaluate.local_only:
                passes = [plain.program_of(number) for number in range(plain.experiment.rounds)]
                alone = _accuracy(setup, plain, None, passes, "alone", watch)
        finally:
            plain.engine.close()
    return ByClient(federated, tuned, alone, central)


def _accuracy(
    setup: Setup,
    plain: Setup,
    starts: list[Tree] | None,
    passes: list[ClientProgram],
    told_as: str,
    watch: Watch | None,
) -> Tensor:  # [K]
    """Accuracy by client after `passes`, each from its own start or from the initial model."""
    assert setup.client_tests is not None, "who asks for it was checked"
    held, tested = setup.federation.everyone(0), setup.client_tests.holdings
    found = torch.full((len(held),), torch.nan, dtype=torch.float64)
    able = torch.nonzero((held.sizes > 0) & (tested.sizes > 0))[:, 0]
    done, total = 0, len(passes) * -(-len(able) // AT_ONCE)
    for some in torch.split(able, AT_ONCE):
        federations = [
            replace(setup.federation, split=Fixed(held.take(client)))
            for client in torch.split(some, 1)
        ]
        states = [begin(plain.network, plain.program, one, plain.device) for one in federations]
        if starts is not None:
            states = [_from(s, starts[k]) for s, k in zip(states, some.tolist(), strict=True)]
        for program in passes:
            states = _one_pass(plain, program, federations, states)
            done += 1
            tell(watch, {told_as: done, "of": total})
        for state, client in zip(states, some.tolist(), strict=True):
            found[client] = _tested(setup, client, state.params | state.buffers)
    return found


def _from(state: State, model: Tree) -> State:
    params, buffers = ({name: model[name] for name in t} for t in (state.params, state.buffers))
    return replace(state, params=params, buffers=buffers)


def _one_pass(
    plain: Setup, program: ClientProgram, federations: list[Federation], states: list[State]
) -> list[State]:
    inputs = [
        RoundInput(program, federation, state, plain.experiment.seed)
        for federation, state in zip(federations, states, strict=True)
    ]
    like = next(iter(states[0].params.values()))
    joint = ClientProgram.joint([program] * len(inputs), like)
    return [state for state, _ in run_rounds(joint, plain.engine, inputs)]


def _tested(setup: Setup, client: int, model: Tree) -> Tensor:  # []; NaN without test examples
    assert setup.client_tests is not None, "who asks for it was checked"
    tests = setup.client_tests
    index = tests.holdings.members(client)
    correct = judge(setup.engine, tested_examples(setup, tests), index)(model)
    return correct.double().mean().cpu()
