"""What all tests share."""

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.command_line import EXPERIMENT, Ended, forget_modules_of
from tests.drawing import draw_svg_alone

# No test depends on how fast a machine is.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


ORDER = "FEDLENS_TEST_ORDER"  # the seed of the order, for the processes that pytest-xdist starts


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Run tests in the order of this seed; without it the order is a new one each time."
    parser.addoption("--order", type=int, help=text)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--order")
    if chosen is not None or ORDER not in os.environ:
        os.environ[ORDER] = str(random.randrange(10**6) if chosen is None else chosen)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test depends on those before it. Those of a file stay together, to share its fixtures.

    Slow ones come first: at the end, one process would wait for the other.
    """
    rng = random.Random(int(os.environ[ORDER]))
    places = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
    rng.shuffle(items)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, places[item.path]))


def pytest_collection_finish() -> None:
    """What all modules hold stays to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(f"in the order of --order {os.environ[ORDER]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Elsewhere than on Linux there is no engine that forks: tests that come to it are skipped."""
    try:
        yield
    except ValueError as error:
        if sys.platform != "linux" and "needs Linux" in str(error):
            pytest.skip(str(error))
        raise


# A shell that has tests run in the background lets them ignore Ctrl-C, and so all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws from torch does not depend on which tests ran before."""
    import torch  # here: the process that hands tests out to others has no use for it

    torch.default_generator.manual_seed(0)  # `torch.manual_seed` tells every kind of GPU, too


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_disks() -> Iterator[None]:
    """What a process has written outlives it without: only a machine that stops would lose it.

    Tests that look at when files are synced put something else in its place.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Approved code is not written to the settings of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A Ray cluster of this process's own, on all cores."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from fedlens.engines import cluster

    cluster.connect()
    yield
    cluster.disconnect()


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
def svg_alone(some_picture: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose figures are drawn as SVG; their PNG and PDF files hold some picture."""
    draw_svg_alone(monkeypatch, some_picture)


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
    forget_modules_of(tmp_path)


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
