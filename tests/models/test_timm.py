"""Models of timm, by a stand-in with its interface, and by timm itself where it is installed."""

import re
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fedlens as fl
from fedlens.network.layers import group_norm, prepare
from fedlens.storage import reading


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: a batch normalisation with an activation in it."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def create_model(name: str, drop_rate: float, in_chans: int, num_classes: int, **size: Any):
    """A network of that interface; only a transformer takes the size of images."""
    if name == "vit" and size.pop("img_size") != (28, 28):
        raise RuntimeError("no such patches")
    assert not size
    return nn.Sequential(
        nn.Conv2d(in_chans, 4, 5, stride=4),
        BatchNormAct2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(drop_rate),
        nn.Linear(4, num_classes),
    )


@pytest.fixture
def library(monkeypatch) -> None:
    """timm, as far as it is used."""
    made = ModuleType("timm")
    made.__dict__.update(
        create_model=create_model,
        is_model=lambda name: name in ("net", "vit"),
        list_models=lambda: ["net", "vit"],
        get_pretrained_cfg=lambda name: SimpleNamespace(fixed_input_size=name == "vit"),
    )
    monkeypatch.setitem(sys.modules, "timm", made)


def described(model: Any, **more: Any) -> fl.Experiment:
    clients, local = {"count": 3, "per_round": 2}, {"batch_size": 7, "max_steps": 2, "epochs": 1}
    settings = {"clients": clients, "local": local, "rounds": 1, "device": "cpu", **more}
    return fl.Experiment(dataset="fashion-mnist-mini", model=model, **settings)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_models_of_timm_are_chosen_by_name(library, engine):
    for model in ("timm:net", {"name": "timm:vit", "drop_rate": 0.2}):
        assert fl.run(described(model, engine=engine)).status == "finished"


def test_a_name_that_timm_has_not_is_refused_with_one_it_has(library):
    with pytest.raises(ValueError, match="timm has no model 'nett': did you mean 'net'"):
        fl.run(described("timm:nett"))
    with pytest.raises(ValueError, match="depth"):
        described({"name": "timm:net", "depth": 3})


def test_without_timm_the_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r'needs timm.*"fedlens\[timm\]" "torch==\d'):
        fl.run(described("timm:net"))


@pytest.mark.parametrize("build", ["", "+cpu"])
def test_the_line_keeps_the_torch_that_is_here(monkeypatch, build):
    monkeypatch.setattr(reading, "version", lambda _: f"2.13.0{build}")
    line = reading.keeping_torch("fedlens[timm]")
    assert line == f'pip install "fedlens[timm]" "torch==2.13.0{build}"'


@pytest.fixture
def beside_another_torch(library, monkeypatch, tmp_path):
    """timm and a torchvision that was compiled for another torch, as files."""
    for name in ("timm", "torchvision", "torchvision._meta_registrations"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    monkeypatch.setitem(sys.modules, "stand_in", sys.modules["timm"])
    for name in ("timm", "torchvision", "torchvision._meta_registrations"):
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import _meta_registrations")
    (package / "_meta_registrations.py").write_text("raise RuntimeError('no operator nms')")
    (tmp_path / "timm.py").write_text("import torchvision\nfrom stand_in import *")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_models_need_no_operator_that_torchvision_compiles(beside_another_torch):
    assert fl.run(described("timm:net")).status == "finished"
    with pytest.raises(ValueError, match="did you mean 'net'"):
        fl.run(described("timm:nett"))


def test_beside_a_torchvision_that_cannot_be_imported_the_line_names_the_torch(
    beside_another_torch,
):
    (beside_another_torch / "torchvision" / "__init__.py").write_text("raise OSError('no CUDA')")
    with pytest.raises(ValueError, match=rf"\(no CUDA\).* torch {re.escape(torch.__version__)}"):
        fl.run(described("timm:net"))


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.slow
def test_an_installed_timm_trains():
    assert fl.run(described("timm:resnet18", engine="sequential")).status == "finished"


def test_its_batch_normalisation_with_an_activation_is_masked_and_keeps_both():
    torch.default_generator.manual_seed(0)
    plain = nn.Sequential(BatchNormAct2d(3))
    masked = prepare(plain)
    assert masked.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(5, 3, 2, 2)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    found = torch.func.functional_call(masked, {"0.mask": mask}, (x,))
    torch.testing.assert_close(found[:3], plain(x[:3]))
    with pytest.raises(ValueError, match="BatchNormAct2d"):
        group_norm(plain)
