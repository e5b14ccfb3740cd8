"""Photos as three hospitals would have them, to try the way from a folder to a model.

`python examples/three_hospitals.py hospitals` draws 600 JPEGs of 300 × 400 pixels. The class is in
the shape of a spot on skin: `benign` is round, `malignant` ragged, `inflamed` several small ones.
Every hospital has a colour cast of its own, `west` has no `inflamed`, and as in real folders one
file is cut short, one is a gray PNG of 16 bits, and one JPEG lies on its side.
"""

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SITES = {"north": (1.0, 0.9, 0.8), "south": (0.85, 1.0, 0.9), "west": (0.85, 0.85, 1.0)}
SHARES = {"benign": 0.55, "inflamed": 0.3, "malignant": 0.15}
WIDTH, HEIGHT = 300, 400
SCALE = 2  # drawn larger, for smooth outlines


def photo(label: str, cast: tuple[float, ...], rng: np.random.Generator) -> Image.Image:
    """A spot, or several, somewhere on skin of some shade, with hairs across."""
    skin = rng.integers(150, 230) * np.array([1.0, rng.uniform(0.7, 0.85), rng.uniform(0.6, 0.75)])
    spot = skin * np.array([0.6, 0.45, 0.45]) * rng.uniform(0.8, 1.5)
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * HEIGHT), _colour(skin))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4, 8) if label == "inflamed" else 1):
        radius = SCALE * (rng.uniform(12, 24) if label == "inflamed" else rng.uniform(30, 70))
        ragged = rng.uniform(0.1, 0.2) if label == "malignant" else 0.03
        x, y = rng.uniform(0.3, 0.7, 2) * (SCALE * WIDTH, SCALE * HEIGHT)
        draw.polygon(_outline(x, y, radius, ragged, rng), fill=_colour(spot))
    for _ in range(rng.integers(0, 6)):
        ends = [tuple(rng.uniform(0, 1, 2) * image.size) for _ in range(2)]
        draw.line([*ends[0], *ends[1]], fill=_colour(skin * 0.4), width=SCALE)
    image = image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.2)))
    noisy = np.asarray(image) * np.array(cast) + rng.normal(0, 6, (HEIGHT, WIDTH, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _outline(
    x: float, y: float, radius: float, ragged: float, rng: np.random.Generator
) -> list[tuple[float, float]]:
    """A closed line around x, y: a circle, with waves of random lengths."""
    waves = [(k, rng.uniform(-1, 1) * ragged, rng.uniform(0, 2 * math.pi)) for k in range(3, 9)]
    points = []
    for angle in np.linspace(0, 2 * math.pi, 180, endpoint=False):
        far = radius * max(0.3, 1 + sum(a * math.sin(k * angle + p) for k, a, p in waves))
        points.append((x + far * math.cos(angle), y + far * math.sin(angle)))
    return points


def _colour(rgb: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = (int(c) for c in rgb.clip(0, 255))
    return red, green, blue


def draw_hospitals(place: Path, count: int = 200, seed: int = 0) -> Path:
    """Draw about `count` photos of each hospital, in place/site/class."""
    for number, (site, cast) in enumerate(SITES.items()):
        rng = np.random.default_rng([seed, number])
        for label, share in SHARES.items():
            if (site, label) == ("west", "inflamed"):
                continue
            folder = place / site / label
            folder.mkdir(parents=True)
            for i in range(round(share * count)):
                photo(label, cast, rng).save(folder / f"{site}-{i:03}.jpg", quality=90)
    cut = place / "south" / "benign" / "south-000.jpg"
    cut.write_bytes(cut.read_bytes()[:2000])
    deep = place / "north" / "benign" / "north-001.jpg"
    gray = np.asarray(Image.open(deep).convert("L")).astype(np.uint16) * 16  # 12 of 16 bits
    Image.fromarray(gray).save(deep.with_suffix(".png"))
    deep.unlink()
    turned = place / "west" / "malignant" / "west-000.jpg"
    with Image.open(turned) as upright:
        on_its_side, exif = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # a viewer turns it upright
    on_its_side.save(turned, exif=exif)
    return place


if __name__ == "__main__":
    draw_hospitals(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"))
