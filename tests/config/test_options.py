import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlens.config.consent import importable
from fedlens.config.options import (
    ByName,
    Given,
    Named,
    call,
    check,
    did_you_mean,
    options_of,
    resolve,
)


@dataclass(frozen=True)
class Point:
    x: float = 0.0


def paint(
    wall: str,
    *,
    colour: Literal["red", "blue"],
    coats: int = 2,
    lambda_: float = 0.5,
    parts: tuple[int, ...] = (),
    size: int | None = None,
) -> tuple[Any, ...]:
    return wall, colour, coats, lambda_, parts, size


TOOLS = ByName("tool", "tests.config", {"paint": "test_options"})


def test_only_keyword_parameters_are_options():
    assert list(options_of(paint)) == ["colour", "coats", "lambda", "parts", "size"]


def test_options_are_checked_and_defaults_filled_in():
    resolved = resolve(options_of(paint), {"colour": "red", "lambda": 1, "parts": [1, 2]}, "wall")
    assert resolved == {
        "colour": "red",
        "coats": 2,
        "lambda": 1.0,
        "parts": (1, 2),
        "size": None,
    }
    assert type(resolved["lambda"]) is float


def test_a_function_is_called_with_options_named_as_in_a_file():
    options = {"colour": "blue", "lambda": 3.0}
    assert call(paint, "north", options=options) == ("north", "blue", 2, 3.0, (), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red", "coat": 1}, "wall has no option 'coat': did you mean 'coats'?"),
        ({"colour": "red", "xyz": 1}, "wall has no option 'xyz': choose one of coats, colour"),
        ({}, "wall needs 'colour': set colour = ..."),
        ({"colour": "rad"}, "wall: colour is 'rad': choose one of blue, red"),
        ({"colour": "red", "coats": "two"}, "wall: coats is 'two': expected a whole number"),
        ({"colour": "red", "coats": 2.0}, "wall: coats is 2.0: expected a whole number"),
        ({"colour": "red", "coats": True}, "wall: coats is True: expected a whole number"),
        ({"colour": "red", "lambda": "x"}, "wall: lambda is 'x': expected a number"),
        ({"colour": "red", "parts": 3}, "wall: parts is 3: expected a list"),
        ({"colour": "red", "parts": [1, "b"]}, "wall: parts is 'b': expected a whole number"),
        ({"colour": "red", "size": "big"}, "wall: size is 'big': expected a whole number"),
    ],
)
def test_a_wrong_option_is_refused_with_what_would_do(options, message):
    with pytest.raises(ValueError) as refused:
        resolve(options_of(paint), options, "wall")
    assert str(refused.value).startswith(message)


def test_a_function_without_options_says_so():
    with pytest.raises(ValueError, match="depth"):
        resolve({}, {"depth": 3}, "model 'flat'")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (1.0, int),
        ("1", int),
        (None, int),
        ([1], tuple[int, int]),
        ([1, 2.5], list[int]),
        (1, Literal["1"]),
        (True, Literal[1, 3]),
        ([], Literal["a"]),
        ("x", float | Tensor),
        ({}, list[int]),
        (3, Named),
        ({"options": 1}, Named),
        ({}, Named | Point),
        (3, Point),
        ("a", tuple[Named, ...]),
        (["a", 3], tuple[Named, ...]),
        (3, Given[str, Named]),
    ],
)
def test_a_value_of_another_kind_is_refused(value, kind):
    with pytest.raises(ValueError, match=r"^here is "):
        check(value, kind, "here")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (float | Tensor, "expected a number"),
        (int | None, "expected a whole number"),
        (int | float, "expected a number"),
        (Literal["low", "high"] | list[float], "expected 'low' or 'high' or a list"),
        (bool, "expected true or false"),
        (dict, "expected a table"),
        (tuple[Named, ...], "expected a name, or a list of names or tables ([[here]])"),
    ],
)
def test_what_was_expected_is_said_in_words_that_a_file_can_hold(kind, words):
    with pytest.raises(ValueError) as refused:
        check("x", kind, "here")
    assert str(refused.value) == f"here is 'x': {words}"


def test_a_table_may_stand_for_a_record_and_a_name_for_what_is_named():
    assert check({"x": 1}, Point, "here") == Point(1.0)
    assert check(["a", {"name": "b", "c": 2}], tuple[Named, ...], "here") == (
        Named("a"),
        Named("b", {"c": 2}),
    )
    assert check("a", Named | Point, "here") == Named("a")
    assert check(Point(), Named | Point, "here") == Point()
    with pytest.raises(ValueError, match=r"here\.z"):
        check({"z": 1}, Point, "here")
    with pytest.raises(ValueError, match=r"here\.x"):
        check({"x": "far"}, Point, "here")


def test_where_a_list_is_read_one_may_be_given():
    kind = Given[str | list[str], tuple[str, ...]]
    assert check("a", kind, "here") == check(["a"], kind, "here") == ("a",)
    with pytest.raises(ValueError, match=r"here is 3: expected a list"):
        check(3, kind, "here")


@given(st.integers(-(2**53), 2**53) | st.floats(-1e38, 1e38) | st.just(math.inf))
def test_a_number_may_be_written_without_a_point(number):
    assert check(number, float, "here") == number
    assert type(check(number, float, "here")) is float
    assert type(check(number, int | float, "here")) is type(number)


@pytest.mark.parametrize("kind", [int, float, int | None, int | float, tuple[int, ...]])
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_a_number_that_no_tensor_holds_is_refused(kind, number):
    fits = kind in (float, int | float) and abs(number) < 1e38
    given = [number] if kind == tuple[int, ...] else number
    if fits:
        assert check(given, kind, "here") == float(number)
    else:
        with pytest.raises(ValueError, match="here is"):
            check(given, kind, "here")
    with pytest.raises(ValueError, match="309"):
        check(1e308, float, "here")


def test_a_near_miss_is_told_the_name_and_a_wild_guess_the_choice():
    assert did_you_mean("rond", ["rounds", "seed"]) == "did you mean 'rounds'?"
    assert did_you_mean("zzz", ["b", "a"]) == "choose one of a, b"
    assert did_you_mean("zzz", []) == "there is none to choose from"


def test_a_function_is_found_by_name_or_by_import_path():
    assert TOOLS.find("paint") is paint
    assert TOOLS.find(f"{__name__}:paint") is paint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pant", "unknown tool 'pant': did you mean 'paint'?"),
        ("no_such_module:paint", "tool 'no_such_module:paint' cannot be imported (No module"),
        ("math:paint", "tool 'math:paint' cannot be imported (module 'math' has no"),
        (":paint", "tool ':paint' cannot be imported"),
        (".math:paint", "tool '.math:paint' cannot be imported"),
        ("math:pi", "tool 'math:pi' is 3.14"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, message):
    with pytest.raises(ValueError) as refused:
        TOOLS.find(name)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("def f(:", "(invalid syntax (brokenmodule.py, line 1))"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first)"),
        ("1/0", "(brokenmodule.py, line 1, in <module>: ZeroDivisionError: division by zero)"),
        ("import no_such", "line 1, in <module>: ModuleNotFoundError: No module named 'no_such')"),
    ],
)
def test_a_module_that_does_not_import_is_the_users_mistake(tmp_path, content, why):
    (tmp_path / "brokenmodule.py").write_text(f"{content}\n\ndef f(): ...\n")
    with importable(tmp_path), pytest.raises(ValueError, match="imported") as refused:
        TOOLS.find("brokenmodule:f")
    assert str(refused.value).endswith(f"{why}: fix it there")
    assert "\n" not in str(refused.value)


def test_folders_are_importable_only_for_a_while_and_hide_nothing_installed(tmp_path):
    (tmp_path / "json.py").write_text("raise AssertionError")
    before = list(sys.path)
    with pytest.raises(RuntimeError), importable(tmp_path):
        assert sys.path == [*before, str(tmp_path)]
        raise RuntimeError
    assert sys.path == before
