"""The map of a geographic partition."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data.partitions import PARTITIONS
from fedlens.report import partition


def drawn(lat, lon, n_max, path):
    blank = torch.zeros(len(lat), 1, 1, 1, dtype=torch.uint8)
    examples = Examples(blank, torch.zeros(len(lat), dtype=torch.int64), {"lat": lat, "lon": lon})
    held = PARTITIONS["s2"](Pool(examples, 1, 0, np.random.default_rng(0)), n_max=n_max)
    assert isinstance(held, Holdings)
    assert partition.draw_map(lat, lon, held, "places $_s2", path) == path
    with Image.open(path) as picture:
        return held, np.asarray(picture.convert("RGB"))


def colours(pixels):
    numbers = pixels.astype(np.int64) @ [1 << 16, 1 << 8, 1]
    return {(n >> 16, n >> 8 & 255, n & 255) for n in np.unique(numbers).tolist()}


def rgb(text):
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


def test_cells_have_colours_and_what_is_left_out_is_grey(tmp_path):
    lat = np.array([10.0] * 300 + [20.0] * 300 + [-40.0, np.nan])
    lon = np.array([10.0] * 300 + [100.0] * 300 + [-150.0, 3.0])
    held, pixels = drawn(lat, lon, 400, tmp_path / "map.png")
    assert held.sizes.tolist() == [300, 300]
    found = colours(pixels)
    assert {rgb(partition.COLOURS[0]), rgb(partition.COLOURS[1]), rgb(partition.LEFT)} <= found
    assert rgb(partition.COLOURS[2]) not in found


@pytest.mark.parametrize("spread", [0.0, 0.001, 300.0])
def test_any_region_has_a_map_even_across_the_date_line_and_the_poles(tmp_path, spread):
    rng = np.random.default_rng(0)
    lat = np.clip(rng.normal(70, spread / 3, 200), -90, 90)
    lon = (rng.normal(175, spread, 200) + 180) % 360 - 180
    _, pixels = drawn(lat, lon, 20, tmp_path / "map.png")
    height, width, _ = pixels.shape
    assert 500 < width < 2000
    assert 500 < height < 2000
    assert len(colours(pixels)) > 5


def test_borders_are_cut_where_they_leave_the_map():
    lines = list(partition._lines("5"))  # the face around the north pole
    assert all(np.abs(np.diff(line[:, 0])).max() <= 90 for line in lines)
    assert sum(len(line) for line in lines) >= 250


@pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")
def test_the_command_draws_the_map_beside_the_picture_and_tells_the_tokens(
    tmp_path, monkeypatch, fedlens
):
    monkeypatch.chdir(tmp_path)
    lines = ["path,label,lat,lon"]
    for i in range(40):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{i % 2},{10 + i},{3 * i}")
    (tmp_path / "places.csv").write_text("\n".join(lines))
    (tmp_path / "a.toml").write_text(
        'dataset = { name = "csv", path = "places.csv" }\nmodel = "linear"\nrounds = 1\n'
        '[clients]\npartition = { name = "s2", n_max = 8 }\n'
    )
    told = json.loads(fedlens("partition", "a.toml", "--json").out)
    assert len(told["client_names"]) == told["num_clients"] == len(set(told["client_names"]))
    assert not list(tmp_path.glob("*map*"))
    told = fedlens("partition", "a.toml").out
    assert "picture: a-split.png\nmap: a-split-map.png\n" in told
    with Image.open("a-split-map.png") as picture:
        assert picture.width > 500
