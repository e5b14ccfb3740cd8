"""The cells of S2: six faces of a cube around the globe, each divided in four repeatedly.

A cell is the 64-bit number that the S2 library gives it: three bits for the face, two for each
division along a Hilbert curve, then a one and zeros. Its token is that number in hexadecimal
without the zeros at its end. All functions are vectorised over points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LEVELS = 30  # divisions of a face down to the smallest cells, a centimetre wide
SIDE = 1 << LEVELS

_SWAP, _INVERT = 1, 2
# For each of the four directions of the curve: the order of the quarters (2 i + j) along it. _TURNS
# has the change of direction inside each quarter.
_QUARTERS = np.array([[0, 1, 3, 2], [0, 2, 3, 1], [3, 2, 0, 1], [3, 1, 0, 2]])
_PLACES = np.argsort(_QUARTERS, axis=1)
_TURNS = np.array([_SWAP, 0, 0, _INVERT | _SWAP])


def degrees(given: Any, limit: int, what: str) -> float:
    """A latitude or longitude of at most `limit`, or NaN where nothing is given."""
    if given is None or str(given).lower() in ("", "nan"):
        return math.nan
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.inf
    if not -limit <= value <= limit:
        raise ValueError(
            f"{what} is {given!r}: write degrees from {-limit} to {limit}, or nothing where the "
            "place is not known"
        )
    return value


def cells(lat: Array, lon: Array) -> Array:  # [N] degrees -> [N] uint64
    """The smallest cell around each point."""
    phi, theta = np.radians(lat), np.radians(lon)
    # Python's math functions: NumPy's differ in the last bit, which would put a point on the border
    # of two cells into another cell than the S2 library does.
    cos_phi = _each(math.cos, phi)
    x, y = _each(math.cos, theta) * cos_phi, _each(math.sin, theta) * cos_phi
    face, u, v = _on_cube(x, y, _each(math.sin, phi))
    return _along_curve(face, _leaf(u), _leaf(v))


def parents(cell: Array, level: int) -> Array:  # uint64 -> uint64
    """The cell at `level` that contains each cell."""
    last = np.uint64(1 << (2 * (LEVELS - level)))
    return cell & ~(last - np.uint64(1)) | last


def tokens(cell: Array) -> list[str]:
    return [f"{number:016x}".rstrip("0") for number in cell.tolist()]


def quadtree(cell: Array, n_max: int) -> Array:  # [N] uint64 -> [N] uint64
    """The largest cell around each point, from the faces down, that holds at most `n_max` points.

    A cell of the smallest size may hold more, since it cannot be divided.
    """
    found = np.empty_like(cell)
    left = np.arange(len(cell))
    for level in range(LEVELS + 1):
        around = parents(cell[left], level)
        _, which, counts = np.unique(around, return_inverse=True, return_counts=True)
        settled = (counts <= n_max)[which] | (level == LEVELS)
        found[left[settled]] = around[settled]
        left = left[~settled]
        if not len(left):
            break
    return found


def clients(lat: Array, lon: Array, n_max: int) -> tuple[list[str], Array]:
    """The tokens of the cells that become clients, and for each point [N] which of them it is in.

    Cells are those of `quadtree`. One with fewer than 0.01 `n_max` points is left out, and its
    points are at -1, as are points without a place (NaN).
    """
    placed = np.flatnonzero(~np.isnan(lat) & ~np.isnan(lon))
    tree = quadtree(cells(lat[placed], lon[placed]), n_max)
    found, which, counts = np.unique(tree, return_inverse=True, return_counts=True)
    large = 100 * counts >= n_max
    if not large.any():
        raise ValueError(
            f"no cell holds {n_max / 100:g} of the {len(placed)} examples with a place, a "
            f"hundredth of n_max = {n_max}: choose a smaller n_max"
        )
    owner = np.full(len(lat), -1)
    owner[placed] = np.where(large, np.cumsum(large) - 1, -1)[which]
    return tokens(found[large]), owner


def outline(token: str, num_points: int = 64) -> tuple[Array, Array]:
    """The border of a cell as a closed line of latitudes and longitudes, `num_points` per side."""
    face, low, high = _square(int(token.ljust(16, "0"), 16))
    along = np.linspace(0, 1, num_points, endpoint=False)
    ones = np.ones(num_points)
    s = low[0] + (high[0] - low[0]) * np.concatenate([along, ones, 1 - along, 0 * ones, [0]])
    t = low[1] + (high[1] - low[1]) * np.concatenate([0 * ones, along, ones, 1 - along, [0]])
    x, y, z = _off_cube(face, _to_uv(s), _to_uv(t))
    return np.degrees(np.arctan2(z, np.hypot(x, y))), np.degrees(np.arctan2(y, x))


def _each(function: Callable[[float], float], values: Array) -> Array:
    return np.fromiter(map(function, values.tolist()), np.float64, len(values))


def _on_cube(x: Array, y: Array, z: Array) -> tuple[Array, Array, Array]:
    """The face of the cube that each point projects to, and its coordinates u and v in -1..1."""
    ax, ay, az = np.abs(x), np.abs(y), np.abs(z)
    axis = np.where(ax > ay, np.where(ax > az, 0, 2), np.where(ay > az, 1, 2))
    ahead = np.choose(axis, [x, y, z])
    face = np.where(ahead < 0, axis + 3, axis)
    u = np.choose(face, [y, -x, -x, z, z, -y]) / ahead
    v = np.choose(face, [z, z, -y, y, -x, -x]) / ahead
    return face, u, v


def _off_cube(face: int, u: Array, v: Array) -> tuple[Array, Array, Array]:
    """The coordinates x, y, z of the points u, v on a face of the cube."""
    one = np.ones_like(u)
    points = [(one, u, v), (-u, one, v), (-u, -v, one), (-one, -v, -u), (v, -one, -u), (v, u, -one)]
    return points[face]


def _leaf(u: Array) -> Array:
    """The column, of 2^30, that contains u; the quadratic projection makes cell areas similar."""
    s = np.where(
        u >= 0, 0.5 * np.sqrt(1 + 3 * np.maximum(u, 0)), 1 - 0.5 * np.sqrt(1 - 3 * np.minimum(u, 0))
    )
    column: Array = np.clip(np.floor(SIDE * s), 0, SIDE - 1).astype(np.int64)
    return column


def _to_uv(s: Array) -> Array:
    result: Array = np.where(s >= 0.5, 4 * s**2 - 1, 1 - 4 * (1 - s) ** 2) / 3
    return result


def _along_curve(face: Array, i: Array, j: Array) -> Array:
    """The numbers of the smallest cells at these columns and rows of their faces."""
    number = face.astype(np.uint64)
    direction = face & _SWAP
    for bit in reversed(range(LEVELS)):
        quarter = 2 * ((i >> bit) & 1) + ((j >> bit) & 1)
        place = _PLACES[direction, quarter]
        number = number * np.uint64(4) + place.astype(np.uint64)
        direction = direction ^ _TURNS[place]
    return number * np.uint64(2) + np.uint64(1)


def _square(cell: int) -> tuple[int, Sequence[float], Sequence[float]]:
    """The face of a cell, and two opposite corners of its square on the face, in 0..1."""
    level = LEVELS - ((cell & -cell).bit_length() - 1) // 2
    face, direction = cell >> 61, (cell >> 61) & _SWAP
    i = j = 0
    for cut in range(level):
        place = (cell >> (59 - 2 * cut)) & 3
        quarter = int(_QUARTERS[direction, place])
        i, j = 2 * i + (quarter >> 1), 2 * j + (quarter & 1)
        direction ^= int(_TURNS[place])
    width = 0.5**level
    return face, (i * width, j * width), ((i + 1) * width, (j + 1) * width)
