"""A run folder from someone else: the code that it names runs only with the user's consent."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import py_compile
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import click
import pytest
import typer
from safetensors.torch import load_file, save_file

import fedlens as fl
from fedlens.cli.main import GROUPS, VERBS, app_of
from fedlens.config import consent
from fedlens.storage.run_files import EXPERIMENT, MANIFEST, MODEL, SUMMARY
from fedlens.storage.tables import to_toml
from tests.command_line import EXPERIMENT as EXPERIMENT_TEXT
from tests.command_line import Ended, forget_modules_of

Command = Callable[..., Ended]

EVIL = """
from pathlib import Path

Path({trace!r}).touch()


def net(*given, **options):
    Path({trace!r}).touch()
    raise AssertionError("this is run")
"""

OPENED_BY = {
    "run": ["FILE", "--out", "out"],
    "resume": ["RUN", "--rounds", "3"],
    "sweep": ["FILE", "--seeds", "2", "--out", "out"],
    "compare": ["FILE", "a.toml", "--out", "out"],
    "attack": ["FILE", "--out", "out"],
    "predict": ["RUN", "picture.png"],
    "evaluate": ["RUN", "--data", "images"],
    "serve-model": ["RUN", "--port", "0"],
    "export": ["RUN", "--out", "model.onnx"],
    "partition": ["FILE"],
    "fleet serve": ["FILE", "--out", "out"],
    "fleet try": ["FILE", "--sites", "2"],
    "fleet app": ["FILE", "--to", "app"],
    "privacy audit": ["FILE", "--out", "out"],
}
"""The commands that need what a run folder names, with the words after the verb."""

READ_BY = {"report": ["RUN"], "reproduce": ["ghaemi/fedavg", "--from", "RUN"], "doctor": []}
"""Those that need none of it."""

OTHERS = [
    *("watch", "open", "new", "import", "list", "explain", "schema", "bench"),
    *("data list", "data get", "data prepare", "data check", "data clean"),
    *("fleet keys", "fleet join", "fleet approve", "fleet clean", "fleet log", "fleet status"),
    *("fleet invite", "fleet withdraw"),
    *("privacy plan", "privacy ledger"),
]
"""Those that open no run folder; and `watch` and `open`, which read it as `report` does."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without code of its own, with a checkpoint."""
    clients = fl.Clients(count=4, per_round=2)
    experiment = fl.Experiment(
        dataset="fashion-mnist-mini", model="linear", rounds=1, engine="sequential", clients=clients
    )
    place = tmp_path_factory.mktemp("honest") / "run"
    fl.run(experiment, place)
    return place


@pytest.fixture
def trace(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that evil code makes; nothing is approved yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    monkeypatch.setattr(consent, "_approved", set())
    return here / "it-ran"


def evil_run(honest: Path, trace: Path, key: str = "model", value: object = "evil:net") -> Path:
    """A run from elsewhere: its experiment names code, which lies in its folder."""
    folder = Path(shutil.copytree(honest, trace.parent / "downloaded"))
    tables = fl.Experiment.read(honest / EXPERIMENT).plain()
    *sections, last = key.split(".")
    table = tables
    for section in sections:
        table = table[section]
    table[last] = value
    (folder / EXPERIMENT).write_text(to_toml(tables))
    (folder / "evil.py").write_text(EVIL.format(trace=str(trace)))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"code": [str(folder)]}))
    return folder


def words_of(verb: str, folder: Path) -> list[str]:
    places = {"RUN": str(folder), "FILE": str(folder / EXPERIMENT)}
    return [*verb.split(), *(places.get(w, w) for w in {**OPENED_BY, **READ_BY}[verb])]


def test_every_command_is_tried_here():
    groups = {f"{group} {one}" for group in GROUPS for one in commands(group)}
    assert {*VERBS, *groups} == {*OPENED_BY, *READ_BY, *OTHERS}


def commands(group: str) -> list[str]:
    with_group = cast(click.Group, typer.main.get_command(app_of(group)))
    return list(cast(click.Group, with_group.commands[group]).commands)


@pytest.mark.parametrize("verb", [*OPENED_BY, *READ_BY])
def test_no_command_runs_the_code_of_a_run_folder_unasked(
    verb: str, honest: Path, trace: Path, fedlens: Command
) -> None:
    folder = evil_run(honest, trace)
    ended = fedlens(*words_of(verb, folder))
    assert not trace.exists() and "evil" not in sys.modules
    if verb in OPENED_BY:
        assert ended.status == 2 and ended.err.count("fedlens:") == 1
        digits = hashlib.sha256((folder / "evil.py").read_bytes()).hexdigest()[:12]
        for part in ("evil:net", str(folder / "evil.py"), digits, "--trust-code"):
            assert part in ended.err


@pytest.mark.parametrize("place", ["downloaded", "."])
@pytest.mark.parametrize("verb", ["report", "export", "doctor"])
def test_no_module_in_the_working_folder_stands_in_for_one_that_is_not_installed(
    verb: str, place: str, honest: Path, trace: Path, fedlens: Command, monkeypatch
) -> None:
    folder = evil_run(honest, trace, value="timm:resnet18")
    for name in ("timm", "onnx", "onnxruntime", "onnxscript", "ray", "IPython", "cairo", "flwr"):
        (folder / f"{name}.py").write_text(EVIL.format(trace=str(trace)))
    monkeypatch.chdir(folder if place == "downloaded" else place)
    hidden = [name for name in sys.modules if name.partition(".")[0] == "timm"]
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    fedlens(*words_of(verb, folder))
    assert not trace.exists()


PLACES: list[tuple[str, object]] = [
    ("dataset", "evil:net"),
    ("dataset", {"name": "evil:net", "x": 1}),
    ("loss", "evil:net"),
    ("algorithm", [{"name": "evil:net"}]),
    ("clients.partition", "evil:net"),
    ("clients.partition", {"name": "noisy-labels", "share": 0.1, "of": {"name": "evil:net"}}),
    ("clients.devices", "evil:net"),
    ("local.optimizer", "evil:net"),
    ("local.anneal", "evil:net"),
    ("local.lr", {"name": "evil:net"}),
    ("local.lr", {"name": "warm-up", "rounds": 1, "then": {"name": "evil:net"}}),
    ("server.lr", {"name": "evil:net"}),
    ("evaluate.metrics", ["evil:net"]),
    ("model", "evil.inner:net"),
    ("model", "evil:no such name"),
    ("dataset", "timm:create_model"),
    ("model", "builtins:print"),
    ("local.lr", {"name": "builtins:print"}),
    ("local.anneal", "os:getpid"),
]


@pytest.mark.parametrize(("key", "value"), PLACES)
def test_code_is_refused_wherever_an_experiment_can_name_it(
    key: str, value: object, honest: Path, trace: Path
) -> None:
    folder = evil_run(honest, trace, key, value)
    with pytest.raises(consent.NotApproved, match="--trust-code"):
        fl.resume(folder, rounds=2)
    assert not trace.exists()


NET = """
from torch import nn
{imports}

def net(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))
"""


@pytest.fixture
def mine(trace: Path) -> Iterator[Path]:
    """A project of the user's own: an experiment, its model, and a module that this one imports."""
    project = trace.parent / "project"
    (project / "parts").mkdir(parents=True)
    (project / "mine.py").write_text(NET.format(imports="import helper, parts.inner"))
    (project / "helper.py").write_text("")
    (project / "parts" / "inner.py").write_text("")
    (project / "a.toml").write_text(EXPERIMENT_TEXT.replace('"linear"', '"mine:net"'))
    yield project
    forget_modules_of(project)


def anew(project: Path) -> None:
    """As in another process."""
    forget_modules_of(project)
    consent._approved.clear()


def test_code_of_the_users_own_runs_is_asked_for_only_if_it_changed(
    mine: Path, trace: Path, fedlens: Command
) -> None:
    assert fedlens("run", mine / "a.toml", "--out", "out", "-q").status == 0
    assert fedlens("predict", "out", "none.png").err.startswith("fedlens: there is no none.png")
    exports = ("export", "out", "--out", "model.safetensors", "--overwrite", "-q")
    for file in ("mine.py", "helper.py", "parts/inner.py"):
        anew(mine)
        assert fedlens(*exports).status == 0
        before = (mine / file).read_text()
        (mine / file).write_text(
            f"{before}\nfrom pathlib import Path; Path({str(trace)!r}).touch()"
        )
        anew(mine)
        ended = fedlens(*exports)
        assert ended.status == 2 and str(mine / file) in ended.err and "--trust-code" in ended.err
        assert not trace.exists()
        (mine / file).write_text(before)


def test_consent_lasts_until_a_file_changes_and_holds_for_one_place(
    honest: Path, trace: Path, fedlens: Command
) -> None:
    folder = evil_run(honest, trace, value="kind:net")
    (folder / "kind.py").write_text(NET.format(imports=""))
    keys = load_file(folder / MODEL)
    save_file(
        dict(
            zip(["1.weight", "1.bias"], sorted(keys.values(), key=lambda t: -t.ndim), strict=True)
        ),
        folder / MODEL,
    )
    (folder / SUMMARY).unlink()
    exports = ("--out", "model.safetensors", "--overwrite", "-q")
    assert fedlens("export", folder, *exports).status == 2
    assert fedlens("export", folder, *exports, "--trust-code").status == 0
    anew(folder)
    assert fedlens("export", folder, *exports).status == 0
    assert isinstance(fl.load(folder), fl.Classifier)
    anew(folder)
    other = folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(ValueError, match=r"elsewhere.*trust_code"):
        fl.load(other)
    assert isinstance(fl.load(other, trust_code=True), fl.Classifier)
    forget_modules_of(other)


def test_compiled_files_beside_code_are_not_run(mine: Path, trace: Path, fedlens: Command) -> None:
    """Neither one that claims to be of a source file, nor one without a source."""
    assert fedlens("run", mine / "a.toml", "--out", "out", "-q").status == 0
    evil = trace.parent / "evil.py"
    evil.write_text(EVIL.format(trace=str(trace)))
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for compiled in (importlib.util.cache_from_source(str(mine / "mine.py")), mine / "json5.pyc"):
        py_compile.compile(str(evil), str(compiled), invalidation_mode=unchecked)
    anew(mine)
    exports = ("export", "out", "--out", "model.safetensors", "-q")
    assert fedlens(*exports).status == 0 and not trace.exists()


def test_a_link_to_approved_code_lets_nothing_else_in(
    honest: Path, mine: Path, trace: Path, fedlens: Command
) -> None:
    """The linked file imports a module that lies beside the link, too."""
    assert fedlens("run", mine / "a.toml", "--out", "out", "-q").status == 0
    folder = evil_run(honest, trace, value="mine:net")
    (folder / "mine.py").symlink_to(mine / "mine.py")
    (folder / "helper.py").write_text(EVIL.format(trace=str(trace)))
    anew(mine)
    ended = fedlens("export", folder, "--out", "model.safetensors")
    assert ended.status == 2 and str(folder / "helper.py") in ended.err and not trace.exists()


def test_functions_of_approved_modules_are_approved_one_by_one(
    honest: Path, mine: Path, trace: Path, fedlens: Command
) -> None:
    assert fedlens("run", mine / "a.toml", "--out", "out", "-q").status == 0
    folder = evil_run(honest, trace, value="mine:nn")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"code": [str(mine)]}))
    anew(mine)
    ended = fedlens("predict", folder, "picture.png")
    assert ended.status == 2 and "mine:nn" in ended.err and "--trust-code" in ended.err
