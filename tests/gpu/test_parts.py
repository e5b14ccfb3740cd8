import sys

import pytest

from tests.gpu import parts


def test_the_parts_of_a_script_are_together_all_of_it(monkeypatch):
    taken: list[int] = []
    for number in range(1, 4):
        monkeypatch.setenv(parts.PART, f"{number}/3")
        taken += parts.my_part(range(10))
    assert sorted(taken) == [*range(10)]
    monkeypatch.delenv(parts.PART)
    assert parts.my_part("abc") == "abc"


@pytest.mark.parametrize("status", [0, 3])
def test_what_failed_is_named_and_all_is_printed(status, capfd):
    """Each process knows its part, and one that fails keeps no other from running."""
    say = f"import os, sys; print('I am', os.environ['{parts.PART}']); sys.exit(%s)"
    found = {
        "broken 1/2": [sys.executable, "-c", say % status],
        "whole 2/2": [sys.executable, "-c", say % 0],
    }
    assert parts.side_by_side(found, 1) == bool(status)
    said = capfd.readouterr().out
    assert "I am 1/2" in said and "I am 2/2" in said and "## whole 2/2: passed" in said
    assert said.splitlines()[-1].endswith("failed: broken 1/2" if status else "all passed")
