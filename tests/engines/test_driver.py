"""What workers of a cluster have of their driver: the same versions, and the user's own code."""

import importlib
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedlens.config.consent import importable, place_of_error
from fedlens.engines.messages import Driver


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A package, and a module that imports it; both are forgotten at the end."""
    (tmp_path / "sent_by_driver").mkdir()
    (tmp_path / "sent_by_driver" / "__init__.py").write_text("from sent_by_driver.half import half")
    (tmp_path / "sent_by_driver" / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "sent_too.py").write_text("from sent_by_driver import half\nQUARTER = half(0.5)\n")
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    forget()


def forget() -> None:
    for name in ("sent_too", "sent_by_driver", "sent_by_driver.half"):
        sys.modules.pop(name, None)


def test_a_worker_imports_what_its_driver_has_imported_without_the_files(own):
    with importable(own):
        importlib.import_module("sent_too")
    driver = Driver.here()
    forget()
    for file in own.rglob("*.py"):
        file.unlink()
    assert driver.set_up_worker() == ""
    assert importlib.import_module("sent_too").QUARTER == 0.25
    sent = importlib.import_module("sent_by_driver.half")
    assert sent.__file__ == str(own / "sent_by_driver" / "half.py")
    with pytest.raises(TypeError) as caught:
        sent.half("text")
    assert place_of_error(caught.value).startswith("half.py, line 2, in half: TypeError")


def test_what_the_driver_has_goes_before_another_file_of_that_name(own):
    with importable(own):
        importlib.import_module("sent_too")
        driver = Driver.here()
        forget()
        (own / "sent_too.py").write_text("QUARTER = 4\n")
        importlib.invalidate_caches()
        assert driver.set_up_worker() == ""
        assert importlib.import_module("sent_too").QUARTER == 0.25


def test_neither_libraries_nor_fedlens_are_sent():
    names = Driver.here().modules
    assert __name__ in names
    assert not [name for name in names if name.partition(".")[0] in ("fedlens", "torch", "pytest")]


def test_a_node_of_another_version_is_told_with_the_remedy(monkeypatch):
    driver, finders = Driver.here(), list(sys.meta_path)
    monkeypatch.setattr(torch, "__version__", "1.9.0+cpu")
    expected = driver.versions["torch"]
    assert driver.set_up_worker() == (
        f"{platform.node()} has torch 1.9.0, not {expected}: install the same on every node"
    )
    assert sys.meta_path == finders


def test_builds_of_one_version_for_other_devices_go_together(own, monkeypatch):
    driver = Driver.here()
    monkeypatch.setattr(torch, "__version__", f"{driver.versions['torch']}+cu999")
    assert driver.set_up_worker() == ""
