"""Workers: how clients are dealt to them, what they send, and on which devices."""

import gc
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedlens as fl
from fedlens.algorithm.pieces import Uniformly
from fedlens.algorithm.pieces.upload import difference
from fedlens.algorithm.slots import Tell
from fedlens.core import Upload, zeros_at_first
from fedlens.engines import Processes, Sequential, gpus, processes, workers
from fedlens.engines.workers import Costs, even_blocks, longest_first
from fedlens.network.network import Network
from fedlens.rounds import begin, run_round
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Which
from fedlens.runs import manifest as manifests
from fedlens.setup import assemble, build, devices
from tests.federations import CPU, FEW, RAGGED, assert_equal, forked, noisy_images, small_cnn, train
from tests.papers_under_test import BASE
from tests.toys import toy


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 50))
def test_blocks_are_the_whole_cohort_in_its_order(steps, number, most):
    blocks = even_blocks(steps, number, most)
    clients = [client for block in blocks for client in range(len(steps))[block]]
    assert clients == list(range(len(steps)))
    assert all(0 < block.stop - block.start <= most for block in blocks)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_no_block_takes_longer_than_its_part_and_the_longest_client(steps, number):
    costs = [s + 1 for s in steps]
    blocks = even_blocks(steps, number, len(steps))
    assert len(blocks) <= number
    longest = max(sum(costs[block]) for block in blocks)
    assert longest <= sum(costs) / number + max(costs)


def test_equal_clients_are_dealt_evenly():
    assert even_blocks([5] * 8, 4, 8) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(2, 12))
def test_every_task_is_handed_out_once_and_none_before_its_turn_could_come(sizes, num_slots):
    order = longest_first(sizes, num_slots)
    assert sorted(order) == list(range(len(sizes)))
    for dealt in range(len(order)):  # those that hold a slot until the first that is missing comes
        missing = min(set(range(len(sizes))) - set(order[:dealt]))
        assert sum(task > missing for task in order[:dealt]) < num_slots


def test_the_longest_tasks_are_handed_out_first():
    assert longest_first([3, 9, 1, 5], num_slots=4) == [1, 3, 0, 2]
    assert longest_first([3, 9, 1, 5, 8], num_slots=4) == [1, 0, 3, 2, 4]


def test_what_clients_take_is_learnt_from_what_others_took():
    costs = Costs()
    steps, examples = torch.tensor([10, 2, 5]), torch.tensor([10, 64, 40])
    assert costs.of(steps, examples) == [10, 64, 40], "nothing is known yet"
    for number in range(20):
        costs.learn(number % 5, 3 * number, 0.5 * (number % 5) + 0.01 * 3 * number)
    assert costs.of(steps, examples) == pytest.approx([5.1, 1.64, 2.9])


def test_clients_that_are_all_alike_cost_the_same():
    costs = Costs()
    for seconds in (1.0, 1.1) * 8:
        costs.learn(5, 50, seconds)
    one, other = costs.of(torch.tensor([5, 5]), torch.tensor([50, 50]))
    assert one == other == pytest.approx(1.05)


@pytest.mark.slow
def test_few_slots_and_many_clients_change_nothing(monkeypatch):
    everyone = replace(BASE, select=Uniformly(10))
    expected = train(everyone, "processes")
    monkeypatch.setattr(workers, "UPLOADS", 1)  # two slots a worker
    assert_equal(found=train(everyone, "processes").params, expected=expected.params)
    found = train(everyone, "processes, two devices").params
    for name, value in expected.params.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@dataclass(frozen=True)
class KeepsWhatItHad:
    """upload: a client whose memory never changes, which it hands back as it got it."""

    def __call__(self, local) -> Upload:
        return replace(difference(local), keep=dict(local.memory))


def test_a_client_may_keep_just_what_it_had():
    keeping = replace(BASE, memory={"mine": zeros_at_first}, upload=KeepsWhatItHad())
    expected = train(keeping, "sequential").clients.rows
    for engine in ("processes", "processes, two devices"):
        found = train(keeping, engine).clients.rows
        assert found.keys() == expected.keys()
        for client, row in expected.items():
            assert_equal(found=found[client]["mine"], expected=row["mine"])


@dataclass(frozen=True)
class SendsMuch:
    """upload: three models besides the update, of which no memory and no tell gives a hint."""

    def __call__(self, local) -> Upload:
        extra = {f"copy {n}": {k: p + n for k, p in local.params.items()} for n in range(3)}
        return replace(difference(local), extra=extra)


@dataclass(frozen=True)
class TellSums(Tell):
    def init(self, params, federation):
        return {"sums": {name: torch.zeros_like(p) for name, p in params.items()}}

    def update(self, told, gathered):
        return {"sums": gathered.extra["copy 2"]}


def wide_net() -> torch.nn.Module:
    torch.default_generator.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 300), torch.nn.Linear(300, 4)
    )


@pytest.mark.parametrize("options", [{"workers": 2}, {"devices": [CPU] * 2}])
def test_what_is_sent_besides_may_be_larger_than_anyone_could_know(options):
    federation, network = noisy_images(RAGGED), Network(wide_net(), dtype=torch.float64)
    program = ClientProgram(replace(BASE, upload=SendsMuch(), tell=(TellSums(),)), network.layout)
    engine = Processes(network, federation.examples, **options)
    ends, slots = [], []
    try:
        for one in (Sequential(network, federation.examples), engine):
            state = begin(network, program, federation, CPU)
            for _ in range(3):
                state, _ = run_round(program, federation, one, state, seed=0)
                if one is engine:
                    slots.append(engine.sizes.slot_bytes)
            ends.append(state)
        assert slots[0] < slots[1] == slots[2], "memory grew once, to what was measured"
        assert not engine.slot_is_too_small
    finally:
        engine.close()
    for part in ("params", "told"):
        expected, found = (getattr(state, part) for state in ends)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{"workers": 2}, {"devices": [CPU] * 2}])
def test_workers_predict_what_this_process_would(options):
    engine, program, federation, state = forked(BASE, **options)
    examples, model = federation.examples, state.params | state.buffers
    batches: list[Which] = [slice(0, 7), torch.tensor([5, 3, 60]), slice(63, 73)]
    try:
        run_round(program, federation, engine, state, seed=0)
        before = engine.busy_seconds
        found = list(engine.predict(model, examples, batches))
        assert engine.busy_seconds > before
    finally:
        engine.close()
    expected = list(Sequential(engine.network, examples).predict(model, examples, batches))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_this_process_predicts_where_there_are_no_workers_or_only_one():
    for options in ({"workers": 2}, {"devices": [CPU] * 2}, {"workers": 1}):
        engine, program, federation, state = forked(BASE, **options)
        model = state.params | state.buffers
        try:
            if engine.num_workers == 1:
                run_round(program, federation, engine, state, seed=0)
            before = engine.busy_seconds
            with mock.patch.object(
                Network, "predict", autospec=True, side_effect=Network.predict
            ) as p:
                (found,) = engine.predict(model, federation.examples, [slice(0, 5)])
            assert p.call_args.kwargs == {"fast": True}, "as workers do"
            assert engine.busy_seconds == before
        finally:
            engine.close()
        assert len(found) == 5


def test_a_run_whose_workers_have_devices_comes_to_the_same(monkeypatch, tmp_path):
    """Evaluation, held-out examples and the centralised twin included."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    experiment = fl.Experiment(
        dataset=toy(),
        model=fl.Named("linear"),
        rounds=3,
        engine="stacked",
        device="cpu",
        precision="fp64",
        clients=fl.Clients(count=4, holdout=0.3),
        evaluate=fl.Evaluate(every=1, on=("test", "train"), twin=True),
    )
    expected = fl.run(experiment)
    monkeypatch.setattr(assemble, "devices_of", lambda _: (CPU, [CPU] * 2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    found = fl.run(replace(experiment, engine="processes"), tmp_path / "run")
    for mine, theirs in zip(found.records, expected.records, strict=True):
        for name in theirs.keys() - {"seconds", "evaluation_seconds"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-9), name
    assert found.summary["final"].keys() == expected.summary["final"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_process_that_has_used_a_gpu_says_so(monkeypatch):
    """There are GPUs, but a child sees none."""
    monkeypatch.setattr(gpus, "_names", lambda: ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="used a GPU"):
        gpus.gpu_names.__wrapped__()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    engine, program, federation, state = forked(BASE, devices=[torch.device("cuda", 0)])
    with pytest.raises(ValueError, match="used a GPU"):
        run_round(program, federation, engine, state, seed=0)


def test_a_worker_for_each_gpu_or_for_the_one_named(monkeypatch):
    for module in (devices, processes):
        monkeypatch.setattr(module, "gpu_names", lambda: ("one", "two"))
    names = {"cuda": "one, two", "auto": "one, two", "cuda:1": "two", "cpu": "cpu"}
    for device, called in names.items():
        linear = fl.Named("linear")
        experiment = fl.Experiment(toy(), linear, 1, engine="processes", device=device)
        setup = build(experiment)
        assert setup.device == CPU
        assert manifests.manifest(setup)["device"] == called
    with pytest.raises(ValueError, match="cuda:7"):
        build(replace(experiment, device="cuda:7"))


SETTINGS_OF_NEW_MEMORY = """
import torch
from pathlib import Path
from fedlens.engines import trainer

trainer.keep_memory()
large = torch.ones(2**22)  # as a worker would have it
place, found = large.data_ptr() + 2**23, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    first, *rest = line.split()
    if "-" in first:
        start, end = (int(address, 16) for address in first.split("-"))
        found = start <= place < end
    elif found and first == "VmFlags:":
        print(*rest)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without large pages"
)
def test_workers_ask_for_large_pages():
    """In a process of its own: which memory is handed out depends on what ran before."""
    command = [sys.executable, "-c", SETTINGS_OF_NEW_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "hg" in done.stdout.split()


def fail():
    raise ArithmeticError("in its own words")


def test_a_child_leaves_alone_what_its_parent_has_left_over():
    """Objects that wait for threads when they are freed would wait for ever in a child."""
    freed: list[int] = []

    class Left:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            freed.append(os.getpid())

    def look() -> list[int]:
        assert gc.isenabled()
        gc.collect()
        return freed

    gc.disable()
    try:
        Left()
        assert gpus.in_a_child(look) == []
    finally:
        gc.enable()
    gc.collect()
    assert freed == [os.getpid()]
    assert gc.isenabled()


def test_a_child_gives_an_answer_or_its_error():
    assert gpus.in_a_child(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="in its own words"):
        gpus.in_a_child(fail)


def test_models_may_lie_in_another_order_in_memory():
    federation = noisy_images(FEW)
    module = small_cnn("group")
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch types lack it
    network = Network(module, dtype=torch.float64)
    program = ClientProgram(BASE, network.layout)
    ends = []
    for engine in (
        Sequential(network, federation.examples),
        Processes(network, federation.examples),
    ):
        state = begin(network, program, federation, CPU)
        for _ in range(2):
            state, _ = run_round(program, federation, engine, state, seed=0)
        engine.close()
        ends.append(state.params)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_elsewhere_than_on_linux_the_line_says_what_to_choose(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gpus.gpu_names.__wrapped__() == ()  # without a fork
    with pytest.raises(ValueError, match='"ray"'):
        Processes(Network(torch.nn.Flatten()), noisy_images([3]).examples)
