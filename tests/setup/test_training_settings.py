"""Settings of training together, as papers have them: on every engine, resumed, and in a sweep."""

from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from tests.runs.resumable import Stop, assert_same_run

TOGETHER: dict[str, dict[str, Any]] = {
    "adamw, annealed within a round": {
        "local": {
            "optimizer": "adamw",
            "lr": {"name": "warm-up", "rounds": 2, "then": {"name": "cosine", "start": 0.01}},
            "anneal": {"name": "cosine", "end": 0.1},
            "reset": False,
            "clip": 0.5,
            "weight_decay": {"name": "step", "start": 0.1, "every": 2},
            "weight_decay_on": "weights",
            "steps": {"low": 2, "high": 4},
        },
        "loss": {"name": "cross_entropy", "label_smoothing": 0.1},
        "augment": {"mixup": 0.4, "cutout": 3, "flip": True, "crop": 1},
    },
    "nesterov, stopped by patience": {
        "local": {
            "optimizer": {"name": "sgd", "nesterov": True},
            "momentum": {"name": "polynomial", "start": 0.9, "end": 0.5},
            "lr": {"name": "piecewise", "values": [0.1, 3.0], "at": [1]},  # so it gets worse
            "clip_value": 0.05,
            "class_balance": 0.9,
            "epochs": 1.5,
            "max_steps": 4,
        },
        "server": {"lr": {"name": "exponential", "start": 1.0, "decay": 0.9}},
        "loss": "focal",
        "augment": {"rotate": 20, "brightness": 0.3, "contrast": 0.3, "saturation": 0.3},
        "evaluate": {"on": ["test", "validation"], "validation": 0.2, "best": True},
        "stop": {"patience": 1},
    },
    "adam, under a bound of bytes": {
        "local": {"optimizer": "adam", "lr": 0.01, "epochs": {"low": 0.5, "high": 1.5}},
        "algorithm": {"name": "fedprox", "mu": {"name": "cosine", "start": 0.1}},
        "loss": "squared_error",
        "augment": {"rand_augment": 2, "resized": 0.5},
        "stop": {"bytes": 6_000},
    },
}


def described(settings: str, engine: Any, seed: int = 0) -> fl.Experiment:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    noise = torch.randint(0, 120, (60, 3, 6, 6), generator=rng)
    images = (noise + 50 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    train, test = fl.Examples(images[:45], labels[:45]), fl.Examples(images[45:], labels[45:])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        # A bias before normalisation has no gradient but rounding, of which Adam makes steps.
        first = (nn.Conv2d(3, 2, 3, bias=False), nn.BatchNorm2d(2))
        model = nn.Sequential(*first, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32, 3))
    chosen = TOGETHER[settings]
    return fl.Experiment(
        dataset=fl.Dataset("toy", train, test, ("a", "b", "c"), (0.4,) * 3, (0.2,) * 3),
        model=model,
        rounds=4,
        seed=seed,
        engine=engine,
        precision="fp64",
        clients=fl.Clients(count=4, per_round=2),
        **chosen | {"local": {"batch_size": 4} | chosen["local"]},
    )


def assert_close(found: fl.Result, expected: fl.Result) -> None:
    assert len(found.records) == len(expected.records)
    torch.testing.assert_close(found.model, expected.model, rtol=0, atol=1e-9)


@pytest.mark.parametrize("settings", TOGETHER)
def test_engines_agree_and_points_of_a_sweep_are_what_they_are_alone(settings):
    alone = fl.run(described(settings, "stacked"))
    assert len(alone.records) < 4 or "stop" not in TOGETHER[settings]
    for engine in ("sequential", "processes"):
        assert_close(fl.run(described(settings, engine)), alone)
    points = {str(seed): described(settings, "stacked", seed) for seed in (1, 0)}
    assert_close(fl.sweep(points)["0"], alone)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("settings", TOGETHER)
def test_a_resumed_run_comes_to_the_same_bytes(settings, engine, tmp_path):
    experiment = described(settings, engine)
    fl.run(experiment, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fl.run(experiment, tmp_path / "resumed", watch=Stop(1))
    fl.resume(tmp_path / "resumed", experiment=experiment)
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
    best = [tmp_path / name / "best.safetensors" for name in ("whole", "resumed")]
    assert best[0].exists() == ("evaluate" in TOGETHER[settings])
    if best[0].exists():
        assert best[0].read_bytes() == best[1].read_bytes()
