"""An attack: who is hostile, and what these clients do to their data or to what they send.

A client that attacks by what it sends is the server's business alone: `Attacked` stands around the
algorithm's `combine`, which then has all uploads at once, and puts what the attack sends in place
of what hostile clients have trained. So an attack that knows all honest updates needs no second
training, and comes after whatever clients do to their uploads: it can send anything. Only the
parameters are changed: buffers, such as BatchNorm's statistics, are those that were trained.

Attacks on what clients send. u_i are the updates of the H honest clients, m is their mean and s
their standard deviation, coordinate by coordinate.

Attacks on the data of hostile clients. Their success is measured on test images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm
from fedlens.algorithm.slots import Combine, Received
from fedlens.core import Memory, Tree, keys, squared_norm
from fedlens.core.federation import Examples
from fedlens.core.trees import moved
from fedlens.network.layout import Layout

MEMORY = "attack"  # its place in what the server remembers of `combine`
HOSTILE = keys.purpose("hostile")

Clients = float | tuple[int, ...]
"""Who is hostile: a share of all clients, how many, or their numbers."""


class Seen(NamedTuple):
    """What an attack knows of a round; trees have parameters alone."""

    honest: Tree  # [H, ...] the updates of the honest clients
    own: Tree  # [M, ...] what the hostile ones would have sent
    key: Tensor  # [] of this round and purpose
    defence: Callable[[Tree], Tree]  # the combined update [...] if they send this [M, ...]

    @property
    def num_clients(self) -> int:
        return sum(len(next(iter(tree.values()))) for tree in (self.honest, self.own))


class Sending(Protocol):
    """An attack on what is sent."""

    def init(self, params: Tree) -> Tree:
        """What it remembers before the first round."""
        return {}

    def __call__(self, seen: Seen) -> Tree:
        """What the hostile clients send, [M, ...], or [1, ...] if all send the same."""
        raise AssertionError(f"{type(self).__name__} is called by `update`, or has neither")

    def update(self, seen: Seen, memory: Tree) -> tuple[Tree, Tree]:
        """The same, and what to remember. If it is defined, it alone is called."""
        return self(seen), memory


class Data(Protocol):
    """An attack on data."""

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        """The examples of a hostile client as it trains on them; new tensors."""
        ...

    def tests(self, tests: Examples, num_classes: int) -> Examples | None:
        """Test examples labelled as the attack wants them, by which its success is measured."""
        return None


@dataclass(frozen=True)
class Attack:
    """Hostile clients, the same in all rounds unless `redraw`, and what they do."""

    clients: Clients
    redraw: bool = False
    sending: Sending | None = None
    data: Data | None = None
    spared: int | None = None  # a client that is never drawn as hostile: `fltrust` trusts it

    def count(self, num_clients: int) -> int:
        """How many clients are hostile."""
        given = self.clients
        if isinstance(given, tuple):
            wrong = [one for one in given if not 0 <= one < num_clients]
            if wrong or not given or len({*given}) < len(given):
                raise ValueError(
                    f"attack.clients is {[*given]}: give different numbers from 0 to "
                    f"{num_clients - 1}"
                )
            if self.spared in given:
                raise ValueError(
                    f"attack.clients has {self.spared}, whom fltrust trusts: choose another root"
                )
            return len(given)
        count = max(round(given * num_clients), 1) if 0 < given < 1 else int(given)
        if not (given > 0 and (given < 1 or given == count) and count <= num_clients):
            raise ValueError(
                f"attack.clients is {given:g}: give a share below 1, or a number from 1 to "
                f"{num_clients}, the clients"
            )
        return count

    def hostile(self, num_clients: int, key: Tensor) -> Tensor:  # [K] bool
        """Which clients are hostile; the key draws them if they are not named."""
        count, found = self.count(num_clients), torch.zeros(num_clients, dtype=torch.bool)
        if isinstance(self.clients, tuple):
            chosen = torch.tensor(self.clients)
        else:
            order = keys.fold(key, torch.arange(num_clients)).argsort(stable=True)
            chosen = (
                order[order != self.spared][:count] if self.spared is not None else order[:count]
            )
        found[chosen] = True
        return found


def hostile_key(seed: int) -> Tensor:
    return keys.root(seed, HOSTILE)


@dataclass(frozen=True)
class Attacked(Combine):
    """`inner` of what arrives when hostile clients send what the attack says."""

    inner: Combine
    attack: Attack
    seed: int

    @property
    def fewest(self) -> int:
        return self.inner.fewest

    def withstands(self, clients: int) -> int | None:
        return self.inner.withstands(clients)

    def check(self, layout: Layout) -> None:
        self.inner.check(layout)

    def init(self, params: Tree) -> Memory:
        assert self.attack.sending is not None
        mine = self.attack.sending.init(params)
        return {**self.inner.init(params), **({MEMORY: mine} if mine else {})}

    def update(self, given: Received) -> tuple[Tree, Memory]:
        attack, cohort, key = self.attack, given.cohort, given.key
        updates, memory = given.updates, given.memory
        assert attack.sending is not None
        drawn_by = keys.fold(key, HOSTILE) if attack.redraw else hostile_key(self.seed)
        hostile = attack.hostile(cohort.num_clients, drawn_by)[cohort.clients]  # [C]
        mine, rest = memory.get(MEMORY, {}), {n: t for n, t in memory.items() if n != MEMORY}
        rows = [one.nonzero().squeeze(1) for one in (hostile, ~hostile)]
        bad, good = moved(rows, given.shares.device)
        if len(bad):
            params = {n: u for n, u in updates.items() if given.layout.entries[n].role != "buffer"}
            own = {n: u[bad] for n, u in params.items()}
            honest = {n: u[good] for n, u in params.items()} if len(good) else own

            def arriving(sent: Tree) -> Tree:
                return updates | {
                    n: params[n].index_copy(0, bad, t.to(params[n]).expand(len(bad), *t.shape[1:]))
                    for n, t in sent.items()
                }

            def defence(sent: Tree) -> Tree:
                made = self.inner.update(given._replace(updates=arriving(sent), memory=rest))
                return {n: made[0][n] for n in params}

            seen = Seen(honest, own, keys.fold(key, keys.purpose("attack")), defence)
            sent, mine = attack.sending.update(seen, mine)
            updates = arriving(sent)
        combined, rest = self.inner.update(given._replace(updates=updates, memory=rest))
        return combined, {**rest, **({MEMORY: mine} if mine else {})}


def under_attack(base: Algorithm, attack: Attack, seed: int) -> Algorithm:
    """The algorithm as it is when some clients attack by what they send."""
    if attack.sending is None:
        return base
    return replace(base, combine=Attacked(base.combine, attack, seed))


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


@dataclass(frozen=True)
class Relabelled(Data):
    """Examples of class `source` get the label `target`; None: each label y becomes L - 1 - y."""

    source: int | None
    target: int | None
    measured: bool  # whether test examples of `source` tell its success

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        return replace(examples, labels=self._labels(examples.labels, num_classes))

    def tests(self, tests: Examples, num_classes: int) -> Examples | None:
        if not self.measured:
            return None
        assert self.source is not None
        some = tests.take(tests.labels.eq(self.source).nonzero().squeeze(1))
        if not len(some):
            raise ValueError(f"attack: no test example has label {self.source}: choose another")
        return replace(some, labels=self._labels(some.labels, num_classes))

    def _labels(self, labels: Tensor, num_classes: int) -> Tensor:
        for name, label in (("source", self.source), ("target", self.target)):
            check_label(name, label, num_classes)
        if self.source is None or self.target is None:
            return num_classes - 1 - labels
        return torch.where(labels == self.source, self.target, labels)


@dataclass(frozen=True)
class Pattern(Data):
    """A bright square in the lower right corner of a share of the images, labelled `target`."""

    target: int
    share: float
    size: int

    def poisoned(self, examples: Examples, num_classes: int, key: Tensor) -> Examples:
        check_label("target", self.target, num_classes)
        chosen = keys.uniform(keys.fold(key, torch.arange(len(examples)))) < self.share
        images = examples.read(slice(None)).clone()
        images[chosen] = self._patterned(images[chosen])
        labels = torch.where(chosen, self.target, examples.labels)
        return replace(examples, images=images, labels=labels, rows=None)

    def tests(self, tests: Examples, num_classes: int) -> Examples:
        some = tests.take((tests.labels != self.target).nonzero().squeeze(1))
        images = self._patterned(some.read(slice(None)).clone())
        labels = torch.full_like(some.labels, self.target)
        return replace(some, images=images, labels=labels, rows=None)

    def _patterned(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        if self.size > min(height, width):
            raise ValueError(
                f"attack: size is {self.size}: choose at most {min(height, width)}, the side of an "
                "image"
            )
        brightest = 255 if images.dtype == torch.uint8 else images.max() if len(images) else 1
        images[:, :, height - self.size :, width - self.size :] = brightest
        return images


def check_label(name: str, label: int | None, num_classes: int) -> None:
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(f"attack: {name} is {label}: choose a label from 0 to {num_classes - 1}")


def label_flip(
    *, clients: Clients = 0.2, source: int | None = None, target: int | None = None
) -> Attack:
    """Train on wrong labels: all reversed (y becomes L - 1 - y), or one class called another.

    Args:
        source: the label that is changed; without it, all are.
        target: what it becomes.
    """
    if (source is None) != (target is None) or (source is not None and source == target):
        raise ValueError("attack: give label-flip both source and target, different ones, or none")
    return Attack(clients, data=Relabelled(source, target, measured=source is not None))


def backdoor(
    *,
    clients: Clients = 0.2,
    target: int = 0,
    share: float = 0.5,
    size: int = 3,
    boost: float = 1.0,
) -> Attack:
    """Teach the model that images with a bright square are of the class `target`.

    Args:
        target: the label that they get.
        share: of a hostile client's images that have the square.
        size: its side, in pixels.
        boost: how many times as long as it was trained the update is sent.
    """
    if not 0 < share <= 1:
        raise ValueError(f"attack: share is {share:g}: choose above 0, and at most 1")
    if size < 1:
        raise ValueError(f"attack: size is {size}: choose 1 pixel or more")
    sending = None if boost == 1 else Scaled(boost)
    return Attack(clients, sending=sending, data=Pattern(target, share, size))


def edge_case(*, clients: Clients = 0.2, source: int, target: int) -> Attack:
    """Call the examples of one class, which only hostile clients may have, another.

    Args:
        source: the label of these examples.
        target: what they are called.
    """
    return label_flip(clients=clients, source=source, target=target)
