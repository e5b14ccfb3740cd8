"""What commands import: nothing that they do not use."""

import os
import subprocess
import sys

import pytest

from fedlens.config import names
from fedlens.fleet.log import Log
from tests.report.run_folders import make_run

HEAVY = {"torch", "numpy", "matplotlib", "jinja2", "safetensors", "PIL", "sympy", "rich"}

COMMAND = """
import sys
from fedlens.cli.main import main

sys.argv = ["fedlens", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(*sys.modules, file=sys.stderr)
    sys.exit(end.code)
"""

WITHOUT_OTHERS = """
import sys

for name in ("sympy", "timm", "datasets", "pandas"):
    sys.modules[name] = None  # so that whoever imports it fails: a worker, too

import fedlens as fl

for engine in ("sequential", "stacked", "processes"):
    result = fl.run(
        fl.Experiment(
            dataset="fashion-mnist-mini",
            model="lenet5",
            rounds=1,
            engine=engine,
            device="cpu",
            clients=fl.Clients(count=500, per_round=3),
            evaluate=fl.Evaluate(on=()),
        )
    )
    print(engine, result.status)
"""


def imported_by(*arguments: str, **environment: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    assert done.stdout
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    "arguments",
    [
        *("--help", "--version", "run --help", "reproduce --help"),
        *("list", "list recipes", *(f"list {kind} --long" for kind in names.KINDS)),
        *("explain local.lr", "explain clients", "explain algorithm.fedprox.mu", "schema"),
    ],
)
def test_help_lists_and_explanations_import_nothing_large(arguments):
    assert not imported_by(*arguments.split()) & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        *("run a.toml local.lrr=1", "run a.toml rounds=two", "run a.toml algorithm.fedprox.nu=1"),
        *("run a.toml model=resnet50", "run a.toml clients.partition=dirichlt", "run b.toml"),
        *("sweep a.toml --grid local.lr=0.1,x", "partition a.toml clients.count=0"),
        *("compare a.toml a2.toml", "explain local.lrr"),
        *("privacy plan a.toml --noise 0", "privacy plan a.toml --epsilon 8 --delta 0.1"),
        *("run a.toml model=mine:nte", "run a.toml algorithm=mine:", "run a.toml loss=nowhere:f"),
        *("run a.toml model=timm:", "run a.toml model=timm:vit model.depth=3"),
        *(f"fleet {verb} b.toml" for verb in ("serve", "try", "app")),
        *(f"fleet {verb} a.toml local.lrr=1" for verb in ("serve", "try", "app")),
        *("fleet serve a.toml --address x", "fleet serve a.toml --keys nowhere"),
        *("predict nope a.toml", "evaluate nope --data .", "export nope --out a.onnx"),
        *("fleet app a.toml --to .", "fleet keys k --site a/b", "fleet keys k"),
        *("fleet approve nowhere", "fleet clean nowhere", "fleet log nowhere", "fleet srve a.toml"),
        *("resume nope", "reproduce nope", "reproduce ghaemi", "privacy audit a.toml local.lrr=1"),
        *(f"fleet join --data . {more}" for more in ("--server x --name ann", "--server h:1")),
        *(f"fleet join --data . --server h:1 --name {name}" for name in ("ann", "a/b")),
    ],
)
def test_mistakes_in_names_and_types_are_found_before_torch_is_imported(words, tmp_path):
    for name, model in (("a", "linear"), ("a2", "liner")):
        content = f'dataset = "fashion-mnist-mini"\nmodel = "{model}"\nrounds = 1\n'
        (tmp_path / f"{name}.toml").write_text(f'{content}algorithm = ["fedprox"]\n')
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef net(): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    error, modules = done.stderr.splitlines()
    assert done.returncode == 2
    assert error.startswith("fedlens: ")
    assert "torch" not in {name.partition(".")[0] for name in modules.split()}


def test_the_log_of_a_site_is_read_without_torch(tmp_path):
    Log(tmp_path).add("withdrawn", experiment="0" * 64, by="ann")
    assert "torch" not in imported_by("fleet", "log", str(tmp_path), "--json")


def test_a_plan_of_privacy_needs_numpy_alone(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 1\n')
    found = imported_by("privacy", "plan", str(file), "--noise", "1")
    assert found & HEAVY == {"numpy"}
    found = imported_by("privacy", "plan", str(file), "privacy.noise=1")
    assert found & HEAVY == {"numpy"}


def test_completion_in_the_shell_imports_nothing_large():
    typed = {"COMP_WORDS": "fedlens re", "COMP_CWORD": "1", "_FEDLENS_COMPLETE": "complete_bash"}
    assert not imported_by(**typed) & HEAVY


def test_a_report_needs_no_torch(tmp_path):
    make_run(tmp_path / "run", rounds=2)
    found = imported_by("report", str(tmp_path / "run"))
    assert {"jinja2", "matplotlib"} <= found and "torch" not in found


def test_no_engine_needs_extras_or_sympy_whose_import_takes_longer_than_many_a_run():
    program = [sys.executable, "-c", WITHOUT_OTHERS]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    told = "".join(f"{name} finished\n" for name in ("sequential", "stacked", "processes"))
    assert (done.stdout, done.stderr) == (told, "")


@pytest.mark.parametrize(
    "table", [names.ALGORITHMS, names.MODELS, names.PARTITIONS, names.DATASETS, names.RECIPES]
)
def test_every_name_has_its_function(table):
    assert all(callable(table[name]) for name in table)
    assert "nonsense" not in table


@pytest.mark.parametrize("group", [[], ["data"], ["fleet"], ["privacy"]], ids=str)
def test_every_verb_is_told_in_full_in_80_columns(fedlens, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = fedlens(*group, "--help")
    commands = out.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands
