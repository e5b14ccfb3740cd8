import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.storage.tables import apply_override, parse_axis, read_tables, to_toml


def overridden(content: dict[str, Any], *overrides: str) -> dict[str, Any]:
    for override in overrides:
        apply_override(content, override)
    return content


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("key=3", 3),
        ("key=0.5", 0.5),
        ("key=1e-3", 0.001),
        ("key=inf", math.inf),
        ("key=true", True),
        ("key=plain-name", "plain-name"),
        ("key=my_module:function", "my_module:function"),
        ("key='12'", "12"),
        ('key="a b"', "a b"),
        ("key=a=b", "a=b"),
        ('key=["test", "train"]', ["test", "train"]),
        ("key={ name = 'x', alpha = 1 }", {"name": "x", "alpha": 1}),
        (" key = 3", 3),
        ("key=", ""),
        ("key=/some/path with spaces", "/some/path with spaces"),
    ],
)
def test_a_value_is_read_as_toml_and_else_as_text(override, value):
    assert overridden({}, override) == {"key": value}


def test_keys_with_dots_reach_into_tables_and_make_them():
    content = {"clients": {"count": 5, "partition": "dirichlet"}, "model": {"name": "cnn"}}
    overridden(content, "clients.count=7", "clients.partition.alpha=0.1", "model.padding=same")
    overridden(content, "local.lr=1")
    assert content == {
        "clients": {"count": 7, "partition": {"name": "dirichlet", "alpha": 0.1}},
        "model": {"name": "cnn", "padding": "same"},
        "local": {"lr": 1},
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedprox",
        {"name": "fedprox"},
        ["fedavg", "fedprox"],
        [{"name": "fedavg"}, {"name": "fedprox", "mu": 5}],
    ],
)
def test_an_algorithm_is_overridden_by_its_name_however_it_was_written(algorithm):
    content = overridden({"algorithm": algorithm}, "algorithm.fedprox.mu=0.1")
    assert content["algorithm"][-1] == {"name": "fedprox", "mu": 0.1}


def test_an_algorithm_by_import_path_is_overridden_too():
    content = overridden({}, "algorithm=my.module:rule", "algorithm.my.module:rule.mu=2")
    assert content["algorithm"] == [{"name": "my.module:rule", "mu": 2}]


@pytest.mark.parametrize(
    ("content", "override", "message"),
    [
        ({}, "rounds", "'rounds' is not an override: write key=value"),
        ({}, "=3", "'=3' is not an override: write key=value"),
        ({"rounds": 1}, "rounds.x=2", "rounds.x cannot be set: rounds is 1, not a table"),
        ({}, "algorithm.fedprox.mu=1", "no algorithm 'fedprox': put algorithm=fedprox before it"),
        ({"algorithm": [1]}, "algorithm.fedprox.mu=1", "no algorithm 'fedprox'"),
        ({"algorithm": ["fedavg"]}, "algorithm.mu=1", "algorithm.mu cannot be set"),
    ],
)
def test_an_override_that_means_nothing_is_refused(content, override, message):
    with pytest.raises(ValueError) as refused:
        apply_override(content, override)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"rounds = = 3", "is not valid TOML: "),
        ("a.toml", b"rounds = 3\nmodel = linear # a name", 'write model = "linear", text has'),
        ("a.json", b"{", "is not valid JSON: "),
        ("a.json", b"[1]", "holds no table: write keys and values"),
        ("a.toml", b"\xff\xfe", "it is not text"),
        ("missing.toml", None, "cannot read the experiment"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read_tables(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_in_the_place_of_an_experiment_is_told_how_it_goes_on(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=f"it is a run: `fedlens resume {tmp_path}` goes on with"):
        read_tables(tmp_path)


# What UTF-8 can write down: every character but lone surrogates.
text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = text | st.integers() | st.floats(allow_nan=False) | st.booleans()
values = scalars | st.lists(scalars, max_size=3)
options = st.dictionaries(text.filter(lambda key: key != "name"), values, max_size=3)
named = st.builds(lambda name, more: {"name": name, **more}, text, options)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), values | named, max_size=3),
    st.dictionaries(
        st.from_regex(r"[a-z_]+", fullmatch=True), values | named, min_size=1, max_size=3
    ),
    st.lists(named, min_size=1, max_size=3),
)
def test_toml_is_read_back_as_it_was_written(top, section, listed):
    tables = top | {"Section": section, "Listed": listed}
    section.pop("name", None)
    assert tomllib.loads(to_toml(tables)) == tables


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("a=1,0.5,x", [1, 0.5, "x"]),
        ('a=fedavg,["fedprox", "fedavgm"]', ["fedavg", ["fedprox", "fedavgm"]]),
        ("a=x,{name='b', of=[1, 2]},true", ["x", {"name": "b", "of": [1, 2]}, True]),
        ('a=x,"y, z"', ["x", "y, z"]),
    ],
)
def test_an_axis_is_split_at_the_commas_between_its_values(axis, values):
    assert parse_axis(axis) == ("a", values)


@pytest.mark.parametrize(
    ("named", "key", "remedy"),
    [
        ("rfa:rfa", "algorithm.rfa.steps=5", "did you mean 'rfa:rfa'?"),
        ("fedprox", "algorithm.fedprx.mu=1", "did you mean 'fedprox'?"),
        ("fedavg", "algorithm.rfa.steps=5", "put algorithm=rfa before it"),
    ],
)
def test_an_algorithm_that_is_not_there_is_told_with_the_one_that_was_meant(named, key, remedy):
    with pytest.raises(ValueError, match="algorithm") as refused:
        apply_override({"algorithm": named}, key)
    assert str(refused.value).endswith(remedy)


def test_a_file_may_begin_with_the_mark_that_editors_on_windows_write(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("rounds = 3\n", encoding="utf-8-sig")
    assert read_tables(file) == {"rounds": 3}
