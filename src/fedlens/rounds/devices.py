"""The clients' devices: how fast they compute, send and receive, and when they are available.

Times are seconds on a virtual clock that starts with the run, at midnight. No real time passes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from fedlens.config.options import Bounds
from fedlens.core import keys

HOUR, DAY = 3600.0, 86400.0
BYTES = 1e6 / 8  # in a megabit
Rate = Annotated[float, Bounds(above=0)]
Sigma = Annotated[float, Bounds(least=0, most=10)]  # of a logarithm
SPEED, UP, DOWN, HOURS, JITTER = map(keys.purpose, ("speed", "up", "down", "hours", "jitter"))


@dataclass(frozen=True)
class Devices:
    """D devices; client k has device k mod D."""

    examples_per_second: Tensor  # [D] float64
    up: Tensor  # [D] bytes a second
    down: Tensor  # [D]
    opens: Tensor  # [D, W] when a device becomes available, in seconds after midnight
    closes: Tensor  # [D, W] when it leaves, up to a day later; infinity: never
    jitter: float = 0.0  # sigma of the logarithm of computing times from round to round

    def seconds(
        self, clients: Tensor, client_keys: Tensor, examples: Tensor, up: int, down: int
    ) -> Tensor:  # [C]
        """The time for each to receive `down` bytes, train on this many examples and send `up`."""
        rows = clients % len(self.up)
        training = examples.double() / self.examples_per_second[rows]
        if self.jitter:
            training = training * (self.jitter * keys.normal(keys.fold(client_keys, JITTER))).exp()
        return down / self.down[rows] + training + up / self.up[rows]

    def there_until(self, clients: Tensor, time: float) -> Tensor:  # [C]
        """The time at which each available client leaves; -infinity if it is not available."""
        rows = clients % len(self.up)
        opens, closes = self.opens[rows], self.closes[rows]
        now, midnight = time % DAY, time - time % DAY
        found = torch.full((len(clients),), -math.inf, dtype=torch.float64)
        for day in (0.0, -DAY):  # a window that opened yesterday may still be open
            is_open = (opens + day <= now) & (now < closes + day)
            ends = torch.where(is_open, midnight + day + closes, -math.inf)
            found = torch.maximum(found, ends.amax(1))
        return found


def alike(
    num_clients: int,
    key: Tensor,
    *,
    examples_per_second: Rate = 100.0,
    up_mbit: Rate = 10.0,
    down_mbit: Rate = 50.0,
) -> Devices:
    """Every client has the same device, which is always there.

    Args:
        examples_per_second: how fast it trains.
        up_mbit: its bandwidth to the server, in megabits a second.
        down_mbit: the same from the server.
    """
    return synthetic(
        1,
        key,
        examples_per_second=examples_per_second,
        up_mbit=up_mbit,
        down_mbit=down_mbit,
        spread=0.0,
        bandwidth_spread=0.0,
    )


def synthetic(
    num_clients: int,
    key: Tensor,
    *,
    examples_per_second: Rate = 100.0,
    spread: Sigma = 0.5,
    up_mbit: Rate = 10.0,
    down_mbit: Rate = 50.0,
    bandwidth_spread: Sigma = 0.5,
    jitter: Sigma = 0.0,
    hours: Annotated[float, Bounds(above=0, most=24)] = 24.0,
) -> Devices:
    """Devices whose speeds are log-normal, each there for some hours of the day.

    Args:
        examples_per_second: the median of speeds.
        spread: the sigma of their logarithm.
        up_mbit: the median of bandwidths to the server, in megabits a second.
        down_mbit: the same from the server.
        bandwidth_spread: the sigma of the logarithm of bandwidths.
        jitter: how a device's own speed varies, the sigma of its logarithm.
        hours: of each day that a device is there, from an hour of its own on.
    """
    every = torch.arange(num_clients)

    def drawn(median: float, sigma: float, purpose: int) -> Tensor:
        return median * (sigma * keys.normal(keys.fold(key, purpose, every))).exp()

    opens = DAY * keys.uniform(keys.fold(key, HOURS, every))[:, None]
    closes = opens + hours * HOUR if hours < 24 else torch.full_like(opens, math.inf)
    return Devices(
        examples_per_second=drawn(examples_per_second, spread, SPEED),
        up=BYTES * drawn(up_mbit, bandwidth_spread, UP),
        down=BYTES * drawn(down_mbit, bandwidth_spread, DOWN),
        opens=opens if hours < 24 else torch.zeros_like(opens),
        closes=closes,
        jitter=jitter,
    )


def trace(num_clients: int, key: Tensor, *, path: str, jitter: Sigma = 0.0) -> Devices:
    """Devices from a csv file, dealt to the clients in turn.

    Args:
        path: a file with the columns device, examples_per_second, up_mbit and down_mbit and, if
            devices come and go, from_hour and to_hour of the day. A device that comes several
            times a day has several rows.
        jitter: how a device's own speed varies, the sigma of its logarithm.
    """
    rates: dict[str, list[float]] = {}
    windows: dict[str, list[tuple[float, float]]] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            needed = ["device", "examples_per_second", "up_mbit", "down_mbit"]
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path} has no column {missing[0]}: add it to its first line")
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                device = row["device"] or ""
                rates[device] = [_positive(row[name], name, place) for name in needed[1:]]
                windows.setdefault(device, []).append(_window(row, place))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read ({reason}): give a csv file") from error
    if not rates:
        raise ValueError(f"{path} lists no device: give a line for each")
    speed, up, down = torch.tensor(list(rates.values()), dtype=torch.float64).T
    opens, closes = _padded(list(windows.values()))
    return Devices(speed, BYTES * up, BYTES * down, opens, closes, jitter)


def _positive(text: str | None, name: str, place: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{place}: {name} is {text!r}: give a number above 0")
    return value


def _window(row: dict[str, str | None], place: str) -> tuple[float, float]:
    first, last = row.get("from_hour"), row.get("to_hour")
    if not first and not last:
        return 0.0, math.inf
    try:
        opens, closes = float(first or ""), float(last or "")
    except ValueError:
        opens = closes = math.nan
    if not (0 <= opens <= 24 and 0 <= closes <= 24 and opens != closes):
        raise ValueError(
            f"{place}: from_hour is {first!r} and to_hour {last!r}: give two hours from 0 to 24"
        )
    if closes - opens == 24:
        return 0.0, math.inf
    return opens * HOUR, (closes if closes > opens else closes + 24) * HOUR


def _padded(windows: Sequence[Sequence[tuple[float, float]]]) -> tuple[Tensor, Tensor]:
    """The windows as tensors [D, W]; a device with fewer windows repeats its last one."""
    most = max(map(len, windows))
    rows = [[*some, *[some[-1]] * (most - len(some))] for some in windows]
    both = torch.tensor(rows, dtype=torch.float64)  # [D, W, 2]
    return both[..., 0], both[..., 1]
