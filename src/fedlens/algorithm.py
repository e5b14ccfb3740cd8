"""An algorithm is a row of slots; a paper is a function that refills one or two of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from fedlens.core import (
    Advance,
    Cohort,
    Contraction,
    Federation,
    Holdings,
    Local,
    Memory,
    Number,
    Plan,
    Solve,
    Tell,
    Tree,
    Upload,
)
from fedlens.network.layout import Layout
from fedlens.pieces import (
    ByExamples,
    Epochs,
    Objective,
    Sgd,
    Uniformly,
    WeightedSum,
    difference,
)


class Combine(Protocol):
    """How uploads become one update.

    A `linear` one may be given the cohort part by part: the sums of the parts add up. Any other
    needs all uploads at once. `uses_shares`: nothing in it is weighed in another way. All of them
    are straight tensor code: a GPU may record them, and a cohort's counts are tensors then.
    """

    linear: ClassVar[bool]
    uses_shares: ClassVar[bool]

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree: ...


@dataclass(frozen=True)
class Algorithm:
    """FedAvg, unless a slot says otherwise. Slots stand in the order a round runs them."""

    select: Callable[[Federation, int, Tensor], Tensor] = Uniformly(10)  # who takes part
    draw: Callable[[Holdings, Tensor], Plan] = Epochs(1, batch_size=32)  # what each one sees
    objective: Objective = field(default_factory=Objective)  # what it minimises
    solve: Solve = field(default_factory=lambda: Sgd(0.1))  # how it minimises that
    upload: Callable[[Local], Upload] = difference  # what it sends, what it keeps
    weigh: Callable[[Cohort], Tensor] = ByExamples()  # each upload's final share
    combine: Combine = WeightedSum()  # how uploads become one update
    advance: Advance = field(default_factory=lambda: Sgd(1.0))  # how the server moves

    tell: tuple[Tell, ...] = ()  # what the server tells besides the model
    reset: bool = True  # whether a client's solver starts afresh in every round
    personal_norm: bool = False  # whether a client keeps its own normalisation layers
    measures: tuple[Callable[[Tree, Tree], dict[str, Tensor]], ...] = ()
    """What the server measures of its own step, from the model before and after, for the record."""
    discloses: frozenset[str] = frozenset()  # the facts that clients tell the server
    memory: Mapping[str, Callable[[Tree, Memory], Tree]] = field(default_factory=dict)
    """What clients remember, by name, with its value at a client never seen: a function of the
    server's model and of what the server tells."""

    @property
    def rate(self) -> float | None:
        """The lr, if a local step is w - lr * gradient of the loss and nothing else."""
        return None if self.objective.penalties else getattr(self.solve, "rate", None)

    @property
    def contraction(self) -> Contraction | None:
        """What a local step is, if it is one: penalties pull towards the server's model."""
        inner: Contraction | None = getattr(self.solve, "contraction", None)
        pulls: list[Any] = [getattr(p, "pull_to_server", None) for p in self.objective.penalties]
        if inner is None or None in pulls:
            return None
        return replace(inner, keep=inner.keep - inner.lr * sum(pulls))


EXCLUSIVE = ("select", "draw", "solve", "upload", "weigh", "combine", "advance")


@dataclass(frozen=True)
class Amendment:
    """A paper with its numbers: what it does to an algorithm."""

    name: str
    amend: Callable[[Algorithm], Algorithm]


def paper(function: Callable[..., Algorithm]) -> Callable[..., Amendment]:
    """Make `f(base, mu=...) -> Algorithm` into `f(mu=...) -> Amendment`."""
    name = function.__name__.replace("_", "-")
    _, *numbers = inspect.signature(function, eval_str=True).parameters.values()

    @functools.wraps(function)
    def bind(*args: Any, **kwargs: Any) -> Amendment:
        return Amendment(name, lambda algorithm: function(algorithm, *args, **kwargs))

    options = [p.replace(kind=p.KEYWORD_ONLY) for p in numbers]
    bind.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return bind


def compose(base: Algorithm, *amendments: Amendment) -> Algorithm:
    """`base`, amended from left to right; two papers may not refill one slot differently."""
    refilled: dict[str, str] = {}
    for number, amendment in enumerate(amendments):
        try:
            amended = amendment.amend(base)
        except ValueError as error:
            before = ", ".join(other.name for other in amendments[:number])
            raise ValueError(f"{error} (after {before})" if before else str(error)) from error
        if not isinstance(amended, Algorithm):
            raise ValueError(
                f"{amendment.name} gave {type(amended).__name__}: let it return an Algorithm, "
                "as dataclasses.replace(base, ...) does"
            )
        for slot in EXCLUSIVE:
            if same(getattr(amended, slot), getattr(base, slot)):
                continue
            if slot in refilled:
                raise ValueError(
                    f"{refilled[slot]} and {amendment.name} both refill `{slot}`: leave one out"
                )
            refilled[slot] = amendment.name
        base = amended
    remembers = bool(base.memory) or base.personal_norm or not base.reset
    if remembers and getattr(base.select, "replacement", False):
        raise ValueError(
            f"{refilled.get('select', 'select')} may draw a client twice in a round, and what it "
            "remembers can be kept only once: draw without replacement"
        )
    if "weigh" in refilled and not base.combine.uses_shares:
        ignoring = refilled.get("combine", type(base.combine).__name__)
        raise ValueError(
            f"{ignoring} has weights of its own, not those that {refilled['weigh']} sets: "
            "leave one out"
        )
    within = getattr(base.weigh, "within", None)
    if within is not None:  # shares that depend on how clients step, whoever says so
        base = replace(base, weigh=within(base))
    return base


def same(a: Any, b: Any) -> bool:
    """Whether two fillings are the same, number by number."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if is_dataclass(a) and type(a) is type(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def alike(a: Any, b: Any, is_number: bool = False) -> bool:
    """Whether two fillings differ in nothing but their fields of type `Number`."""
    if is_number and all(isinstance(value, (int, float)) for value in (a, b)):
        return True
    if is_dataclass(a) and type(a) is type(b):
        numbers = _numbers(type(a))
        return all(
            alike(getattr(a, f.name), getattr(b, f.name), f.name in numbers) for f in fields(a)
        )
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(map(alike, a, b))
    return same(a, b)


def _numbers(kind: type) -> set[str]:
    """The fields of a filling that may be a tensor [G]."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a class of the user's own, whose names are known in a function alone
        return set()
    return {name for name, hint in hints.items() if hint == Number}


T = TypeVar("T")


def side_by_side(fillings: Sequence[T], like: Tensor) -> T:
    """G fillings that are `alike` as one: numbers that differ become tensors [G], as `like` is."""
    first: Any = fillings[0]
    if all(same(first, other) for other in fillings):
        return cast(T, first)
    if isinstance(first, tuple):
        columns = zip(*cast(Any, fillings), strict=True)
        return cast(T, tuple(side_by_side(column, like) for column in columns))
    if is_dataclass(first):
        merged = {
            f.name: side_by_side([getattr(one, f.name) for one in fillings], like)
            for f in fields(first)
        }
        return cast(T, replace(cast(Any, first), **merged))
    return cast(T, torch.tensor(fillings, dtype=like.dtype, device=like.device))


def pick(filling: T, group: Tensor | None) -> T:
    """`filling` with the numbers of each row's own experiment: a tensor [G] becomes [C].

    `group` [C] says which experiment of a sweep each row belongs to; None: there is only one.
    """
    if group is None:
        return filling
    if isinstance(filling, Tensor):
        return filling[group]  # type: ignore[return-value]
    if isinstance(filling, tuple):
        return tuple(pick(part, group) for part in filling)  # type: ignore[return-value]
    if is_dataclass(filling) and not isinstance(filling, type):
        picked = {f.name: pick(getattr(filling, f.name), group) for f in fields(filling)}
        return replace(filling, **picked)
    return filling


def cohort_size(algorithm: Algorithm) -> int:
    """How many clients take part in a round."""
    count = getattr(algorithm.select, "count", None)
    if not isinstance(count, int):
        raise ValueError(f"{algorithm.select} does not say how many clients it selects")
    return count


def check_pull(base: Algorithm, pull: Number, what: str) -> None:
    """SGD on (pull / 2) ||w||^2 alone diverges from lr * pull = 2 (1 + momentum) on."""
    lr, momentum = (getattr(base.solve, name, None) for name in ("lr", "momentum"))
    plain = (int, float)
    if isinstance(pull, plain) and isinstance(lr, plain) and isinstance(momentum, plain):
        most = 2 * (1 + momentum) / lr if lr else torch.inf
        if pull >= most:
            raise ValueError(
                f"{what} {pull:g} diverges with local.lr {lr:g}: choose it below {most:g}"
            )


def at_least(number: Number, low: float, what: str) -> None:
    """Refuse a number, or one of a sweep's, below `low`."""
    values = torch.as_tensor(number)
    if not bool(((values >= low) & values.isfinite()).all()):
        raise ValueError(f"{what} is {number}: choose a number of {low:g} or more")


def below_one(number: Number, what: str) -> None:
    """Refuse a share of the past to be kept that is not in [0, 1)."""
    values = torch.as_tensor(number)
    if not bool(((values >= 0) & (values < 1)).all()):
        raise ValueError(f"{what} is {number}: choose a number from 0 to below 1")


def up_to_one(number: Number, what: str) -> None:
    """Refuse a share of the past to be kept that is not in [0, 1]."""
    values = torch.as_tensor(number)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError(f"{what} is {number}: choose a number from 0 to 1")
