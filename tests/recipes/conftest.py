import pytest


@pytest.fixture(autouse=True)
def one_format(svg_alone: None) -> None:
    """Every figure of a recipe is drawn, once."""
