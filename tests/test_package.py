import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BARE = '''
import sys

class Bare:
    """A finder that does not see what is not to be there."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Bare, sys.meta_path)

import fedlens as fl

result = fl.run(
    fl.Experiment(
        dataset="fashion-mnist-mini",
        model="lenet5",
        rounds=2,
        augment=fl.Augment(crop=2, flip=True),
        clients=fl.Clients(count=100, per_round=3, holdout=0.2),
        algorithm=("fedprox", "fedavgm"),
    )
)
assert result.status == "finished", result.status
assert 0 < result.final["test_accuracy"] < 1
assert not set({blocked!r}) & set(sys.modules), "something was imported after all"
assert "torch._dynamo" not in sys.modules, "the compiler was imported, which takes a second"
print("trained", len(result.records), "rounds")
'''


def test_the_part_that_trains_needs_torch_and_numpy_alone():
    blocked = (
        *("matplotlib", "jinja2", "typer", "rich", "safetensors", "PIL", "pydantic", "click"),
        *("sklearn", "scipy", "pandas", "torchvision"),
    )
    program = [sys.executable, "-c", BARE.format(blocked=blocked)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained 2 rounds\n", "")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that a checkout builds, made from a copy so that nothing is left in ours."""
    pytest.importorskip("build", reason="the wheel is built with the package `build`")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_the_wheel_holds_all_that_the_package_reads(wheel):
    names = set(wheel.namelist())
    source = ROOT / "src"
    files = [*(source / "fedlens").rglob("*.py"), *(source / "fedlens/recipes").glob("*/*.md")]
    files += (source / "fedlens/recipes").glob("*/*.json")
    assert {str(path.relative_to(source)) for path in files} <= names
    assert {
        "fedlens/py.typed",
        "fedlens/data/files/fashion-mnist-mini.npz",
        "fedlens/data/files/LICENSE-fashion-mnist",
        "fedlens/deploy/card.md.jinja",
        *(f"fedlens/report/page.{kind}" for kind in ("html.jinja", "js", "css")),
    } <= names
    data = "fedlens/data/files/fashion-mnist-mini.npz"
    assert wheel.read(data) == (source / data).read_bytes()
    assert all(name.startswith(("fedlens/", "fedlens-")) for name in names)


def test_the_wheel_says_what_it_is(wheel):
    (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(about).decode()
    for line in ("Name: fedlens", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"):
        assert line in metadata.splitlines()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert any(line.startswith("Requires-Dist: torch>=2.11") for line in needed)
    assert not any("torchvision" in line for line in needed)
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "fedlens = fedlens.__main__:command" in wheel.read(entry).decode()
    licences = {Path(name).name for name in wheel.namelist() if "/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE-fashion-mnist"}
