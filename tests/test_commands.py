"""Commands that are written down where nothing runs them exist, with the options given to them.

`test_docs.py` runs the blocks of pages. Here are indented examples, words in the midst of a
sentence, and files for containers and for CI.
"""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.test_docs import PAGES, ROOT, command_for, in_backticks, prose

FILES = [
    ROOT / "Dockerfile",
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    ROOT / ".ci" / "run",
]
SAID_OF_NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
ENTRYPOINT = 'ENTRYPOINT ["fedlens"]'  # so an image's name stands for the command


def commands(text):
    """The words after each `fedlens`, or image that is called so, and after each `make`."""
    for line in text.replace("\\\n", " ").splitlines():
        found = re.search(r"(?<![\w./-])(fedlens|fedlens-cuda|make) +([a-z].*)", line)
        if found is not None:
            yield found[1], shlex.split(found[2], comments=True)


def check(name, words):
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
        return
    command, rest = command_for(words)
    command.make_context("fedlens", rest)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_command_of_a_file_exists(file):
    found = list(commands(file.read_text(encoding="utf-8")))
    assert found
    for name, words in found:
        check(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_an_indented_example_exists(page):
    indented = re.findall(r"^    +\S.*", prose(page).replace("\\\n", " "), re.MULTILINE)
    for name, words in commands("\n".join(indented)):
        check(name, words)


@pytest.mark.parametrize("page", SAID_OF_NOW, ids=lambda page: page.name)
def test_every_option_of_a_command_in_a_sentence_exists(page):
    for text in in_backticks(prose(page)):
        for _, words in commands(text) if text.startswith("fedlens ") else ():
            command, rest = command_for(words)
            options = {
                one
                for parameter in command.params
                for one in (*parameter.opts, *parameter.secondary_opts)
            }
            given = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert given <= options | {"--help"}, text


@pytest.mark.parametrize("page", SAID_OF_NOW, ids=lambda page: page.name)
def test_every_example_that_a_page_names_is_there(page):
    for name in re.findall(r"(?<![\w./-])examples/[\w.-]*\w", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_containers_run_the_command_that_the_image_has():
    yaml = pytest.importorskip("yaml")
    assert ENTRYPOINT in (ROOT / "Dockerfile").read_text()
    compose = (ROOT / "examples" / "fleet" / "compose.yaml").read_text(encoding="utf-8")
    for service in yaml.safe_load(compose)["services"].values():
        assert service["image"] == "fedlens"
        assert not service["command"].startswith("fedlens")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_clean_deletes_what_can_be_made_again_and_no_runs(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("runs/a", "hospitals", ".venv/bin", "build", ".pytest_cache"):
        (tmp_path / name).mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "runs", "hospitals"}
    assert (tmp_path / "runs" / "a").is_dir()
