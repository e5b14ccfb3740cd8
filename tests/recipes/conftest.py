from collections.abc import Iterator

import pytest

from tests.drawing import draw_svg_alone


@pytest.fixture(autouse=True, scope="module")
def one_format(some_picture: dict[str, bytes]) -> Iterator[None]:
    """Every figure of a recipe is drawn, once; also for what the tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        draw_svg_alone(patch, some_picture)
        yield
