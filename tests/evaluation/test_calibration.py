"""Temperature scaling: the best temperature there is, and what the run folder says of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import fedlens as fl
from fedlens.evaluation.calibration import calibration, temperature
from fedlens.evaluation.metrics import ece
from fedlens.evaluation.reliability import Calibration, curve
from fedlens.report.blocks import Curves
from fedlens.report.runs import run_blocks
from fedlens.runs.records import read
from fedlens.setup import build
from fedlens.storage.run_files import BEST, EVALUATION, MODEL


def drawn(count: int, hotter: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and labels that follow softmax(logits / hotter)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 4, generator=generator) * 3
    labels = torch.multinomial((logits / hotter).softmax(1), 1, generator=generator)
    return logits, labels.squeeze(1)


@pytest.mark.parametrize("hotter", [0.5, 1.0, 2.5, 8.0])
def test_the_temperature_that_labels_were_drawn_with_is_found(hotter: float) -> None:
    assert temperature(*drawn(40_000, hotter)) == pytest.approx(hotter, rel=0.03)


@pytest.mark.parametrize("count", [1, 2, 5, 50, 400])
def test_it_is_where_another_minimiser_finds_the_least_cross_entropy(count: int) -> None:
    logits, labels = drawn(count, 2.0, seed=count)

    def entropy(scale: float) -> float:
        logs = (logits.double() * scale).log_softmax(1)
        own = logs[torch.arange(count), labels]
        return -float((count * own + logs.mean(1)).sum()) / (count + 1)

    best = minimize_scalar(entropy, bounds=(0.01, 100), method="bounded", options={"xatol": 1e-10})
    found = 1 / temperature(logits, labels)
    assert entropy(found) <= best.fun + 1e-12
    assert found == pytest.approx(best.x, rel=1e-4)


def test_few_examples_that_are_all_right_do_not_make_it_sure_of_everything() -> None:
    logits = torch.eye(3)
    sure = (logits / temperature(logits, torch.arange(3))).softmax(1).max(1).values
    assert sure.tolist() == pytest.approx([5 / 6] * 3)  # 3 of 4 labels, and a third of the fourth


def test_logits_that_say_nothing_or_the_opposite_end_at_a_bound() -> None:
    assert temperature(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)) > 0
    assert temperature(-10 * torch.eye(3), torch.arange(3)) == pytest.approx(100, rel=1e-3)


@pytest.fixture(scope="module")
def described() -> fl.Experiment:
    return fl.Experiment(
        "fashion-mnist-mini",
        "linear",
        rounds=2,
        clients=fl.Clients(count=4),
        local=fl.LocalTraining(lr=0.5, batch_size=16),
        evaluate=fl.Evaluate(on=("test", "validation"), validation=0.3, best=True),
    )


@pytest.fixture(scope="module")
def run(described: fl.Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    fl.run(described, out)
    return out


def calibrated(run: Path, file: str = MODEL) -> Calibration:
    found = Calibration.of(json.loads((run / EVALUATION).read_text()), file)
    assert found is not None
    return found


def test_a_run_keeps_the_temperature_of_held_out_examples(
    described: fl.Experiment, run: Path
) -> None:
    found, examples = calibrated(run), build(described).parts["validation"]
    assert found.part == "validation" and found.images == len(examples)
    with torch.no_grad():
        plain = fl.load(run)(examples.read(slice(None))).double() * found.temperature
    labels, halves = examples.labels, plain.clone()
    assert found.temperature == pytest.approx(temperature(plain, labels), rel=1e-5)
    assert found.temperature > 1  # so large a lr makes it overconfident
    for first, other in ((0, 1), (1, 0)):
        halves[first::2] /= temperature(plain[other::2], labels[other::2])
    for logits, error in zip((plain, halves), found.errors, strict=True):
        assert float(ece(logits, labels, bins=10)) == pytest.approx(error, abs=1e-4)
    assert found.errors[1] < found.errors[0]
    assert calibrated(run, BEST).images == found.images


def test_unsure_answers_are_those_below_the_probability(
    described: fl.Experiment, run: Path
) -> None:
    examples = build(described).parts["validation"]
    confidence, predicted = fl.load(run)(examples.read(slice(None))).softmax(1).max(1)
    kept = confidence > 0.7
    share, accuracy = calibrated(run).unsure(0.7)
    # The halves have temperatures of their own, so a few are on the other side.
    assert share == pytest.approx(1 - float(kept.double().mean()), abs=0.02)
    right = (predicted == examples.labels)[kept].double().mean()
    assert accuracy == pytest.approx(float(right), abs=0.02)
    assert calibrated(run).unsure(0.0)[0] == 0


def test_the_page_draws_the_reliability_before_and_after(run: Path) -> None:
    (block,) = (one for one in run_blocks([read(run)]) if one.title == "Reliability")
    assert isinstance(block, Curves)
    found = calibrated(run)
    after, before, diagonal = block.lines
    assert (after.x, after.y) == curve(found.after) and before.style == "dashed"
    assert diagonal.y == [0, 1]
    assert f"temperature of {found.temperature:.3g} takes" in block.caption
    assert f"on {found.images:,} validation images" in block.caption


@pytest.mark.parametrize(
    ("holdout", "on", "part"),
    [(0.2, "test", "clients"), (0.0, "test", "test"), (0.0, "train", None)],
)
def test_what_nobody_trained_on_is_held_out(
    described: fl.Experiment, holdout: float, on: Literal["test", "train"], part: str | None
) -> None:
    clients = fl.Clients(count=4, holdout=holdout)
    setup = build(replace(described, clients=clients, evaluate=fl.Evaluate(on=(on,))))
    found = calibration(setup, setup.engine, setup.network.params | setup.network.buffers)
    assert (None if found is None else found.part) == part
    if part == "clients":
        assert setup.client_tests is not None and found is not None
        assert found.images == len(setup.client_tests.holdings.index)
    setup.engine.close()


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1.0},
        {"temperature": "1"},
        {"after": []},
        {"after": [[1.0] * 99] * 3},
        {"before": [[math.nan] * 100] * 3},
        {"more": 1},
        {"part": "all"},
        {"images": "many"},
    ],
)
def test_what_is_no_calibration_is_none(run: Path, change: dict[str, object]) -> None:
    kept = calibrated(run)._asdict()
    assert Calibration.of({"calibration": {MODEL: kept | change}}, MODEL) is None
    assert Calibration.of({"calibration": {MODEL: kept}}, MODEL) is not None
    assert Calibration.of({}, MODEL) is None
