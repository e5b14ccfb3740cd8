"""A small iNaturalist 2017: geotagged JPEG files and the metadata as published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image


def make(place: Path, counts: dict[int, int], num_val: int = 4, side: int = 12) -> Path:
    """`counts` training images of each category, `num_val` more to test on; in `place`/images."""
    rng = np.random.default_rng(0)
    folders = {category: f"train_val_images/Aves/Species {category}" for category in counts}
    for folder in folders.values():
        (place / folder).mkdir(parents=True)
    number = 0
    for part, extra in (("train", None), ("val", num_val)):
        images, annotations, locations = [], [], []
        for category, count in counts.items():
            for _ in range(count if extra is None else extra):
                number += 1
                file = f"{folders[category]}/{number:08x}.jpg"
                colour = tuple(rng.integers(0, 256, 3).tolist())
                Image.new("RGB", (side, side + number % 5), colour).save(place / file)
                images.append({"id": number, "file_name": file, "width": side})
                annotations.append({"id": number, "image_id": number, "category_id": category})
                lat, lon = rng.normal((40, -100), (8, 20)).round(4).tolist()
                user = int(rng.integers(0, 12))
                locations.append({"id": number, "lat": lat, "lon": lon, "user_id": user})
        categories = [{"id": category, "name": f"Avis {category}"} for category in counts]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (place / f"{part}2017.json").write_text(json.dumps(content))
        (place / f"{part}2017_locations.json").write_text(json.dumps(locations))
    return place
