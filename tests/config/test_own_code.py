"""Papers and models of one's own that lack something: a line with the place, on every engine."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedlens as fl
from fedlens.algorithm.pieces.losses import focal
from fedlens.config import consent
from fedlens.setup import build
from fedlens.storage.run_files import RunFailed

OWN = """
from dataclasses import replace

from fedlens import Algorithm, paper
from fedlens.core import Upload


def keeps(local):
    update = {n: local.params[n] - local.anchor[n] for n in local.params}
    return Upload(update=update, keep={"seen": update})


@paper
def forgetful(base: Algorithm) -> Algorithm:
    return replace(base, upload=keeps)


@paper
def unsaid(base: Algorithm) -> Algorithm:
    return replace(base, combine=keeps)


def plain(base: Algorithm, mu: float = 0.1) -> Algorithm:
    return base


from torch.nn.functional import cross_entropy


def of_torch(logits, labels):
    return cross_entropy(logits, labels)


def one_mean(logits, labels, *, scale: float = 1.0):
    return scale * logits.mean()


def detached(logits, labels):
    return logits.detach().sum(-1)


def of_lists(logits, labels):
    return logits.tolist()


def of_one(logits):
    return logits.sum(-1)


def right(logits, labels, *, scale: float = 1.0):
    return scale * -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_papers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_papers", None)


def experiment(engine: str = "sequential", **settings: object) -> fl.Experiment:
    tables = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1, "engine": engine}
    return fl.Experiment.of({**tables, "clients": {"count": 20, "per_round": 2}, **settings})


@pytest.mark.parametrize("engine", ["sequential", "stacked", "processes"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("forgetful", r"keeps \(own_papers.py, line 8\) keeps 'seen', .*: add memory="),
        ("unsaid", r"unsaid: its combine, keeps \(own_papers.py, line 8\), is not a .*Combine: "),
        ("plain", r"own_papers:plain', plain \(own_papers.py, line 23\), is not a paper: put @pap"),
    ],
)
def test_what_a_paper_of_ones_own_lacks_is_told_with_its_place(engine, name, line, tmp_path):
    with pytest.raises((ValueError, RunFailed), match=line):  # before a run, or in it
        fl.run(experiment(engine, algorithm=f"own_papers:{name}"), tmp_path / "run")


class WithAttention(nn.Module):
    def __init__(self, dropout: float, adds_zeros: bool = False) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 14, stride=14)
        self.block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.block.self_attn = nn.MultiheadAttention(
            8, 2, dropout, batch_first=True, add_zero_attn=adds_zeros
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.patch(x).flatten(2).transpose(1, 2)).mean(1))
        return out


def test_a_module_that_draws_by_itself_is_named(tmp_path):
    described = experiment()
    with pytest.raises(ValueError, match="self_attn"):
        build(fl.Experiment(**{**vars(described), "model": WithAttention(0.1, adds_zeros=True)}))
    build(fl.Experiment(**{**vars(described), "model": WithAttention(0.0, adds_zeros=True)}))


def test_a_transformer_trains_with_its_own_dropout():
    """The same one by one and side by side, and other than without it."""
    torch.manual_seed(0)
    model = WithAttention(0.5)

    def trained(engine: str) -> fl.Result:
        settings = vars(experiment(engine, precision="fp64", local={"batch_size": 50}))
        return fl.run(fl.Experiment(**{**settings, "model": model}))

    alone, together = trained("sequential"), trained("stacked")
    for name, tensor in alone.model.items():
        torch.testing.assert_close(together.model[name], tensor, rtol=1e-9, atol=1e-9)
    model.block.self_attn.dropout = 0.0
    assert abs(trained("sequential").final["train_loss"] - alone.final["train_loss"]) > 1e-6


@pytest.mark.parametrize(
    ("optimizer", "lr", "warned"),
    [("adam", 0.1, True), ("adamw", 0.001, False), ("sgd", 0.1, False)],
)
def test_a_rate_of_sgd_for_adam_is_told_of(optimizer, lr, warned, caplog):
    with caplog.at_level(logging.WARNING, "fedlens"):
        build(experiment(local={"optimizer": optimizer, "lr": lr}))
    assert [record.getMessage() for record in caplog.records if "SGD" in record.message] == [
        f"local.lr is {lr:g}, which is SGD's: a step of {optimizer} is about that long in every "
        "weight, so try 0.001"
    ] * warned


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("of_torch", r"cannot take logits \[2, 3, 10\] .*own_papers.py, line .*: fix it there"),
        ("one_mean", r"one_mean \(own_papers.py, line \d+\), gave a tensor \[\] for .* no mean"),
        ("detached", "gave losses without a gradient"),
        ("of_lists", "gave list for"),
        ("of_one", "cannot take logits .*: change its parameters"),
    ],
)
def test_a_loss_of_ones_own_is_tried_before_anything_is_written(
    name: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"loss 'own_papers:{name}'.*{line}"):
        fl.run(experiment(loss=f"own_papers:{name}"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_with_options_that_gives_a_mean_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match="one_mean"):
        build(experiment(loss={"name": "own_papers:one_mean", "scale": 2.0}))


def test_a_right_loss_of_ones_own_is_cross_entropy() -> None:
    own = fl.run(experiment(loss={"name": "own_papers:right", "scale": 1.0})).final["test_loss"]
    assert own == pytest.approx(fl.run(experiment()).final["test_loss"])


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("def nets(): ...", True),
        ("def net(): ...", False),
        ("from elsewhere import other as net", False),
        ("from elsewhere import *", False),
        ("globals()['n' + 'et'] = print", False),
        ("def __getattr__(name): return print", False),
    ],
)
def test_what_a_module_lacks_is_seen_without_importing_it(text, lacking, tmp_path):
    (tmp_path / "not_imported.py").write_text(f"import elsewhere\n{text}\n")
    assert consent.lacks("not_imported", "net") == lacking
    assert "not_imported" not in sys.modules


def test_a_name_that_a_module_got_later_is_found(tmp_path):
    (tmp_path / "own_papers.py").write_text("scale = 1.0\n")
    with pytest.raises(ValueError, match="has no attribute 'later'"):
        experiment(loss="own_papers:later")
    importlib.import_module("own_papers").__dict__["later"] = focal
    assert experiment(loss="own_papers:later").loss.name == "own_papers:later"
