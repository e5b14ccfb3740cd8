"""Ctrl-C at any moment: one line, and one status."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedlens.cli.stopping import heed_signals
from fedlens.storage.files import write_atomically
from tests.command_line import EXPERIMENT
from tests.sites import write_sites

COMMAND = """
import os, signal, sys
from types import SimpleNamespace

from fedlens.__main__ import command

signal.signal(signal.SIGINT, signal.default_int_handler)

def find_spec(name, *_):
    if name == wanted:
        sys.meta_path.remove(finder)
        os.kill(os.getpid(), signal.SIGINT)

finder = SimpleNamespace(find_spec=find_spec)
sys.meta_path.insert(0, finder)
wanted, sys.argv = sys.argv[1], ["fedlens", *sys.argv[2:]]
command()
"""


@pytest.mark.parametrize(
    "module", ["typer", "fedlens.config.experiment", "torch", "torch._C", "torch.nn"]
)
def test_ctrl_c_while_a_module_is_imported_is_one_line(module, tmp_path):
    (tmp_path / "a.toml").write_text(EXPERIMENT)
    words = [sys.executable, "-c", COMMAND, module, "run", str(tmp_path / "a.toml")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "fedlens: stopped\n")


def test_ctrl_c_in_a_command_is_one_line(fedlens, monkeypatch):
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlens.cli.machine.doctor_command", stop)
    assert fedlens("doctor") == (130, "", "fedlens: stopped\n")


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_not_replaced_yet_is_not_gone_on_with(begun, fedlens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("experiment.toml", "manifest.json"):
        write_atomically(Path("run", name), b"")
    Path("run", "checkpoint").mkdir()
    Path("new.toml").write_text(EXPERIMENT)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlens.runs.loop.run_rounds" if begun else "fedlens.setup.build", stop)
    ended = fedlens("run", "new.toml", "--out", "run", "--overwrite", "--quiet")
    how = "; go on with: fedlens resume run" if begun else ""
    assert ended == (130, "", f"fedlens: stopped{how}\n")


def test_commands_to_copy_name_any_folder_as_a_shell_reads_it(fedlens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(EXPERIMENT)
    write_sites(Path("my sites"))

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlens.runs.loop.run_rounds", stop)
    words = ["fedlens", "resume", "runs/it's mine"]
    told = fedlens("run", "a.toml", "--out", words[-1], "--quiet").err
    assert shlex.split(told.partition("go on with: ")[2]) == words
    told = fedlens("run", words[-1]).err
    assert shlex.split(told.split("`")[1]) == words
    told = fedlens("predict", words[-1], "my sites").err
    assert shlex.split(told.partition("finish it with ")[2].partition(",")[0]) == words
    told = fedlens("import", "my sites", "--quiet").out
    assert shlex.split(told.partition("next: ")[2]) == ["fedlens", "run", "my sites.toml"]


def test_ctrl_c_that_a_shell_ignores_stays_ignored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        heed_signals()
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
