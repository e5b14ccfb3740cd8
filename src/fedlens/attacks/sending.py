"""Attacks on what clients send. u_i are the updates of the H honest clients, m is their mean and s
their standard deviation, coordinate by coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from fedlens.attacks.attack import Attack, Clients, Seen, Sending
from fedlens.core import Tree, keys, squared_norm
from fedlens.core.trees import moved


@dataclass(frozen=True)
class Scaled(Sending):
    """What each hostile client has trained, times a factor; None: clients / hostile clients."""

    factor: float | None

    def __call__(self, seen: Seen) -> Tree:
        factor = self.factor
        if factor is None:
            factor = seen.num_clients / len(next(iter(seen.own.values())))
        return {name: factor * u for name, u in seen.own.items()}


@dataclass(frozen=True)
class Noise(Sending):
    """Normal numbers of this standard deviation, different ones from each client."""

    sigma: float

    def __call__(self, seen: Seen) -> Tree:
        sent = {}
        for number, (name, u) in enumerate(sorted(seen.own.items())):
            drawn = keys.normals(moved(keys.fold(seen.key, number), u.device), u.numel())
            sent[name] = (self.sigma * drawn).to(u).view(u.shape)
        return sent


Direction = Callable[[Tree], Tree]  # from the honest updates, [1, ...]


def _mean(honest: Tree) -> Tree:
    return {name: u.mean(0, keepdim=True) for name, u in honest.items()}


def _deviation(honest: Tree) -> Tree:
    return {name: u.std(0, correction=0, keepdim=True) for name, u in honest.items()}


@dataclass(frozen=True)
class Shifted(Sending):
    """m - z p, where p is a direction."""

    direction: Direction
    z: float | None  # None: what `alie` computes

    def __call__(self, seen: Seen) -> Tree:
        z = self.z
        if z is None:
            z = largest_hidden(seen.num_clients, len(next(iter(seen.own.values()))))
        return _shifted(_mean(seen.honest), self.direction(seen.honest), z)


def _shifted(mean: Tree, direction: Tree, z: float | Tensor) -> Tree:
    return {name: mean[name] - p * z for name, p in direction.items()}


def largest_hidden(clients: int, hostile: int) -> float:
    """The z with which m - z s is nearer to m than `clients / 2 + 1 - hostile` honest values are,
    if these are normal."""
    honest = clients - hostile
    supporters = clients // 2 + 1 - hostile
    if not 0 < supporters < honest:
        return 1.0
    return NormalDist().inv_cdf((honest - supporters) / honest)


@dataclass(frozen=True)
class AmongOthers(Sending):
    """m - z s with the largest z for which it is as near to the u_i as they are to each other.

    ||m - z s - u_i||^2 is a quadratic in z, so the largest z is the root of one: for each i its
    distance is to stay below the largest of ||u_i - u_j||^2 ("max"); or the sum of its distances
    below the largest sum of distances of an honest client ("sum").
    """

    of: Literal["max", "sum"]

    def __call__(self, seen: Seen) -> Tree:
        mean, p = _mean(seen.honest), _deviation(seen.honest)
        away = {name: u - mean[name] for name, u in seen.honest.items()}  # u_i - m
        count = len(next(iter(away.values())))
        between = torch.stack(
            [squared_norm({n: u - u[one] for n, u in away.items()}) for one in range(count)]
        )  # [H, H]
        a = squared_norm(p)  # [1]
        b = _along(away, {name: one[0] for name, one in p.items()})  # [H]
        c = squared_norm(away)  # [H]
        if self.of == "max":
            c = c - between.max()
        else:
            a, b, c = count * a, b.sum(), c.sum() - between.sum(1).max()
        root = ((b * b - a * c).clamp(min=0).sqrt() - b) / a.clamp(min=1e-300)
        return _shifted(mean, p, root.min().clamp(min=0))


@dataclass(frozen=True)
class Strongest(Sending):
    """m - z p with the z, of some, that moves what the defence gives the farthest from m."""

    direction: Direction

    def __call__(self, seen: Seen) -> Tree:
        mean, p = _mean(seen.honest), self.direction(seen.honest)
        tried = [_shifted(mean, p, z) for z in STRENGTHS]
        moved = []
        for sent in tried:
            made = seen.defence(sent)
            moved.append(squared_norm({n: made[n][None] - mean[n] for n in p}))
        return tried[int(torch.cat(moved).nan_to_num(nan=-1.0).argmax())]


STRENGTHS = tuple(0.1 * 1.5**step for step in range(16))  # 0.1 to 44


@dataclass(frozen=True)
class Mimic(Sending):
    """The update of one honest client, the one that lies farthest along z.

    z follows the direction in which honest clients differ most, by one step of Oja's rule a round:
    z = z + sum over i of <u_i - m, z> (u_i - m), to length 1.
    """

    def init(self, params: Tree) -> Tree:
        return {name: torch.ones_like(p, dtype=torch.float64) for name, p in params.items()}

    def update(self, seen: Seen, memory: Tree) -> tuple[Tree, Tree]:
        mean = _mean(seen.honest)
        away = {name: u.double() - mean[name].double() for name, u in seen.honest.items()}
        z = _to_length_1({name: memory[name] for name in away})
        z = _to_length_1(
            {n: z[n] + torch.tensordot(_along(away, z), u, 1) for n, u in away.items()}
        )
        one = int(_along({n: u.double() for n, u in seen.honest.items()}, z).argmax())
        return {name: u[one : one + 1] for name, u in seen.honest.items()}, memory | z


def _along(updates: Tree, z: Tree) -> Tensor:  # [C]
    return torch.stack([u.flatten(1) @ z[name].flatten() for name, u in updates.items()]).sum(0)


def _to_length_1(z: Tree) -> Tree:
    length = squared_norm({name: one[None] for name, one in z.items()}).sqrt().clamp(min=1e-300)
    return {name: one / length for name, one in z.items()}


def _not_negative(value: float, what: str) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"attack: {what} is {value:g}: choose 0 or more")
    return value


def sign_flip(*, clients: Clients = 0.2, redraw: bool = False, scale: float = 1.0) -> Attack:
    """Send the opposite of what was trained.

    Args:
        scale: how long it is, compared with what was trained.
    """
    return Attack(clients, redraw, Scaled(-_not_negative(scale, "scale")))


def gaussian(*, clients: Clients = 0.2, redraw: bool = False, sigma: float = 1.0) -> Attack:
    """Send normal numbers.

    Args:
        sigma: their standard deviation.
    """
    return Attack(clients, redraw, Noise(_not_negative(sigma, "sigma")))


def free_rider(*, clients: Clients = 0.2, redraw: bool = False, sigma: float = 0.0) -> Attack:
    """Send nothing new: zeros, or small normal numbers that look like an update.

    Args:
        sigma: their standard deviation.
    """
    return Attack(clients, redraw, Noise(_not_negative(sigma, "sigma")))


def scale(*, clients: Clients = 0.2, redraw: bool = False, factor: float | None = None) -> Attack:
    """Send what was trained, boosted (model replacement; Bagdasaryan et al., 2020).

    Args:
        factor: how many times; without it, so that it is all of a plain mean.
    """
    return Attack(clients, redraw, Scaled(factor))


def ipm(*, clients: Clients = 0.2, redraw: bool = False, epsilon: float = 0.1) -> Attack:
    """Inner-product manipulation (Xie et al., 2020): send -epsilon times the honest mean.

    Args:
        epsilon: how long it is, compared with the honest mean.
    """
    return Attack(clients, redraw, Shifted(_mean, 1 + _not_negative(epsilon, "epsilon")))


def alie(*, clients: Clients = 0.2, redraw: bool = False, z: float | None = None) -> Attack:
    """A little is enough (Baruch et al., 2019): the honest mean less z standard deviations.

    Args:
        z: without it, the largest that as many honest updates exceed as are needed to hide it.
    """
    return Attack(clients, redraw, Shifted(_deviation, z))


def min_max(*, clients: Clients = 0.2, redraw: bool = False) -> Attack:
    """As far from the honest mean as two honest updates are from each other (Shejwalkar, 2021)."""
    return Attack(clients, redraw, AmongOthers("max"))


def min_sum(*, clients: Clients = 0.2, redraw: bool = False) -> Attack:
    """As far from all honest updates together as one of them is (Shejwalkar, 2021)."""
    return Attack(clients, redraw, AmongOthers("sum"))


def optimal_ipm(*, clients: Clients = 0.2, redraw: bool = False) -> Attack:
    """Inner-product manipulation of the strength that hurts the defence in use most."""
    return Attack(clients, redraw, Strongest(_mean))


def optimal_alie(*, clients: Clients = 0.2, redraw: bool = False) -> Attack:
    """A little is enough, of the strength that hurts the defence in use most."""
    return Attack(clients, redraw, Strongest(_deviation))


def mimic(*, clients: Clients = 0.2, redraw: bool = False) -> Attack:
    """Send what one honest client sends, so that it counts too much (Karimireddy et al., 2022)."""
    return Attack(clients, redraw, Mimic())
