"""What a notebook shows while a run trains, by the display of IPython, and one handle of ours."""

from base64 import b64decode

import pytest

from fedlens.runs import progress

pytest.importorskip("IPython")


class Handle:
    """What `display(..., display_id=True)` gives: it keeps what it was told to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, page) -> None:
        self.shown.append(page.data)


@pytest.fixture
def handle(monkeypatch):
    from IPython import display

    found = Handle()
    monkeypatch.setattr(display, "display", lambda *_, **__: found)
    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    return found


def words_of(page: str) -> str:
    return b64decode(page.partition("base64,")[2].partition('"')[0]).decode()


def test_a_run_changes_one_place_and_prints_nothing(handle, capsys):
    with progress.in_rounds("first <run>", 2) as watch:
        for number, accuracy in ((1, 0.2), (2, 0.6)):
            watch({"round": number, "train_loss": 1.0, "test_accuracy": accuracy})
    assert capsys.readouterr() == ("", "")
    assert "first &lt;run&gt;" in handle.shown[0] and "<img" not in handle.shown[0]
    assert "round 2/2" in handle.shown[-1] and "60.0%" in handle.shown[-1]
    assert "Test accuracy" in words_of(handle.shown[-1])


def test_points_of_a_sweep_are_curves_by_name_and_losses_where_nothing_was_tested(handle):
    with pytest.raises(KeyboardInterrupt), progress.in_rounds("a", 4) as watch:
        for number, point in enumerate(("lr=0.1", "lr=0.2"), 1):
            watch(
                {"round": 1, "done": number, "left": 4 - number, "point": point, "train_loss": 1.0}
            )
        raise KeyboardInterrupt
    drawn = words_of(handle.shown[-1])
    assert "lr=0.1" in drawn and "lr=0.2" in drawn and "Train loss" in drawn
