"""What all tests share."""

import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.command_line import EXPERIMENT, Ended

# No test depends on how fast a machine is.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, help="Run tests in another order, by this seed.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


# A shell that has tests run in the background lets them ignore Ctrl-C, and so all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws from torch does not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def some_picture() -> dict[str, bytes]:
    """A picture in each format."""
    from fedlens.report.blocks import Curves, Line
    from fedlens.report.draw import pictures

    return pictures(Curves(title="Any", lines=[Line("any", [1, 2], [0.0, 1.0])]))


@pytest.fixture
def quick_pages(some_picture: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages with one and the same picture, for tests that look at something else.

    To draw all of a page takes two seconds, ten times as long as a small run.
    """

    def plain(_: object, formats: Iterable[str]) -> dict[str, bytes]:
        return {kind: some_picture[kind] for kind in formats}

    monkeypatch.setattr("fedlens.report.draw.pictures", plain)


@pytest.fixture
def here(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    quick_pages: None,
) -> Iterator[Path]:
    """An empty place with one experiment, and nothing of whoever runs the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    for name in ("FEDLENS_DATA", "FEDLENS_MIRROR", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    elsewhere = str(tmp_path_factory.mktemp("tmp"))  # where tracebacks of internal errors go
    monkeypatch.setenv("TMPDIR", elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", elsewhere)
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def fedlens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """The command, in this process."""
    from fedlens.cli import main as cli

    def command(*words: object) -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedlens", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    return command
