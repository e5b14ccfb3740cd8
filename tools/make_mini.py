"""Make the data set inside the package from the idx files of Fashion-MNIST.

    python tools/make_mini.py FOLDER

Prints the sha256 sum, which belongs into src/fedlens/data/published.py.
"""

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

from fedlens.core.federation import Dataset, Examples
from fedlens.data.places import Source
from fedlens.data.published import MINI, fashion_mnist

SEED = 20170828
PER_CLASS = {"train": 600, "test": 100}
OUT = Path(__file__).parents[1] / "src" / "fedlens" / "data" / "files" / f"{MINI}.npz"


def drawn(part: Examples, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `per_class` examples of each class, in random order."""
    labels = part.labels.numpy()
    chosen = [
        rng.choice(np.flatnonzero(labels == label), per_class, replace=False)
        for label in np.unique(labels)
    ]
    return rng.permutation(np.concatenate(chosen))


def arrays(dataset: Dataset) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    found = {}
    for name, part in (("train", dataset.train), ("test", dataset.test)):
        index = drawn(part, PER_CLASS[name], rng)
        found[f"x_{name}"] = part.images[:, 0].numpy()[index]
        found[f"y_{name}"] = part.labels.numpy()[index].astype(np.uint8)
    return found


def packed(content: dict[str, np.ndarray]) -> bytes:
    """A .npz file whose bytes do not depend on the time at which it is made."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in content.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            body = io.BytesIO()
            np.lib.format.write_array(body, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(entry, body.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    made = packed(arrays(fashion_mnist(Source(data=Path(sys.argv[1])))))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(made)
    print(f"{OUT.name}: {len(made):,} bytes, sha256 {hashlib.sha256(made).hexdigest()}")
