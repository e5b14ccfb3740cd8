"""The schema of experiment files takes what Fedlens takes, and refuses what it refuses."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from fedlens.config.experiment import Experiment, chosen_by_name
from fedlens.config.explained import explain, schema
from fedlens.config.names import KINDS
from fedlens.config.options import in_words, options_of
from fedlens.recipes.store import read_packed

ROOT = Path(__file__).parents[2]
IN_LIBRARIES = {"models": ["timm:resnet18"]}
LEAST = {"dataset": "fashion-mnist-mini", "model": "lenet5", "rounds": 2}


@pytest.fixture(scope="module")
def checker():
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def stored():
    """The examples, and the experiments of all stored runs of the papers."""
    examples = [tomllib.loads(path.read_text()) for path in (ROOT / "examples").glob("*.toml")]
    packed = (read_packed(file)[1] for file in (ROOT / "results").rglob("*.json.xz"))
    runs = [run for cells in packed for cell in cells.values() for run in cell]
    return [*examples, *(run.experiment for run in runs)]


def test_every_experiment_that_was_run_is_taken(checker):
    found = stored()
    assert len(found) > 100
    for one in found:
        checker.validate(one)


TAKEN = [
    {"algorithm": "fedprox"},
    {"algorithm": ["scaffold", {"name": "clip", "norm": 1.0}]},
    {"algorithm": {"name": "fedprox", "mu": {"name": "cosine", "start": 0.1}}},
    {"local": {"lr": {"name": "exponential", "start": 0.1, "decay": 0.998}}},
    {"local": {"epochs": {"low": 1, "high": 3}, "optimizer": {"name": "adamw", "beta1": 0.8}}},
    {"model": "own.models:tiny", "clients": {"per_round": 0.1}},
    {"evaluate": {"on": ["test", "validation"], "at": [1, 2]}, "stop": {"accuracy": 0.5}},
    {"local": {"lr": 0, "momentum": 0.999, "clip": 1e-30, "epochs": 0.25, "batch_size": 1}},
    {"clients": {"count": 1, "per_round": 1, "holdout": 0}, "seed": 0, "stop": {"accuracy": 1}},
    {"augment": {"rotate": 40, "crop": 0}, "server": {"lr": 7}, "faults": {"dropped": 1}},
]


@pytest.mark.parametrize("more", TAKEN, ids=json.dumps)
def test_what_an_experiment_may_be_is_taken(checker, more, monkeypatch):
    checker.validate(LEAST | more)
    if "own.models:tiny" not in more.values():
        Experiment.of(LEAST | more)


REFUSED = [
    {"lr": 0.1},
    {"rounds": "two"},
    {"model": "lenet6"},
    {"local": {"lrr": 0.1}},
    {"algorithm": {"name": "fedprox", "nu": 0.1}},
    {"clients": {"partition": {"alpha": 0.5}}},
    {"precision": "fp16"},
    {"rounds": 0},
    {"seed": -1},
    {"local": {"lr": -0.1}},
    {"local": {"momentum": 1.0}},
    {"local": {"epochs": 0}},
    {"local": {"clip": 0}},
    {"clients": {"per_round": 1.5}},
    {"clients": {"count": 0}},
    {"evaluate": {"every": 0}},
    {"stop": {"accuracy": 1.1}},
    {"stop": {"seconds": 0}},
    {"faults": {"dropped": 2}},
    {"augment": {"crop": -1}},
]


@pytest.mark.parametrize("more", REFUSED, ids=json.dumps)
def test_what_an_experiment_may_not_be_is_refused(checker, more):
    assert not checker.is_valid(LEAST | more)
    with pytest.raises(ValueError, match=r".+"):
        Experiment.of(LEAST | more)


def test_three_keys_are_needed(checker):
    (problem,) = checker.iter_errors({"dataset": "fashion-mnist-mini", "model": "lenet5"})
    assert "'rounds' is a required property" in problem.message


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_from_the_source_is_what_the_functions_say(kind):
    functions = {**KINDS[kind], **{name: KINDS[kind][name] for name in IN_LIBRARIES.get(kind, ())}}
    for name, function in functions.items():
        read, imported = KINDS[kind].read(name), options_of(function)
        described = inspect.getdoc(function) or ""
        assert described in (read.doc, ""), name  # a recipe is described by its module
        assert read.options.keys() == imported.keys(), name
        for option, one in read.options.items():
            assert one.default == imported[option].default, (name, option)
            assert one.name == imported[option].name
            said = in_words(imported[option].annotation)
            assert in_words(one.annotation) == said, (name, option)


def test_what_another_library_has_under_a_name_is_explained():
    first, option = explain("model.timm:resnet18")
    assert first.startswith("model.timm:resnet18: A model of timm")
    assert option.startswith("  model.timm:resnet18.drop_rate: ")
    assert explain("model.timm:resnet18.drop_rate")[1:] == ["a number", "default: 0.0"]


def test_a_key_is_explained_with_its_default_and_its_choices():
    first, *rest = explain("local.optimizer")
    assert first.startswith("local.optimizer: how a client steps")
    assert rest[0] == 'default: "sgd"'
    assert "  adamw (beta1 = 0.9, beta2 = 0.999, eps = 1e-08)" in rest


def test_a_section_is_explained_key_by_key():
    lines = explain("clients")
    assert lines[0] == "clients"
    assert any(line.startswith("  clients.holdout: the share") for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_that_is_listed_is_explained(kind, fedlens):
    status, out, told = fedlens("list", kind)
    assert (status, told, len(out.splitlines())) == (0, "", len(KINDS[kind]))
    for line in out.splitlines():
        name, words = line.split(None, 1)
        about = explain(name)
        assert any(one.partition(": ")[2][:30] in words for one in about if name in one), name


def test_a_name_of_several_kinds_is_explained_for_each():
    lines = explain("cosine")
    assert [line.partition(": ")[0] for line in lines if not line.startswith(" ")] == [
        "local.lr.cosine",
        "local.anneal.cosine",
    ]
    assert explain("fedprox.mu") == explain("algorithm.fedprox.mu")
    others = ("local", "privacy", "aggregation")
    assert explain("clip")[-3:] == [f"see also: {one}.clip" for one in others]


def test_a_key_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(ValueError, match=re.escape("unknown key 'local.lrs': did you mean")):
        explain("local.lrs")
    with pytest.raises(ValueError, match=r"server\.lr"):
        explain("lr")
    with pytest.raises(ValueError, match="augment"):
        explain("foo.bar")


def test_an_option_of_a_name_is_explained_with_its_type_and_its_default():
    assert explain("algorithm.fedprox.mu") == [
        "algorithm.fedprox.mu: how hard it is held.",
        "a number, or a schedule",
        "default: 0.01",
    ]
    assert explain("algorithm.lambda-sum.lambda")[0].startswith("algorithm.lambda-sum.lambda: λ")
    said, kind, needed = explain("clients.partition.shards.per_client")
    assert said.endswith("cut into equal shards, `per_client` to a client at random (McMahan).")
    assert (kind, needed) == ("a whole number", "default: 2")
    assert explain("local.lr.cosine.start")[1:] == ["a number", "it must be given"]
    assert explain("dataset.folder.layout")[1:] == ["'class' or 'site/class'", "default: none"]
    first, *options = explain("algorithm.fedprox")
    assert first == "algorithm.fedprox: Hold each client near the model it was sent."
    assert len(options) == 4
    assert len(explain("clients.partition.alpha")) == 3 * 3  # three partitions have an alpha


@pytest.mark.parametrize("place", ["algorithm", "model", "loss", "local.optimizer"])
def test_of_every_option_something_is_said(place):
    for name, function in chosen_by_name()[place].items():
        for option in options_of(function):
            said = explain(f"{place}.{name}.{option}")[0]
            assert said.startswith(f"{place}.{name}.{option}: ")


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("algorithm.fedprox.uneve", "algorithm 'fedprox' has no option 'uneve': did you mean"),
        ("algorithm.fednova.mu", "algorithm 'fednova' has no option 'mu': it takes none"),
        ("algorithm.fedprx.mu", "unknown key 'algorithm.fedprx.mu': did you mean algorithm.fedpr"),
        ("dataset.sizes", "unknown key 'dataset.sizes': did you mean dataset.size?"),
        ("dataset.xyz", "unknown key 'dataset.xyz': choose one of fashion-mnist-mini, "),
        ("fedprox.nu", "algorithm 'fedprox' has no option 'nu': choose one of inexactness, mu"),
        ("hsu2020/table", "unknown key 'hsu2020/table': did you mean hsu2020/table"),
    ],
)
def test_an_option_that_is_not_there_is_told_in_one_line_with_the_nearest(fedlens, key, line):
    status, out, told = fedlens("explain", key)
    assert (status, out, told.count("\n")) == (2, "", 1)
    assert told.startswith(f"fedlens: {line}")


def test_the_commands_print_both(fedlens, tmp_path):
    assert fedlens("explain", "rounds") == (0, "rounds: how many rounds\n", "")
    status, out, _ = fedlens("schema", "--out", str(tmp_path / "fedlens.json"))
    assert (status, out) == (0, f"schema: {tmp_path / 'fedlens.json'}\n")
    assert json.loads((tmp_path / "fedlens.json").read_text(encoding="utf-8")) == schema()
