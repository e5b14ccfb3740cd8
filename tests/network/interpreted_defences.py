"""Triton kernels of defences beside plain PyTorch: a part of `interpreted_kernels.py`."""

import itertools
from collections.abc import Iterable
from unittest import mock

import torch

from fedlens.algorithms import distances as found_by
from fedlens.algorithms.meamed import ALIKE, around_median
from fedlens.algorithms.median import mean_between
from fedlens.network.kernels import gram, order
from tests.network.agreeing import DEVICE

CLIENTS = (1, 2, 5, 12, 33, 100)
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}


def some_rows(clients: int, dtype: torch.dtype) -> torch.Tensor:
    """More columns than a program takes, with equal values, not next to each other in memory."""
    rows = torch.randn(clients, 150, device=DEVICE).to(dtype)
    rows[: clients // 2, 7] = 0.5
    rows[:, 8] = rows[:, 8].round()
    return rows[:, :133]


def order_statistics(numbers: Iterable[int] = CLIENTS) -> None:
    for clients, (dtype, near) in itertools.product(numbers, DTYPES.items()):
        rows, most = some_rows(clients, dtype), (clients - 1) // 2
        many = clients > 50  # a GPU's kernels are compiled for each number, and many take long
        for cut in {clients // 5} if many else {0, clients // 5, most}:
            found, expected = order.mean_between(rows, cut), mean_between(rows, cut)
            torch.testing.assert_close(found, expected, rtol=near, atol=near)
        for keep in {clients - clients // 5} if many else {clients, clients - most // 2, most + 1}:
            found, expected = order.mean_around(rows, keep, ALIKE), around_median(rows, keep)
            torch.testing.assert_close(found, expected, rtol=near, atol=near)
    print("order statistics agree")


def row_products() -> None:
    for clients in CLIENTS:
        for dtype in DTYPES:
            rows = some_rows(clients, dtype)
            with mock.patch.object(gram, "PROGRAMS", 3):
                found = gram.products(rows)
                about = gram.products(rows, rows[0])
            wide = rows.double()
            torch.testing.assert_close(found, wide @ wide.T)
            away = wide - wide[0]
            torch.testing.assert_close(about, away @ away.T)
    print("products of rows agree")


def distances() -> None:
    """Also of rows near each other, far from 0, beside one that is longer: read once more."""
    for distance, length in ((0.0, 1.0), (1e6, 1e12)):
        rows = distance + 1e-3 * some_rows(8, torch.float64)
        rows[3] = -length
        with (
            mock.patch.object(gram, "PROGRAMS", 3),
            mock.patch.object(found_by, "by_kernels", lambda _: True),
        ):
            found = found_by.squared_distances({"w": rows})
        expected = (rows[:, None] - rows[None]).square().sum(2)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
    print("distances agree")
