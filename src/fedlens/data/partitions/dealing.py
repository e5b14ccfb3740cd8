"""Partitions that deal examples by chance: by size, by class, by Dirichlet shares.

There are two conventions of Dirichlet shares. With ten equal classes, alpha = 1 in `dirichlet` is
as skewed as 0.1 in `dirichlet-per-class`. Shares are drawn as logarithms, so that any alpha,
however small, works.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch

from fedlens.config.names import PARTITIONS
from fedlens.config.options import Bounds, ByName, call, resolve
from fedlens.config.sections import Count
from fedlens.core.federation import Holdings, Pool
from fedlens.storage.words import count_of

Array = np.ndarray[Any, Any]

NOBODY = -1

Alpha = Annotated[float, Bounds(least=0, most=math.inf)]
"""Of Dirichlet shares: from 0, most skewed, to infinity, all clients alike."""
Proportion = Annotated[float, Bounds(above=0)]


def apply_partition(
    name: str,
    given: Mapping[str, Any],
    pool: Pool,
    table: ByName = PARTITIONS,
) -> Any:
    """Apply the partition called `name`, from `table` or the user's own code, to examples."""
    function, examples = table.find(name), pool.examples
    options = resolve(table.options(name), given, f"partition {name!r}")
    if examples.rows is not None and not function.__module__.startswith("fedlens."):
        # A user's function reads `images` directly and expects one image per example.
        whole = replace(examples, images=examples.read(slice(None)), rows=None)
        pool = pool._replace(examples=whole)
    return call(function, pool, options=options)


def iid(pool: Pool) -> Holdings:
    """Examples shuffled and dealt one by one: sizes differ by at most one."""
    order = pool.rng.permutation(len(labels_of(pool)))
    return holdings(order % pool.num_clients, pool.num_clients)


def proportions(
    pool: Pool,
    *,
    sizes: Literal["homogeneous", "low", "high"] | list[Proportion] = "homogeneous",
    mode: Literal["renormalise", "truncate"] = "renormalise",
    order: Literal["shuffled", "stored"] = "shuffled",
) -> Holdings:
    """Clients of chosen sizes, whatever the classes: a skew of quantity.

    `homogeneous` clients are equal. `low` is .01, .03, .05, ..., .19 for ten clients, and goes on
    in steps of .02 for more. `high` is nine times .01, and .91 for the last client; with more than
    ten clients the last still has .91, and the others share .09 equally. Fewer than ten clients
    take the first of the ten, so that fewer than ten `high` clients are all equal. A list gives a
    proportion for each client.

    `renormalise` scales the clients' proportions to sum to one: every example is held. `truncate`
    does not, as in the paper's code: five `low` clients hold a quarter of the examples, and sizes
    are rounded down. `stored` cuts slices from the stored order, as that code does; `shuffled`
    shuffles first.
    """
    num_examples, num_clients, rng = len(labels_of(pool)), pool.num_clients, pool.rng
    listed = _proportions(sizes, num_clients)
    chosen = listed[:num_clients]
    if mode == "truncate":
        # The margin keeps 3500 from becoming 3499 when the quotient has a rounding error.
        held = np.floor(num_examples * chosen / listed.sum() + 1e-6).astype(np.int64)
    else:
        held = largest_remainder(num_examples, chosen / chosen.sum())
    if not held.all():
        raise ValueError(
            f"{np.sum(held == 0)} of {num_clients} clients would hold none of {num_examples} "
            "examples: choose fewer clients, or more equal sizes"
        )
    owner = np.full(num_examples, NOBODY)
    owner[: held.sum()] = np.repeat(np.arange(num_clients), held)
    return holdings(rng.permutation(owner) if order == "shuffled" else owner, num_clients)


def quantity_dirichlet(pool: Pool, *, alpha: Alpha) -> Holdings:
    """Sizes ~ Dir(alpha), whatever the classes: small alphas give most examples to a few clients.

    Every client has at least one. With alpha = 0 one client has all others, with inf all are equal.
    """
    num_examples, num_clients, rng = len(labels_of(pool)), pool.num_clients, pool.rng
    if alpha == math.inf:
        shares = np.ones(num_clients)
    else:
        log_shares = log_gamma(np.array([alpha]), num_clients, rng)[:, 0]
        shares = np.exp(log_shares - log_shares.max())
    return _shuffled(_sizes(num_examples, shares), rng)


def power_law(pool: Pool, *, exponent: Annotated[float, Bounds(least=0)]) -> Holdings:
    """Client k, from 1, has a size in proportion to k to the power of -exponent, at least one."""
    num_examples, num_clients, rng = len(labels_of(pool)), pool.num_clients, pool.rng
    shares = np.exp(-exponent * np.log(np.arange(1.0, num_clients + 1)))
    return _shuffled(_sizes(num_examples, shares), rng)


def _sizes(num_examples: int, shares: Array) -> Array:  # [K]
    """Client sizes: one example for each client, and the others in proportion to `shares`."""
    return 1 + largest_remainder(num_examples - len(shares), shares / shares.sum())


def _shuffled(sizes: Array, rng: np.random.Generator) -> Holdings:
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return holdings(owner, len(sizes))


def _proportions(sizes: str | list[float], num_clients: int) -> Array:
    """The list of proportions. `low` and `high` give at least ten, whatever `num_clients`."""
    length = max(num_clients, 10)
    if sizes == "homogeneous":
        return np.ones(num_clients)
    if sizes == "low":
        return np.arange(1.0, 2 * length, 2)
    if sizes == "high":
        return np.append(np.full(length - 1, 9 / (length - 1)), 91.0)
    if len(sizes) != num_clients:
        raise ValueError(
            f"sizes lists {len(sizes)} proportions for {num_clients} clients: "
            "list one for each client"
        )
    return np.array(sizes, dtype=np.float64)


def shards(pool: Pool, *, per_client: Count = 2) -> Holdings:
    """Sorted by label and cut into equal shards, `per_client` to a client at random (McMahan).

    A client's shards may be of the same class, and a shard may span two classes; `classes` gives
    each client distinct ones. Shards differ by at most one example.
    """
    labels, num_clients, rng = labels_of(pool), pool.num_clients, pool.rng
    num_shards = num_clients * per_client
    if num_shards > len(labels):
        raise ValueError(
            f"{num_shards} shards but {len(labels)} examples: "
            "choose fewer clients or a smaller per_client"
        )
    dealt = rng.permutation(np.repeat(np.arange(num_clients), per_client))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label(labels, rng)] = dealt[np.arange(len(labels)) * num_shards // len(labels)]
    return holdings(owner, num_clients)


def slices(
    pool: Pool,
    *,
    alike: Annotated[float, Bounds(least=0, most=1)] = 0.0,
    mixed: Annotated[int, Bounds(least=0)] = 0,
    tail: Annotated[float, Bounds(above=0, most=1)] = 1.0,
) -> Holdings:
    """Sorted by label and cut into equal slices, client after client (Karimireddy, ByzFL).

    Args:
        alike: the share of each client's examples that are dealt at random instead.
        mixed: so many clients, the last ones, have all of theirs dealt at random.
        tail: of class i, from 0, the share tail^i is held, and the rest by nobody: a long tail.
    """
    labels, num_clients, rng = labels_of(pool), pool.num_clients, pool.rng
    if mixed >= num_clients:
        raise ValueError(f"mixed is {mixed} of {num_clients} clients: choose fewer")
    order = by_label(labels, rng)
    counts = np.bincount(labels, minlength=pool.num_classes)
    kept = np.floor(counts * tail ** np.arange(len(counts)) + 1e-9)
    order = order[places(counts) < kept[labels[order]]]
    of_client = largest_remainder(len(order), np.full(num_clients, 1 / num_clients))
    at_random = np.floor(of_client * alike + 1e-9).astype(np.int64)
    at_random[num_clients - mixed :] = of_client[num_clients - mixed :]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[rng.permutation(len(order))[: at_random.sum()]] = True
    owner = np.full(len(labels), NOBODY)
    clients = np.arange(num_clients)
    owner[rng.permutation(order[chosen])] = np.repeat(clients, at_random)
    owner[order[~chosen]] = np.repeat(clients, of_client - at_random)
    return holdings(owner, num_clients)


def classes(pool: Pool, *, per_client: Count) -> Holdings:
    """Exactly `per_client` distinct classes at each client, at random.

    All classes have the same number of holders, give or take one; but a class never has more
    holders than examples. It is divided equally among them. When clients are so few that they
    cannot hold every class, the examples of the others are left out.
    """
    labels, num_clients, rng = labels_of(pool), pool.num_clients, pool.rng
    present, labels, available = np.unique(labels, return_inverse=True, return_counts=True)
    if per_client > len(present):
        raise ValueError(
            f"per_client is {per_client} but there are examples of {len(present)} classes: "
            f"choose at most {len(present)}"
        )
    limits = np.minimum(available, num_clients)
    if limits.sum() < num_clients * per_client:
        raise ValueError(
            f"{num_clients} clients cannot hold {per_client} classes each, as some classes have "
            "few examples: choose fewer clients or a smaller per_client"
        )
    shuffled = rng.permutation(len(present))
    num_holders = np.empty_like(limits)
    num_holders[shuffled] = levelled(limits[shuffled], num_clients * per_client)

    held = _deal_classes(num_holders, num_clients, per_client, rng)
    pair = rng.permutation(held.size)
    holders = (pair // per_client)[np.argsort(held.ravel()[pair], kind="stable")]
    order = by_label(labels, rng)
    place = places(available)
    used = num_holders[labels[order]] > 0
    order, place = order[used], place[used]
    label = labels[order]
    first = np.cumsum(num_holders) - num_holders  # where a class's holders begin in `holders`
    owner = np.full(len(labels), NOBODY)
    owner[order] = holders[first[label] + place % num_holders[label]]
    return holdings(owner, num_clients)


def _deal_classes(
    num_holders: Array, num_clients: int, per_client: int, rng: np.random.Generator
) -> Array:  # [K, per_client]
    """The classes of each client, such that every class has its number of holders.

    A client draws classes with probability proportional to the number of holders they still lack.
    A class that lacks as many holders as there are clients left must be taken; there are never
    more than `per_client` such classes, so the assignment always succeeds.
    """
    lacking = num_holders.copy()
    held = np.empty((num_clients, per_client), dtype=np.int64)
    patience = rng.standard_exponential((num_clients, len(lacking)))
    for client in range(num_clients):
        urgency = lacking / patience[client]
        urgency[lacking == num_clients - client] = np.inf
        held[client] = np.argpartition(-urgency, per_client - 1)[:per_client]
        lacking[held[client]] -= 1
    return rng.permutation(held)


def dirichlet(pool: Pool, *, alpha: Alpha, size: Count | None = None) -> Holdings:
    """Clients of equal size with class shares ~ Dir(alpha p), p the data's own (Hsu).

    A client's counts are its size times its shares, rounded by largest remainder. A class that
    runs out is left out from there on, and its part goes to the others in proportion. With
    alpha = 0 the clients take one class each, in turn, and the fullest class when theirs runs out;
    with alpha = inf every client has the data's own shares. With a `size` each client holds that
    many examples, and nobody the others.
    """
    labels, num_clients, rng = labels_of(pool), pool.num_clients, pool.rng
    if alpha == math.inf and size is None:
        return evenly(labels, num_clients, rng)
    _, labels, available = np.unique(labels, return_inverse=True, return_counts=True)
    sizes = (len(labels) + np.arange(num_clients)[::-1]) // num_clients
    if size is not None:
        if size > sizes.min():
            raise ValueError(
                f"size is {size}: {num_clients} clients of {len(labels)} examples can hold "
                f"{sizes.min()} each, so choose less, or fewer clients"
            )
        sizes = np.full(num_clients, size)
    if alpha == 0:
        counts = _one_class_each(sizes, rng.permutation(len(available)), available)
    elif alpha == math.inf:
        counts = _without_replacement(sizes, np.log([available] * num_clients), available)
    else:
        concentrations = alpha * (available / len(labels))
        counts = _without_replacement(sizes, log_gamma(concentrations, num_clients, rng), available)
    counts = np.vstack([counts, available - counts.sum(0)])
    owner = np.empty(len(labels), dtype=np.int64)
    clients = np.tile([*range(num_clients), NOBODY], len(available))
    owner[by_label(labels, rng)] = np.repeat(clients, counts.T.ravel())
    return holdings(owner, num_clients)


def dirichlet_per_class(pool: Pool, *, alpha: Alpha, min_size: Count = 1) -> Holdings:
    """Each class cut among the clients by shares ~ Dir(alpha), as in NIID-Bench and Flower.

    Sizes differ. Clients with fewer than `min_size` examples are filled up with examples of the
    largest clients, which come down to one level; nothing is drawn again. With alpha = 0 a class
    is at one client, before filling up; with alpha = inf every client has the data's own shares.
    """
    labels, num_clients, rng = labels_of(pool), pool.num_clients, pool.rng
    if min_size * num_clients > len(labels):
        raise ValueError(
            f"{len(labels)} examples are too few for {num_clients} clients of at least "
            f"{min_size}: choose fewer clients or a smaller min_size"
        )
    if alpha == math.inf:
        return evenly(labels, num_clients, rng)
    owner = np.empty(len(labels), dtype=np.int64)
    ends = np.cumsum(np.bincount(labels))
    for members in np.split(by_label(labels, rng), ends[:-1]):
        log_shares = log_gamma(np.array([alpha]), num_clients, rng)[:, 0]
        parts = np.cumsum(np.exp(log_shares - log_shares.max()))
        place = np.searchsorted(parts / parts[-1] * len(members), np.arange(len(members)) + 0.5)
        # The client order differs by class: otherwise rounding always favours the same clients.
        owner[members] = rng.permutation(num_clients)[place]
    return holdings(_filled_up(owner, num_clients, min_size), num_clients)


def _without_replacement(sizes: Array, log_shares: Array, available: Array) -> Array:  # [K, L]
    """Each client's class counts, from its shares and what earlier clients have not taken."""
    counts = np.zeros(log_shares.shape, dtype=np.int64)
    left = available.copy()
    for client, missing in enumerate(sizes.tolist()):
        while missing:  # repeats only if a class ran out: at most K + L times in total
            remaining = np.where(left > 0, log_shares[client], -np.inf)
            shares = np.exp(remaining - remaining.max())
            taken = np.minimum(largest_remainder(missing, shares / shares.sum()), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def _one_class_each(sizes: Array, turns: Array, available: Array) -> Array:  # [K, L]
    """Each client's class counts if it takes the next class in `turns`, then the fullest class."""
    counts = np.zeros((len(sizes), len(turns)), dtype=np.int64)
    left = available.copy()
    for client, missing in enumerate(sizes.tolist()):
        label = turns[client % len(turns)]
        while missing:
            taken = min(missing, int(left[label]))
            counts[client, label] += taken
            left[label] -= taken
            missing -= taken
            label = left.argmax()
    return counts


def _filled_up(owner: Array, num_clients: int, min_size: int) -> Array:  # [N]
    """The owners after the largest clients give examples to the clients below `min_size`."""
    sizes = np.bincount(owner, minlength=num_clients)
    missing = np.maximum(min_size - sizes, 0)
    givers = missing == 0
    kept = sizes.copy()
    kept[givers] = levelled(sizes[givers], int(sizes[givers].sum() - missing.sum()))
    order = np.argsort(owner, kind="stable")
    given = order[places(sizes) >= kept[owner[order]]]
    owner[given] = np.repeat(np.arange(num_clients), missing)
    return owner


def labels_of(pool: Pool) -> Array:  # [N]
    """The labels; a ValueError if there are fewer than clients."""
    labels: Array = pool.examples.labels.cpu().numpy()
    if not len(labels):
        raise ValueError("there are no training examples: give the data set some")
    if pool.num_clients > len(labels):
        raise ValueError(
            f"{count_of(pool.num_clients, 'client')} but {count_of(len(labels), 'example')}: "
            "choose no more clients than there are examples"
        )
    return labels


def holdings(owner: Array, num_clients: int) -> Holdings:
    """The holdings of the clients; `owner` has the client of each example, or NOBODY."""
    sizes = np.bincount(owner[owner != NOBODY], minlength=num_clients)
    index = np.argsort(owner, kind="stable")[len(owner) - sizes.sum() :]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Holdings(
        torch.from_numpy(index.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
    )


def by_label(labels: Array, rng: np.random.Generator) -> Array:  # [N]
    """The positions of the examples, sorted by label and shuffled within each label."""
    shuffled = rng.permutation(len(labels))
    order: Array = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return order


def places(sizes: Array) -> Array:
    """0, 1, 2, ... within each group, for consecutive groups of these sizes."""
    starts: Array = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.arange(len(starts)) - starts


def evenly(labels: Array, num_clients: int, rng: np.random.Generator) -> Holdings:
    """Every class spread evenly: its counts, and the clients' sizes, differ by at most one."""
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label(labels, rng)] = np.arange(len(labels)) % num_clients
    return holdings(owner, num_clients)


def largest_remainder(total: int, shares: Array) -> Array:
    """`total` times shares that sum to one, as whole numbers that sum to `total`."""
    exact = total * shares
    counts: Array = np.floor(exact).astype(np.int64)
    missing = total - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def log_gamma(shapes: Array, rows: int, rng: np.random.Generator) -> Array:  # [rows, shapes]
    """Logarithms of Gamma draws: the exponentials of a row, normalised, are a Dirichlet draw.

    log Gamma(a) = log Gamma(a + 1) + log(U) / a stays finite where Gamma(a) underflows to zero.
    """
    shapes = np.maximum(shapes, 1e-300)
    size = (rows, len(shapes))
    return np.log(rng.standard_gamma(shapes + 1, size)) - rng.standard_exponential(size) / shapes


def levelled(limits: Array, total: int) -> Array:
    """Whole numbers that sum to `total`, as equal as possible, none above its limit."""

    def sum_at(level: int) -> int:
        return int(np.minimum(limits, level).sum())

    level = bisect.bisect_right(range(int(limits.max()) + 1), total, key=sum_at) - 1
    numbers = np.minimum(limits, level)
    numbers[np.flatnonzero(limits > level)[: total - numbers.sum()]] += 1
    return numbers
