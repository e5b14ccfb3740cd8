"""What a shell completes, asked as bash, zsh and fish ask."""

import os
import re
import resource

import pytest
import typer

from fedlens.cli import completion
from fedlens.cli.main import app_of
from fedlens.config.names import ALGORITHMS, MODELS, RECIPES
from tests.cli.test_imports import imported_by


def words(*typed: str, shell: str) -> list[str]:
    """What is offered for the last word, of which bash makes several where there is a "="."""
    if shell == "bash":
        parts = [part for word in typed for part in word.replace("=", " = ").split(" ") if part]
        if not typed[-1]:
            parts.append("")
        asked = {"COMP_WORDS": " ".join(["fedlens", *parts]), "COMP_CWORD": str(len(parts))}
    else:
        asked = {"_TYPER_COMPLETE_ARGS": " ".join(["fedlens", *typed])}
        asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    lines = answer(asked, shell)
    return re.findall(r'"(.+?)"', "\n".join(lines)) if shell == "zsh" else lines


def answer(asked: dict[str, str], shell: str) -> list[str]:
    kept = dict(os.environ)
    os.environ.update(asked)
    try:
        from typer._completion_classes import completion_init

        completion_init()
        from click.shell_completion import get_completion_class

        kind = get_completion_class(shell)
        assert kind is not None
        return (
            kind(typer.main.get_command(app_of()), {}, "fedlens", "_FEDLENS_COMPLETE")
            .complete()
            .splitlines()
        )
    finally:
        os.environ.clear()
        os.environ.update(kept)


SHELLS = ["bash", "zsh", "fish"]
every_shell = pytest.mark.parametrize("shell", SHELLS)


@every_shell
def test_keys_are_completed_wherever_an_experiment_is_changed(shell):
    found = words("run", "a.toml", "local.w", shell=shell)
    assert found == ["local.weight_decay=", "local.weight_decay_on="]
    assert words("sweep", "a.toml", "--grid", "evaluate.f", shell=shell)[0] == "evaluate.fine_tune="
    assert "stop.patience=" in words("partition", "a.toml", "seed=3", "stop.", shell=shell)


@every_shell
def test_names_are_completed_behind_their_key(shell):
    before = "" if shell == "bash" else "model="
    assert words("run", "a.toml", "model=res", shell=shell) == [f"{before}resnet18"]
    assert words("run", "a.toml", "model=", shell=shell) == [f"{before}{name}" for name in MODELS]
    found = words("sweep", "a.toml", "rounds=3", "--grid", "algorithm=fedprox", shell=shell)
    assert found == ["fedprox" if shell == "bash" else "algorithm=fedprox"]
    found = words("sweep", "a.toml", "--grid", "loss=", shell=shell)
    assert found[0].endswith("cross_entropy")
    found = words("sweep", "a.toml", "--grid", "loss=focal", "seed=1", "server.", shell=shell)
    assert found[0] == "server.lr="


def test_a_key_that_is_clear_is_offered_with_its_names_so_that_no_space_follows():
    found = words("run", "a.toml", "alg", shell="bash")
    assert found == ["algorithm=", *(f"algorithm={name}" for name in ALGORITHMS)]
    assert words("run", "a.toml", "rou", shell="bash") == ["rounds=", "rounds=..."]


def test_recipes_data_sets_and_keys_are_completed_where_they_are_named():
    assert words("reproduce", "fedns/table", shell="fish") == [
        name for name in RECIPES if name.startswith("fedns/table")
    ]
    assert words("data", "get", "cifar", shell="fish") == ["cifar10", "cifar100"]
    assert words("data", "prepare", "land", shell="fish") == ["landmarks-user-160k"]
    assert words("explain", "sto", shell="fish")[:2] == ["stop", "stop.accuracy"]
    assert "csv" not in [*completion.data_sets("")]


@every_shell
def test_items_of_papers_are_completed_one_after_another_and_then_keys(shell):
    typed = ("reproduce", "fedns/table1", "fedns/table2")
    others = ["fedns/table3", "fedns/figure1", "fedns/figure2", "fedns/figure3"]
    assert words(*typed, "fedns/", shell=shell) == others
    assert words(*typed, "server.l", shell=shell)[0] == "server.lr="
    assert words("reproduce", "server.l", shell=shell) == []
    assert words(*typed, "rounds=3", "fedns/table", shell=shell) == ["fedns/table3"]
    assert words("reproduce", "fedns/table1", "model=res", shell=shell) == [
        "resnet18" if shell == "bash" else "model=resnet18"
    ]


def test_a_completion_imports_nothing_large_and_takes_little_time():
    typed = {"COMP_WORDS": "fedlens run a.toml local", "COMP_CWORD": "3"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = imported_by(**typed, _FEDLENS_COMPLETE="complete_bash")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert not {"torch", "numpy", "rich", "matplotlib"} & found
    # Of the processor: a machine that does other things as well lets a command wait.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
