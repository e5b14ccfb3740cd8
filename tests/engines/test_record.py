"""Recorded rounds and steps without a GPU: `EagerCapture` does to memory what a CUDA graph does."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch

from fedlens.algorithm import Algorithm, compose
from fedlens.algorithm.pieces import Sgd, Uniformly
from fedlens.algorithms.admm import fedadmm
from fedlens.algorithms.clip import clip
from fedlens.algorithms.median import median
from fedlens.algorithms.own_layers import fedbn
from fedlens.core.trees import tensors_in
from fedlens.engines import Stacked, factored, graphs, recording, stacked
from fedlens.engines.graphs import Captures, no_garbage_collected
from fedlens.network.network import Network
from fedlens.rounds import RoundInput, State, begin, run_round, run_rounds
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.uploads import Uploads
from fedlens.rounds.work import Part
from fedlens.runs.folder import RunFolder
from tests.checkpoints import load_state
from tests.eager_capture import EagerCapture, num_replays
from tests.factoring import factoring, has_factored
from tests.federations import CPU, FEW, RAGGED, noisy_images, small_cnn, wide
from tests.papers_under_test import ALGORITHMS, PLAIN


def always(recorder: Captures | None) -> Callable[[], Captures] | None:
    return None if recorder is None else lambda: recorder


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", [[16] * 10, FEW], ids=["equal", "ragged"])
def test_recorded_rounds_are_the_same(name, sizes):
    federation = noisy_images(sizes)
    network = Network(small_cnn("group", dropout=0.3), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS[name], network.layout)
    states: list[State] = []
    losses: list[list[torch.Tensor]] = [[], []]
    for number, recorder in enumerate((None, Captures(EagerCapture))):
        engine = Stacked(network, federation.examples, make_recorder=always(recorder))
        state = begin(network, program, federation, torch.device("cpu"))
        for _ in range(5):  # at first step by step, then as a whole
            state, outcome = run_round(program, federation, engine, state, seed=0)
            losses[number].append(outcome.train_loss.clone())
        states.append(state)
    assert recorder is not None and num_replays(recorder)
    for one, other in zip(*(tensors_in((s.params, s.buffers)) for s in states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "scaffold", "fedadmm"])
def test_long_rounds_are_recorded_in_blocks_of_steps(name, monkeypatch):
    monkeypatch.setattr(recording, "LONG", 3)
    monkeypatch.setattr(recording, "BLOCK", 2)
    federation = noisy_images([70, 70, 68, 65, 20])
    network = Network(small_cnn("group", dropout=0.3), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS[name], network.layout)
    ends: list[State] = []
    for recorder in (None, Captures(EagerCapture)):
        engine = Stacked(network, federation.examples, make_recorder=always(recorder))
        state = begin(network, program, federation, torch.device("cpu"))
        for _ in range(3):
            state, _ = run_round(program, federation, engine, state, seed=0)
        ends.append(state)
    assert recorder is not None
    keys = [key for key, _ in (*recorder._seen, *recorder._captured)]
    assert all(isinstance(key, tuple) and key[0] == "steps" for key in keys)
    together = {inputs[-1][0][0] for _, inputs in recorder._captured}  # the steps of a capture
    assert 2 in together <= {1, 2}
    for one, other in zip(*(tensors_in((s.params, s.buffers)) for s in ends), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("long", [0, 1000], ids=["steps", "rounds"])
def test_what_was_recorded_is_gone_when_its_engine_closes(long, monkeypatch):
    """It is not left to the garbage collector: it has much memory, and is not freed at any time."""
    monkeypatch.setattr(recording, "LONG", long)
    federation = noisy_images([16] * 4)
    network = Network(small_cnn("group"), dtype=torch.float64)
    program = ClientProgram(ALGORITHMS["fedavg"], network.layout)
    made: list[weakref.ref[Captures]] = []

    def make():
        recorder = Captures(EagerCapture)
        made.append(weakref.ref(recorder))
        return recorder

    engine = Stacked(network, federation.examples, make_recorder=make)
    state = begin(network, program, federation, CPU)
    with no_garbage_collected():
        for _ in range(5):
            state, _ = run_round(program, federation, engine, state, seed=0)
        (recorder,) = (one() for one in made)
        assert recorder is not None and num_replays(recorder)
        del recorder
        engine.close()
        assert [one() for one in made] == [None]


@pytest.mark.parametrize("factor", [False, True])
def test_recorded_clients_stay_in_one_place_however_many_still_train(factor, monkeypatch):
    """Memory that grew with every number of clients would grow with its square."""
    for module in (recording, factored):
        monkeypatch.setattr(module, "LONG", 3)
        monkeypatch.setattr(module, "BLOCK", 2)
    federation = noisy_images([70, 64, 60, 47, 33, 20])
    network = Network(wide(0.2), dtype=torch.float64)
    ends: list[State] = []
    for recorder in (None, Captures(EagerCapture)):
        engine = Stacked(network, federation.examples, make_recorder=always(recorder))
        state = begin(network, ClientProgram(PLAIN, network.layout), federation, CPU)
        for clients in (3, 3, 6, 4, 6, 6):  # the place grows once
            algorithm = replace(PLAIN, select=Uniformly(clients))
            program = ClientProgram(algorithm, network.layout)
            with factoring(factor):
                state, _ = run_round(program, federation, engine, state, seed=0)
        ends.append(state)
    assert recorder is not None
    assert has_factored(engine) == factor
    kinds = [(inputs[0][0][0], inputs[-1][0][0]) for _, inputs in recorder._captured]
    assert len({clients for clients, _ in kinds}) > 2
    assert factor or len(set(kinds)) == len(kinds)  # once for so many clients and steps
    assert all(one.in_place for one in recorder._captured.values())
    firsts = {one.inputs[0].untyped_storage().data_ptr() for one in recorder._captured.values()}
    assert len(firsts) == 1
    for one, other in zip(*(tensors_in((s.params, s.buffers)) for s in ends), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "scaffold"])
@pytest.mark.parametrize("module", [wide(0.2), small_cnn("batch")], ids=["factored", "batch norm"])
def test_a_warm_up_changes_nothing(name, module, monkeypatch):
    """Before what is run for its kernels alone, and after, a round is the same to the last bit."""
    federation = noisy_images(RAGGED)
    network = Network(module, dtype=torch.float64)
    program = ClientProgram(ALGORITHMS[name], network.layout)
    warm_ups: list[Any] = []
    monkeypatch.setattr(recording, "compile_ahead", lambda run: warm_ups.append(run()))

    def warmed_up(*given: Any) -> list[Part]:
        recording.warm_up(*given[:-1])
        return recording.run_program(*given)

    ends: list[State] = []
    for run_program in (recording.run_program, warmed_up):
        monkeypatch.setattr(stacked, "run_program", run_program)
        engine = Stacked(network, federation.examples)
        state = begin(network, program, federation, torch.device("cpu"))
        for _ in range(2):
            state, _ = run_round(program, federation, engine, state, seed=0)
        ends.append(state)
    assert len(warm_ups) == 2
    for one, other in zip(*map(tensors_in, ends), strict=True):
        assert torch.equal(one, other)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def sizes_held(recorder: Captures) -> list[int]:
    """The sizes of the inputs that calls are recorded for, in the order of recording."""
    return [one.inputs[0].numel() for one in recorder._captured.values()]


def call(recorder: Captures, sizes: list[int]) -> None:
    for size in sizes:
        x = torch.rand(size)
        found = recorder("double", double, x)
        assert found is None or torch.equal(found, 2 * x)


def test_a_full_recorder_replaces_what_was_not_replayed_while_a_shape_recurred(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_CAPTURES", 2)
    recorder = Captures(EagerCapture)
    call(recorder, [1, 2] * 3)
    assert sizes_held(recorder) == [1, 2]
    call(recorder, [3, 1, 2] * 5)
    assert sizes_held(recorder) == [1, 2], "both were replayed since 3 was seen three times"
    call(recorder, [3, 3, 3, 2, 3])
    assert sizes_held(recorder) == [1, 2], "calls in a row, as in one round, are one turn"
    call(recorder, [2, 3, 2, 3])
    assert sizes_held(recorder) == [2, 3], "1 was not"
    call(recorder, [1, 1])
    assert sizes_held(recorder) == [2, 3], "what was replaced has to recur like any other"


def test_no_recording_is_added_once_they_take_enough_memory():
    recorder = Captures(EagerCapture, most_bytes=2 * 4 * 1000)
    call(recorder, [1000] * 3 + [10] * 3)
    assert sizes_held(recorder) == [1000], "with its result, one takes it all"
    call(recorder, [5, 10, 5, 10])
    assert sizes_held(recorder) == [10]
    call(recorder, [20] * 3 + [30] * 3)
    assert sizes_held(recorder) == [10, 20, 30]


def test_shapes_that_never_recur_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_SHAPES", 5)
    recorder = Captures(EagerCapture)
    call(recorder, [100, 100, *range(1, 5), 100])
    assert sizes_held(recorder) == [100]
    call(recorder, [200, 200, *range(1, 9), 200])
    assert sizes_held(recorder) == [100], "it was forgotten"
    assert len(recorder._seen) == 5


@pytest.mark.parametrize("key", ["lr", "rho"])
@pytest.mark.parametrize("sizes", [[20] * 8, [70, 64, 60, 47, 33, 20]], ids=["equal", "ragged"])
def test_factored_layers_of_a_sweep_are_recorded_for_whatever_block_they_are_of(
    key, sizes, monkeypatch
):
    """They start from models, and step at rates, that other blocks have not."""
    monkeypatch.setattr(factored, "LARGE", 1)  # ragged experiments come one by one
    if len(set(sizes)) > 1:
        for module in (recording, factored):
            monkeypatch.setattr(module, "LONG", 3)
            monkeypatch.setattr(module, "BLOCK", 2)
    federation = noisy_images(sizes)
    network = Network(wide(0.2), dtype=torch.float64)
    numbers = (0.1, 0.2, 0.05, 0.15)
    if key == "rho":
        algorithms = [compose(PLAIN, fedadmm(rho=number)) for number in numbers]
    else:
        algorithms = [replace(PLAIN, solve=Sgd(number)) for number in numbers]
    programs = [ClientProgram(replace(a, select=Uniformly(4)), network.layout) for a in algorithms]
    turns = [
        RoundInput(p, federation, begin(network, p, federation, torch.device("cpu")), seed)
        for seed, p in enumerate(programs)
    ]
    together = ClientProgram.joint(programs, next(iter(turns[0].state.params.values())))
    alone = list(turns)
    for number in range(len(alone)):
        engine = Stacked(network, federation.examples)
        for _ in range(5):
            one = alone[number]
            with factoring(False):
                state, _ = run_round(one.program, federation, engine, one.state, one.seed)
            alone[number] = replace(one, state=state)
    recorder = Captures(EagerCapture)
    engine = Stacked(network, federation.examples, at_once=8, make_recorder=always(recorder))
    for _ in range(5):
        after = run_rounds(together, engine, turns)
        turns = [replace(turn, state=state) for turn, (state, _) in zip(turns, after, strict=True)]
    assert has_factored(engine) and num_replays(recorder)
    for turn, expected in zip(turns, alone, strict=True):
        torch.testing.assert_close(turn.state.params, expected.state.params, rtol=1e-10, atol=1e-12)


def test_what_clients_remember_is_found_again_in_whatever_order_a_file_gives_it(
    tmp_path, monkeypatch
):
    federation = noisy_images([16] * 10)
    network = Network(small_cnn("group"), dtype=torch.float64)
    algorithm = replace(compose(PLAIN, fedbn()), select=Uniformly(3))
    program = ClientProgram(algorithm, network.layout)
    state = begin(network, program, federation, torch.device("cpu"))
    for _ in range(3):
        engine = Stacked(network, federation.examples)
        state, _ = run_round(program, federation, engine, state, seed=0)
    folder = RunFolder(tmp_path)
    folder.save_state(state)
    load = safetensors.torch.load
    monkeypatch.setattr(
        safetensors.torch, "load", lambda content: dict([*load(content).items()][::-1])
    )
    ends = []
    for recorder in (None, Captures(EagerCapture)):
        engine = Stacked(network, federation.examples, make_recorder=always(recorder))
        after = load_state(folder)
        for _ in range(11):
            after, _ = run_round(program, federation, engine, after, seed=0)
        ends.append(after)
    assert recorder is not None
    rounds = [key for key, _ in recorder._captured if isinstance(key, tuple) and key[0] == "round"]
    assert len(rounds) == 1, "one record does for all clients, loaded or not"
    for name, expected in ends[0].params.items():
        torch.testing.assert_close(ends[1].params[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("borrowed", [True, False])
def test_uploads_are_added_up_and_not_kept_part_by_part(borrowed):
    """Of parts that lie where others are written to, nothing is left but the sum."""
    uploads, place = Uploads(), {"w": torch.zeros(2)}
    for number in range(3):
        if borrowed:
            place["w"].fill_(number)
        else:
            place = {"w": torch.full((2,), float(number))}
        one = {"loss": torch.ones(1)}
        uploads.add(Part(place, {}, {"c": place}, [{}], one, True, borrowed))
    assert not any(part.update or part.extra for part in uploads.parts)
    whole = uploads.whole()
    assert whole.update["w"].tolist() == whole.extra["c"]["w"].tolist() == [3, 3]
    assert len(whole.keep) == len(whole.scalars["loss"]) == 3


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedadmm without momentum"])
@pytest.mark.parametrize("module", [lambda: small_cnn("group"), lambda: wide(0.2)])
def test_numbers_of_local_steps_may_change_from_round_to_round(name, module):
    """A recorded round takes them as an input: nothing is recorded again for another lr."""
    federation = noisy_images([20] * 8)
    network = Network(module(), dtype=torch.float64)
    ends = []
    for recorder in (None, Captures(EagerCapture)):
        engine = Stacked(network, federation.examples, make_recorder=always(recorder))
        program = ClientProgram(ALGORITHMS[name], network.layout)
        state = begin(network, program, federation, CPU)
        for number in range(7):
            changed = with_lr(ALGORITHMS[name], 0.1 * 0.8**number)
            program = ClientProgram(changed, network.layout)
            state, _ = run_round(program, federation, engine, state, seed=0)
        ends.append(state)
    assert recorder is not None
    rounds = [key for key, _ in recorder._captured if "round" in str(key)]
    assert len(rounds) == 1, "one capture serves all learning rates"
    torch.testing.assert_close(ends[1].params, ends[0].params, rtol=1e-10, atol=1e-12)


def with_lr(filling: Any, lr: float) -> Any:
    """An algorithm whose clients step at another rate."""
    if isinstance(filling, Algorithm):
        return replace(filling, solve=with_lr(filling.solve, lr))
    if isinstance(filling, Sgd):
        return replace(filling, lr=lr)
    return replace(filling, inner=with_lr(filling.inner, lr))


FITTING = ["fedavg", "fedavg over the population", "lambda-sum", "fedavgm", "lastfc", "fedns"]
FITTING += ["fedadam", "fednova", "median", "trimmed-mean", "krum", "clip", "quantize"]


@pytest.mark.parametrize("recorder", [None, Captures(EagerCapture)], ids=["plain", "recorded"])
def test_algorithms_of_different_kinds_train_side_by_side(recorder):
    """Those that disclose label counts with those that do not, linear ones with medians."""
    federation = noisy_images(FEW)
    network = Network(small_cnn("batch", dropout=0.2), dtype=torch.float64)
    programs = [ClientProgram(ALGORITHMS[name], network.layout) for name in FITTING]
    inputs = [
        RoundInput(p, federation, begin(network, p, federation, CPU), seed)
        for seed, p in enumerate(programs)
    ]
    joint = ClientProgram.joint(programs, next(iter(inputs[0].state.params.values())))
    engine = Stacked(network, federation.examples, at_once=128, make_recorder=always(recorder))
    together = inputs
    for _ in range(5):
        after = run_rounds(joint, engine, together)
        together = [
            replace(one, state=state) for one, (state, _) in zip(together, after, strict=True)
        ]
    for name, one, found in zip(FITTING, inputs, together, strict=True):
        alone = Stacked(network, federation.examples)
        state = one.state
        for _ in range(5):
            state, _ = run_round(one.program, federation, alone, state, one.seed)
        expected = state.params | state.buffers
        for key, value in (found.state.params | found.state.buffers).items():
            message = f"{name}: {key}"
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-11, msg=message)


def test_programs_have_one_structure_if_they_differ_in_numbers_that_are_on():
    network = Network(small_cnn(), dtype=torch.float64)

    def program(solve: Sgd, **changes: Any) -> ClientProgram:
        return ClientProgram(replace(PLAIN, solve=solve, **changes), network.layout)

    def alike(one: ClientProgram, two: ClientProgram) -> bool:
        return one.differs_in_numbers_alone(two)

    plain, heavy = program(Sgd(0.1)), program(Sgd(0.1, 0.9))
    assert alike(plain, program(Sgd(0.3))) and not alike(plain, heavy)
    assert alike(heavy, program(Sgd(0.2, 0.5))) and not alike(heavy, program(Sgd(0.1, 0.0, 0.9)))
    assert alike(plain, program(Sgd(0.1), select=Uniformly(7))), "the server's own affair"
    assert not alike(plain, program(Sgd(0.1), channel=compose(PLAIN, clip(norm=1.0)).channel))
    assert not alike(plain, program(Sgd(0.1), combine=compose(PLAIN, median()).combine))
    assert heavy.with_numbers([0.2, 0.5]).algorithm.solve == Sgd(0.2, 0.5)
