from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawing import draw_svg_alone


@pytest.fixture(autouse=True, scope="module")
def one_format(some_picture: dict[str, bytes]) -> Iterator[None]:
    """Every figure of a recipe is drawn, once; also for what the tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        draw_svg_alone(patch, some_picture)
        yield


@pytest.fixture
def nothing_of_whoever_runs_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their data sets nor what they have fetched."""
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
