"""S2 cells against s2sphere, which follows Google's library number by number."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import s2sphere
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedlens.core.federation import Examples, Holdings, Pool
from fedlens.data import s2
from fedlens.data.partitions.dealing import apply_partition
from tests.counting import num_calls

Array = np.ndarray[Any, Any]


def oracle(lat: float, lon: float) -> s2sphere.CellId:
    return s2sphere.CellId.from_lat_lng(s2sphere.LatLng.from_degrees(lat, lon))


def around_the_globe(count: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return np.degrees(np.arcsin(rng.uniform(-1, 1, count))), rng.uniform(-180, 180, count)


def towns(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Points crowded around a few places, as photographs are."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform((-55, -140), (70, 140), (40, 2))
    points = centres[rng.integers(40, size=count)] + rng.normal(0, 4, (count, 2))
    return points[:, 0], points[:, 1]


def split(north: Array, east: Array, **options: Any) -> Holdings:
    blank = torch.zeros(len(north), 1, 1, 1, dtype=torch.uint8)
    labels = torch.zeros(len(north), dtype=torch.int64)
    examples = Examples(blank, labels, {"lat": north, "lon": east})
    held = apply_partition("s2", options, Pool(examples, 1, 0, np.random.default_rng(0)))
    assert isinstance(held, Holdings)
    return held


def test_cells_and_tokens_are_those_of_the_library_on_every_level() -> None:
    lat, lon = around_the_globe(2000)
    found, expected = s2.cells(lat, lon), [oracle(*point) for point in zip(lat, lon, strict=True)]
    assert found.tolist() == [cell.id() for cell in expected]
    for level in range(31):
        tokens = s2.tokens(s2.parents(found, level))
        assert tokens == [cell.parent(level).to_token() for cell in expected]


@settings(deadline=None)
@given(lat=st.floats(-90, 90), lon=st.floats(-180, 180))
@example(lat=90.0, lon=0.0)
@example(lat=-90.0, lon=180.0)
@example(lat=0.0, lon=-180.0)
@example(lat=45.0, lon=90.0)
@example(lat=35.264389682754654, lon=45.0)
def test_points_on_poles_and_borders_fall_where_the_library_puts_them(
    lat: float, lon: float
) -> None:
    assert int(s2.cells(np.array([lat]), np.array([lon]))[0]) == oracle(lat, lon).id()


def test_borders_of_faces_and_cells_are_exact() -> None:
    degrees = [(lat, lon) for lat in range(-90, 91, 15) for lon in range(-180, 181, 15)]
    lat, lon = np.array(degrees, dtype=np.float64).T
    assert s2.cells(lat, lon).tolist() == [oracle(*point).id() for point in degrees]


@pytest.mark.parametrize("level", [0, 1, 6, 15])
def test_outlines_go_around_the_vertices_of_the_library(level: int) -> None:
    for point in zip(*around_the_globe(30), strict=True):
        cell = oracle(*point).parent(level)
        lat, lon = s2.outline(cell.to_token(), 8)
        assert (lat[0], lon[0]) == (lat[-1], lon[-1])
        for k in range(4):
            vertex = s2sphere.LatLng.from_point(s2sphere.Cell(cell).get_vertex(k))
            assert lat[8 * k] == pytest.approx(vertex.lat().degrees)
            assert np.cos(np.radians(lon[8 * k] - vertex.lng().degrees)) == pytest.approx(1)


def cut(points: list[s2sphere.CellId], cell: s2sphere.CellId, n_max: int) -> dict[str, int]:
    """The rule as the paper says it, point by point."""
    inside = [point for point in points if cell.contains(point)]
    if len(inside) <= n_max or cell.is_leaf():
        return {cell.to_token(): len(inside)} if len(inside) else {}
    return {k: v for child in cell.children() for k, v in cut(inside, child, n_max).items()}


@pytest.mark.parametrize("n_max", [1, 50, 300, 10**6])
def test_cells_are_cut_until_none_holds_too_many_and_small_ones_are_left_out(n_max: int) -> None:
    lat, lon = towns(1500)
    points = [oracle(*point) for point in zip(lat, lon, strict=True)]
    faces = [s2sphere.CellId.from_face_pos_level(face, 0, 0) for face in range(6)]
    expected = {k: v for face in faces for k, v in cut(points, face, n_max).items()}
    kept = {token: count for token, count in expected.items() if count >= 0.01 * n_max}
    if not kept:
        with pytest.raises(ValueError, match="n_max"):
            split(lat, lon, n_max=n_max)
        return
    held = split(lat, lon, n_max=n_max)
    assert held.names is not None
    assert dict(zip(held.names, held.sizes.tolist(), strict=True)) == kept
    for name, client in zip(held.names, range(len(held)), strict=True):
        cell = s2sphere.CellId.from_token(name)
        assert all(cell.contains(points[i]) for i in held.members(client).tolist())


def test_points_of_one_place_stay_together_and_those_without_one_are_left_out() -> None:
    lat, lon = np.array([10.0] * 7 + [np.nan, 20.0]), np.array([20.0] * 7 + [5.0, np.nan])
    held = split(lat, lon, n_max=3)
    assert held.sizes.tolist() == [7]
    assert held.names == (oracle(10, 20).to_token(),)


def test_many_points_take_as_many_more_calls_as_they_are_more() -> None:
    """Work that grew with the square of the points would be a hundred times as much."""
    few, many = (
        num_calls(partial(split, *towns(num_points), n_max=100)) for num_points in (3_000, 30_000)
    )
    assert many < 15 * few
    held = split(*towns(120_000), n_max=100)
    assert int(held.sizes.max()) <= 100
    assert Counter(held.index.tolist()).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"n_max": 0}, "n_max is 0: choose 1 or more"),
        ({}, {"n_max": 5, "lat": "latt"}, "no column 'latt': did you mean 'lat'?"),
        ({"lat": 91.0}, {"n_max": 5}, "the column 'lat' is 91.0: write degrees from -90 to 90"),
        ({"lon": 200.0}, {"n_max": 5}, "the column 'lon' is 200.0: write degrees from -180 to"),
        ({}, {"n_max": 1000}, "no cell holds 10 of the 3 examples with a place"),
    ],
)
def test_bad_places_are_answered_with_their_remedy(
    changes: dict[str, float], options: dict[str, Any], message: str
) -> None:
    place = {"lat": 1.0, "lon": 2.0} | changes
    with pytest.raises(ValueError) as refused:
        split(*(np.full(3, place[key]) for key in ("lat", "lon")), **options)
    assert message in str(refused.value)
