"""What the docs say is so: their code runs, their tables are the code's, their links lead on.

A block that begins with the comment `# name.py` or `# name.toml` is saved under that name, for
the blocks after it; the tests in a saved module are called.
"""

import functools
import importlib
import inspect
import json
import re
import shlex
import shutil
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import torch
from PIL import Image

import fedlens as fl
from fedlens.algorithms import ALGORITHMS
from fedlens.config.experiment import Aggregation, Privacy, Stop, as_plain
from fedlens.config.names import ANNEALS, DEVICES, LOSSES, METRICS, OPTIMIZERS, OUTCOMES, SCHEDULES
from fedlens.config.options import options_of
from fedlens.config.signatures import words_of
from fedlens.data import DATASETS
from fedlens.data.partitions import PARTITIONS
from fedlens.data.published import PUBLISHED
from fedlens.fleet.terms import Terms, for_fleet
from fedlens.models import MODELS
from fedlens.report import report
from fedlens.rounds.reports import Faults, Reporting
from fedlens.setup import partition
from fedlens.setup.data import load_dataset
from tests.command_line import forget_modules_of

ROOT = Path(__file__).parents[1]
README, EXPERIMENTS = ROOT / "README.md", ROOT / "docs" / "experiments.md"
TRAINING, MEASURES, RUNS = (ROOT / "docs" / f"{n}.md" for n in ("training", "measures", "runs"))
REFERENCE = ROOT / "docs" / "reference.md"
FAULTS = ROOT / "docs" / "faults.md"
SCHEDULES_PAGE = ROOT / "docs" / "schedules.md"
DATA, PARTITIONS_PAGE = ROOT / "docs" / "data.md", ROOT / "docs" / "partitions.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
RECORDS = (
    *((FAULTS, Faults), (FAULTS, Reporting), (SCHEDULES_PAGE, Stop)),
    (ROOT / "docs" / "privacy.md", Privacy),
    (ROOT / "docs" / "secure.md", Aggregation),
)
"""Tables of an experiment that may be missing, and the page with their keys."""
REQUIRED = {"dataset": "fashion-mnist-mini", "model": "linear", "rounds": 1}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Block(NamedTuple):
    language: str
    text: str


def blocks(page):
    found = re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [Block(*block) for block in found]


def prose(page):
    return re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def table(page, first):
    """The rows of the tables of a page whose first column is headed `first`."""
    rows = []
    for lines in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        head, _, *body = [[c.strip() for c in line.split("|")[1:-1]] for line in lines.splitlines()]
        if head[0] == first:
            rows += [[cells[0].strip("`"), *cells[1:]] for cells in body]
    assert rows, f"{page.name} has no table of {first}"
    return rows


def in_backticks(text):
    return re.findall(r"`([^`\n]+)`", text)


@pytest.fixture
def place(tmp_path, monkeypatch, quick_pages):
    """A folder to work in, with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    pixels = np.random.default_rng(0).integers(256, size=(24, 40, 40, 3), dtype=np.uint8)
    lines = ["path,label,client"]
    for i, picture in enumerate(pixels):
        label, client = ("cat", "dog")[i % 2], ("ann", "ben")[i // 2 % 2]
        file = tmp_path / "photos" / label / f"{i // 2}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(file)
        lines.append(f"{file.relative_to(tmp_path)},{label},{client}")
    (tmp_path / "photos.csv").write_text("\n".join(lines))
    own = (
        'dataset = { name = "csv", path = "photos.csv", size = 32 }\nmodel = "linear"\nrounds = 1\n'
    )
    (tmp_path / "hospitals.toml").write_text(own)
    numbers = np.arange(24) % 2
    gray = pixels[..., 0]
    np.savez("digits.npz", x_train=gray, y_train=numbers, x_test=gray, y_test=numbers)
    yield tmp_path
    forget_modules_of(tmp_path)


def saved(text):
    """The name under which a block is saved, if it has one."""
    name = re.match(r"# (\S+\.(?:py|toml))\n", text)
    if name is None:
        return None
    Path(name[1]).write_text(text)
    return Path(name[1])


def check_python(text, namespace):
    file = saved(text)
    if file is None:
        exec(compile(text, "a block", "exec"), namespace)
        return
    importlib.invalidate_caches()
    for name, value in vars(importlib.import_module(file.stem)).items():
        if name.startswith("test_"):
            value()


def check_toml(text, _namespace):
    """It is an experiment, or a part of one; and its clients can be given their examples."""
    saved(text)
    described = fl.Experiment.of(REQUIRED | tomllib.loads(text))
    if described.dataset.name == "at-sites":
        Terms.of(for_fleet(described), load_dataset(described.dataset, None))
    elif described.dataset.name not in PUBLISHED:
        partition(described)


def check_sh(text, _namespace):
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert re.search(
                rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
        elif words != ["source", ".venv/bin/activate"]:
            assert words[0] == "fedlens", line
            check_command(words[1:])


@functools.cache
def command_line():
    with warnings.catch_warnings():
        # Typer uses names that click is about to give up.
        warnings.simplefilter("ignore", DeprecationWarning)
        import typer

        from fedlens.cli import main as cli

        return typer.main.get_command(cli.app_of())


def command_for(words):
    """The command that is meant, and the words that are left for it."""
    command = command_line()
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"fedlens has no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_command(words):
    command, rest = command_for(words)
    given = command.make_context("fedlens", rest).params
    if "experiment" in given:
        fl.Experiment.read(given["experiment"], given["overrides"] or [])


CHECKS = {
    "python": check_python,
    "toml": check_toml,
    "sh": check_sh,
    "": lambda *_: None,
}


def test_every_page_is_in_the_contents_of_the_site():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {line for line in index.splitlines() if re.fullmatch(r"[a-z-]+", line)}
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    marks = re.findall(r"^:[a-z]+-[a-z]+: (['\"])(.+)\1$", index, re.MULTILINE)
    assert len(marks) == 2 and all(text in README.read_text("utf-8") for _, text in marks)


@every_page
@pytest.mark.usefixtures("place")
def test_every_block_of_a_page_works(page):
    namespace = {"__name__": "page"}
    for block in blocks(page):
        CHECKS[block.language](block.text, namespace)


@every_page
def test_every_command_named_in_a_page_exists(page):
    for words in map(str.split, in_backticks(prose(page))):
        if words[0] == "fedlens" and words[1:]:
            command_for(words[1:])
        if words[0] == "make":
            check_sh(" ".join(words), {})


@every_page
def test_every_link_of_a_page_leads_somewhere(page):
    text = prose(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
            assert anchor in [heading.replace(" ", "-") for heading in plain], target


def test_every_test_named_in_the_matrix_of_faults_exists():
    for name in re.findall(r"`([\w/]+\.py|fuzzing/)`", prose(ROOT / "docs" / "reliability.md")):
        assert (ROOT / "tests" / name).exists(), name


def test_the_readme_shows_the_quickstart_as_it_is():
    shown = [tomllib.loads(block.text) for block in blocks(README) if block.language == "toml"]
    assert shown == [
        tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text(encoding="utf-8"))
    ]


def keys(record=None, prefix=""):
    """Every key of an experiment, with its field."""
    record = record or fl.Experiment.of(REQUIRED)
    for f in fields(record):
        value = getattr(record, f.name)
        if is_dataclass(value) and not isinstance(value, fl.Named):
            yield from keys(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f


def test_the_keys_documented_are_the_keys_there_are():
    assert sorted(row[0] for row in table(EXPERIMENTS, "key")) == sorted(key for key, _ in keys())


def test_the_defaults_documented_are_the_defaults():
    documented = {row[0]: row[2].strip("`") for row in table(EXPERIMENTS, "key")}
    standard = fl.Experiment.of(REQUIRED)
    for key, f in keys():
        default = documented[key]
        assert (default == "required") == (f.default is MISSING), key
        assert (default == "none") == (f.default is None), key
        if default not in ("required", "none"):
            given = tomllib.loads(f"{key} = {default}")
            assert fl.Experiment.of(REQUIRED | given) == standard, key


def test_the_meanings_documented_are_those_below_the_fields():
    """Below each field stands what its row in the docs says."""
    for key, f in keys():
        section, _, name = key.rpartition(".")
        standard = fl.Experiment.of(REQUIRED)
        kind: Any = type(getattr(standard, section) if section else standard)
        words = words_of(kind)[name]
        assert words == next(row[3] for row in table(EXPERIMENTS, "key") if row[0] == key), f
    for page, record in RECORDS:
        begins = {Faults: "the chance that ", Stop: "the run is over when "}.get(record, "")
        for name, _, meaning in table(page, record.__name__.lower()):
            assert words_of(record)[name] == begins + meaning


def documented_options(page, first, column):
    """By name: each option with its default, None where it has none."""
    found = {}
    for row in table(page, first):
        options = {}
        for text in in_backticks(row[column]):
            option, _, default = text.partition(" = ")
            options[option] = tomllib.loads(f"default = {default}")["default"] if default else None
        found[row[0]] = options
    return found


def options_in_code(registry):
    nothing = (inspect.Parameter.empty, None)
    return {
        name: {
            option: None if p.default in nothing else p.default
            for option, p in options_of(function).items()
        }
        for name, function in registry.items()
    }


def test_the_options_documented_are_the_options_there_are():
    assert documented_options(REFERENCE, "algorithm", 3) == options_in_code(ALGORITHMS)
    assert documented_options(PARTITIONS_PAGE, "partition", 1) == options_in_code(PARTITIONS)
    assert documented_options(FAULTS, "devices", 1) == options_in_code(DEVICES)
    assert documented_options(TRAINING, "optimizer", 1) == options_in_code(OPTIMIZERS)
    assert documented_options(SCHEDULES_PAGE, "anneal", 1) == options_in_code(ANNEALS)
    assert documented_options(TRAINING, "loss", 1) == options_in_code(LOSSES)
    assert documented_options(MEASURES, "metric", 1) == options_in_code(METRICS)
    models = {name: options for name, options in options_in_code(MODELS).items() if options}
    assert documented_options(EXPERIMENTS, "model", 1) == models
    published = list(PUBLISHED)
    datasets = options_in_code(DATASETS)
    own = {name: datasets[name] for name in ("folder", "csv", "npz", "hugging-face", "at-sites")}
    assert documented_options(DATA, "your own", 2) == own
    named = documented_options(DATA, "named", 3)
    assert named == {name: datasets[name] for name in ("fashion-mnist-mini", *published)}


def test_the_reference_lists_what_is_inside():
    registries: dict[str, Iterable[str]] = {
        "algorithm": ALGORITHMS,
        "partition": PARTITIONS,
        "model": MODELS,
        "devices": DEVICES,
        "schedule": SCHEDULES,
        "data set": DATASETS,
    }
    for first, registry in registries.items():
        assert [row[0] for row in table(REFERENCE, first)] == list(registry)


@pytest.mark.parametrize(("page", "record"), RECORDS)
def test_the_keys_of_tables_that_may_be_missing_are_documented_with_their_defaults(page, record):
    rows = table(page, record.__name__.lower())
    for name, default, _ in rows:
        expected = as_plain(next(f.default for f in fields(record) if f.name == name))
        given = None if default == "none" else tomllib.loads(f"x = {default.strip('`')}")["x"]
        assert given == expected, name
    assert [row[0] for row in rows] == [f.name for f in fields(record)]


def test_every_outcome_is_explained():
    explained = [name for row in table(FAULTS, "outcome") for name in in_backticks(f"`{row[0]}`")]
    assert explained == list(OUTCOMES)


def test_the_reference_counts_parameters_right():
    for name, count, shape, _ in table(REFERENCE, "model"):
        with torch.device("meta"):
            module = MODELS[name](tuple(map(int, shape.split("×"))), 10)
        found = sum(p.numel() for p in module.parameters())
        assert f"{found:,}" == count, name


def test_the_run_folder_holds_what_is_documented(tmp_path, quick_pages):
    described = fl.Experiment.of(
        REQUIRED | {"clients": {"holdout": 0.2}, "evaluate": {"on": ["test", "train"]}}
    )
    folder = tmp_path / "run"
    fl.run(described, folder)
    report([folder])
    words = in_backticks(prose(RUNS) + prose(MEASURES))
    for file in folder.iterdir():
        assert file.name in words or f"{file.name}/" in words
    for name in (
        "manifest.json",
        "partition.json",
        "summary.json",
        "evaluation.json",
        "rounds.jsonl",
    ):
        for key in json.loads((folder / name).read_text(encoding="utf-8")):
            of_test = key.replace("train_", "test_") if key != "train_set_loss" else key
            assert key in words or of_test in words, f"{name}: {key}"


def test_measured_numbers_say_which_code_and_which_command_they_come_from():
    files = [f for f in ROOT.glob("results/*/*.json") if f.name != "index.json"]
    assert files
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["revision"] and found["command"], file


def test_the_tree_of_the_architecture_page_is_that_of_the_code():
    tree = next(b.text for b in blocks(ARCHITECTURE) if b.text.startswith("src/fedlens/"))
    path: list[str] = []
    named = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.split()[0]]
        named.append("".join(path))
    for name in named:
        assert (ROOT / name).exists(), name
    listed = {n.rpartition("/")[0] + "/" for n in named if n.endswith(".py")}
    whole = [n for n in named if n.endswith("/") and n not in listed]
    for file in ROOT.glob("src/fedlens/**/*.py"):
        name = file.relative_to(ROOT).as_posix()
        covered = name in named or any(name.startswith(folder) for folder in whole)
        assert covered or file.name == "__init__.py", f"{name} is not in the tree"
