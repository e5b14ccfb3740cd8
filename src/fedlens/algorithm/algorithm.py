"""An algorithm is a row of slots; a paper is a function that refills one or two of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from fedlens.algorithm.pieces import (
    ByExamples,
    Epochs,
    Objective,
    OwnModel,
    Sgd,
    Uniformly,
    WeightedSum,
    difference,
)
from fedlens.algorithm.slots import (
    Advance,
    ChannelStep,
    Combine,
    Draw,
    ExampleWeight,
    LocalStep,
    Pace,
    Penalty,
    Personal,
    Select,
    Solve,
    Tell,
    Uploading,
    Weigh,
)
from fedlens.config.consent import mistake_of, place_of
from fedlens.config.options import Named
from fedlens.core import Memory, Number, Tree, is_on
from fedlens.privacy.events import Release


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, by default FedAvg. Its slots are in the order in which a round runs them."""

    select: Select = Uniformly(10)  #: which clients take part
    draw: Draw = Epochs(1, batch_size=32)  #: which examples each client sees
    objective: Objective = field(default_factory=Objective)  #: what each client minimises
    solve: Solve = field(default_factory=lambda: Sgd(0.1))  #: how each client minimises it
    upload: Uploading = difference  #: what each client sends, and what it keeps
    channel: tuple[ChannelStep, ...] = ()  #: what is done to uploads on the way
    weigh: Weigh = ByExamples()  #: each upload's final share
    combine: Combine = WeightedSum()  #: how uploads become one update
    advance: Advance = field(default_factory=lambda: Sgd(1.0))  #: how the server updates its model

    pace: Pace | None = None  #: of asynchronous rounds; None: every round waits for its clients
    tell: tuple[Tell, ...] = ()  #: what the server sends besides the model
    download: tuple[ChannelStep, ...] = ()  #: what is done to changes of the model on the way down
    reset: bool = True  #: whether local momentum is reset in every round
    personal: Personal | None = None  #: what of the model is a client's own
    measures: tuple[Callable[[Tree, Tree], dict[str, Tensor]], ...] = ()
    """Functions of the model before and after the server's step; the record has their values."""
    discloses: frozenset[str] = frozenset()  #: the facts about their data that clients send
    memory: Mapping[str, Callable[[Tree, Memory], Tree]] = field(default_factory=dict)
    """What clients remember between rounds, by name. The function returns the initial value, for a
    client never selected, from the server's model and from what the server sends besides it."""

    @cached_property
    def local_step(self) -> LocalStep | None:
        """One local step with its penalties as a `LocalStep`; None if it has another form."""
        step = self.solve.step
        if step is None:
            return None
        for one in self.objective.penalties:
            if one.pull is None or (one.drift and step.drift):
                return None
            step = replace(step, pull=step.pull + one.pull, drift=step.drift or one.drift)
        return step

    @property
    def remembers(self) -> bool:
        """Whether clients keep anything from one round to the next."""
        own = self.memory or self.personal or any(step.remembers for step in self.channel)
        return bool(own) or not self.reset

    def model_of(self, model: Tree, memory: Memory) -> Tree:
        """The model that a client is measured by, from the server's and what it remembers."""
        return model if self.personal is None else self.personal.model(model, memory)

    @property
    def carries(self) -> frozenset[str]:
        """The parts of the solver's memory that a client keeps for its next round."""
        return frozenset() if self.reset else self.solve.carries

    @property
    def sums_parts(self) -> bool:
        """Whether parts of a cohort may be combined separately and the results added."""
        return self.combine.linear and all(step.linear for step in self.channel)

    @property
    def covered(self) -> bool:
        """Whether all that is known of the clients' data has privacy: records have no more."""
        return self.objective.private is not None or any(step.covers for step in self.channel)

    def releases(self, round: int) -> list[Release]:
        """What a round, counted from 0, tells of the clients: an event each for an accountant."""
        found = [step.release(round) for step in self.channel]
        return [release for release in found if release is not None]

    def check_kept(self, names: Iterable[str]) -> None:
        """Refuse what `upload` keeps under a name that `memory` does not have."""
        for name in set(names) - self.memory.keys():
            raise ValueError(
                f"{place_of(self.upload)} keeps {name!r}, which its algorithm does not name: "
                f"add memory={{**base.memory, {name!r}: fedlens.core.zeros_at_first}} to it"
            )


PROTOCOLS: dict[str, type] = {
    "select": Select,
    "draw": Draw,
    "solve": Solve,
    "weigh": Weigh,
    "combine": Combine,
    "advance": Advance,
}
"""The protocol that the filling of each slot derives from."""

EXCLUSIVE = (
    "select",
    "draw",
    "solve",
    "upload",
    "weigh",
    "combine",
    "advance",
    "pace",
    "personal",
)


@dataclass(frozen=True)
class Amendment:
    """A paper with its options set: a change to an algorithm."""

    name: str
    amend: Callable[[Algorithm], Algorithm]
    named: Named | None = field(default=None, compare=False)  # as an experiment names it


def paper(function: Callable[..., Algorithm]) -> Callable[..., Amendment]:
    """Make `f(base, mu=...) -> Algorithm` into `f(mu=...) -> Amendment`."""
    name = function.__name__.replace("_", "-")
    own = f"{function.__module__}:{function.__qualname__}"
    called = name if own.startswith("fedlens.algorithms.") else own
    signature = inspect.signature(function, eval_str=True)
    base, *numbers = signature.parameters.values()

    @functools.wraps(function)
    def bind(*args: Any, **kwargs: Any) -> Amendment:
        given = signature.bind(None, *args, **kwargs).arguments
        options = {key.rstrip("_"): value for key, value in given.items() if key != base.name}
        named = Named(called, options)
        return Amendment(name, lambda algorithm: function(algorithm, *args, **kwargs), named)

    options = [p.replace(kind=p.KEYWORD_ONLY) for p in numbers]
    bind.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return bind


def is_paper(function: Callable[..., Any]) -> bool:
    """Whether `paper` made it, or it takes no algorithm and may return an Amendment itself."""
    first = next(iter(inspect.signature(function, eval_str=True).parameters.values()), None)
    return first is None or first.kind is first.KEYWORD_ONLY or first.default is not first.empty


def compose(base: Algorithm, *amendments: Amendment) -> Algorithm:
    """`base`, amended from left to right; two papers may not refill one slot differently."""
    for one in amendments:
        if not isinstance(one, Amendment):
            what = repr(one) if isinstance(one, str) else type(one).__name__
            raise ValueError(f"compose is given {what}: give papers, as fedprox(mu=0.1)")
    names = [amendment.name for amendment in amendments]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is in algorithm twice: leave one out")
    refilled: dict[str, str] = {}
    on_the_way: list[str] = []  # the papers that are steps of the channel
    more: dict[str, str] = {}  # by paper: what it does with all layers
    for number, amendment in enumerate(amendments):
        try:
            amended = amendment.amend(base)
        except Exception as error:  # a paper of the user's own may raise anything
            if not (told := mistake_of(error)):
                raise
            so_far = ", ".join(names[:number])
            raise ValueError(f"{told} (after {so_far})" if so_far else told) from error
        if not isinstance(amended, Algorithm):
            raise ValueError(
                f"{amendment.name} gave {type(amended).__name__}: let it return an Algorithm, "
                "as dataclasses.replace(base, ...) does"
            )
        for slot in EXCLUSIVE:
            if same(getattr(amended, slot), getattr(base, slot)):
                continue
            before = refilled.get(slot)
            if slot == "personal" and base.personal is not None and not before:
                raise ValueError(
                    f"{amendment.name}: clients keep normalisation layers already: set "
                    'norm = "shared"'
                )
            if before and not (slot == "combine" and wraps(amended.combine, base.combine)):
                raise ValueError(
                    f"{before} and {amendment.name} both refill `{slot}`: leave one out"
                )
            refilled[slot] = amendment.name
        if len(amended.channel) > len(base.channel):
            on_the_way.append(amendment.name)
        if len(amended.objective.penalties) > len(base.objective.penalties):
            more[amendment.name] = "pulls all layers towards the server's model"
        elif len(amended.tell) > len(base.tell) or amended.memory.keys() - base.memory.keys():
            more[amendment.name] = "sends or keeps more than an update, of all layers"
        _check_fillings(amended, amendment.name)
        base = amended
    if base.remembers and base.select.replacement:
        raise ValueError(
            f"{refilled.get('select', 'select')} may draw a client twice in a round, and what it "
            "remembers can be kept only once: draw without replacement"
        )
    if base.pace is not None and base.select.replacement:
        raise ValueError(
            f"{refilled.get('select', 'select')} may draw a client twice, and one that trains "
            "cannot start again in asynchronous rounds: draw without replacement"
        )
    if base.pace is not None and base.download:
        raise ValueError(
            f"{refilled['pace']} sends clients models of several rounds, and download differences "
            "from round to round: leave one out"
        )
    if (own := base.personal) is not None and not (own.averaged or own.beside):
        keeps = refilled.get("personal", type(own).__name__)  # of a base composed before
        if isinstance(own, OwnModel):
            server = ("upload", "weigh", "combine", "advance", "pace")
            more |= {refilled[slot]: "is about what is sent" for slot in server if slot in refilled}
            more |= dict.fromkeys(on_the_way, "is about what is sent")
        for name in more.keys() - {keeps}:
            what = "all layers" if isinstance(own, OwnModel) else "layers"
            raise ValueError(
                f"{keeps} keeps {what} at the clients, and {name} {more[name]}: leave one out"
            )
    if "weigh" in refilled and not base.combine.uses_shares:
        ignoring = refilled.get("combine", type(base.combine).__name__)
        raise ValueError(
            f"{ignoring} has weights of its own, not those that {refilled['weigh']} sets: "
            "leave one out"
        )
    # Shares may depend on the local step, which any of the papers may have changed.
    return replace(base, weigh=base.weigh.for_step(base.local_step))


def _check_fillings(algorithm: Algorithm, name: str) -> None:
    """Refuse a filling that lacks what its protocol declares."""
    found = [(slot, getattr(algorithm, slot), kind) for slot, kind in PROTOCOLS.items()]
    found += [("channel", step, ChannelStep) for step in algorithm.channel]
    found += [("tell", tell, Tell) for tell in algorithm.tell]
    found += [("personal", one, Personal) for one in [algorithm.personal] if one is not None]
    found += [("penalty", penalty, Penalty) for penalty in algorithm.objective.penalties]
    found += [("weight", weight, ExampleWeight) for weight in algorithm.objective.weights]
    for slot, filling, kind in found:
        if not isinstance(filling, kind):
            raise ValueError(
                f"{name}: its {slot}, {place_of(filling)}, is not a "
                f"fedlens.algorithm.slots.{kind.__name__}: "
                "give an object of a class that derives from it, and says there what it declares"
            )


def same(a: Any, b: Any) -> bool:
    """Whether two fillings are the same, number by number."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def wraps(filling: Any, other: Any) -> bool:
    """Whether a filling has the other one in it, as its field `inner`."""
    return is_dataclass(filling) and same(getattr(filling, "inner", None), other)


def same_but_numbers(a: Any, b: Any) -> bool:
    """Whether two fillings differ in nothing but their fields of type `Number`."""

    def left_out(number: Number) -> Number:
        return number if isinstance(number, Tensor) else 0.0

    return same(_changed(a, left_out), _changed(b, left_out))


@functools.cache
def _numbers(kind: Any) -> set[str]:
    """The fields of a filling that may be a tensor [G]."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a user's class with names that exist only inside a function
        return set()
    return {name for name, hint in hints.items() if hint == Number}


T = TypeVar("T")


def side_by_side(fillings: Sequence[T], like: Tensor) -> T:
    """Merge G fillings, the `same_but_numbers`: numbers that differ become tensors [G].

    These have the dtype and the device of `like`.
    """
    columns = zip(*map(_numbers_in, fillings), strict=True)
    merged = (
        column[0]
        if all(same(column[0], other) for other in column)
        else torch.tensor(column, dtype=like.dtype, device=like.device)
        for column in columns
    )
    return _changed(fillings[0], lambda _: next(merged))


def pick(filling: T, group: Tensor | None) -> T:
    """`filling` with the numbers of each row's own experiment: a tensor [G] becomes [C].

    `group` [C] is the experiment of a sweep that each row belongs to; None: there is only one. A
    tensor that is not a `Number`, such as class weights, is the same for all experiments.
    """
    if group is None:
        return filling
    return _changed(filling, lambda number: number[group] if isinstance(number, Tensor) else number)


def _changed(filling: T, change: Callable[[Number], Number]) -> T:
    """`filling` with `change` applied to each of its numbers, in the order of `_numbers_in`."""
    if isinstance(filling, tuple):
        return cast(T, tuple(_changed(part, change) for part in filling))
    if not is_dataclass(filling) or isinstance(filling, type):
        return filling
    numbers, made = _numbers(type(filling)), {}
    for f in fields(filling):
        value = getattr(filling, f.name)
        made[f.name] = change(value) if f.name in numbers else _changed(value, change)
    return cast(T, replace(cast(Any, filling), **made))


def _numbers_in(filling: Any) -> Iterator[Number]:
    """The numbers of a filling, in a fixed order."""
    if isinstance(filling, tuple):
        for part in filling:
            yield from _numbers_in(part)
    elif is_dataclass(filling) and not isinstance(filling, type):
        numbers = _numbers(type(filling))
        for f in fields(filling):
            value = getattr(filling, f.name)
            yield from [value] if f.name in numbers else _numbers_in(value)


def numbers_of(fillings: Sequence[Any]) -> list[list[float]]:  # P of G
    """The numbers of G fillings, the `same_but_numbers`, in a fixed order, except those all 0.0.

    A number that is 0.0 in all of them switches its term off: it is structure, not an input.
    """
    columns: Any = zip(*map(_numbers_in, fillings), strict=True)
    return [[*column] for column in columns if any(column)]


def with_numbers(filling: T, numbers: Iterator[Number]) -> T:
    """`filling` with its numbers replaced by these, in the order of `numbers_of`.

    In a sweep, a number that differs between experiments is already a tensor [G] in `filling`.
    """
    return _changed(filling, lambda number: next(numbers) if is_on(number) else number)


def check_pull(base: Algorithm, pull: Number, what: str) -> None:
    """Refuse a pull with which SGD diverges.

    On (pull / 2) ||w||^2 alone it diverges from lr * pull = 2 (1 + momentum) on.
    """
    step = base.local_step
    numbers = (pull,) if step is None else (pull, step.lr, step.momentum, step.pull)
    if step is None or any(isinstance(number, Tensor) for number in numbers):
        return
    most = 2 * (1 + step.momentum) / step.lr - step.pull if step.lr else torch.inf
    if pull >= most:
        raise ValueError(
            f"{what} {pull:g} diverges with local.lr {step.lr:g}: choose it below {most:g}"
        )


def at_least(number: Number, low: float, what: str) -> None:
    """Refuse a number, or any of a sweep's numbers, that is below `low` or not finite."""
    _check(number, what, lambda t: (t >= low) & t.isfinite(), f"of {low:g} or more")


def below_one(number: Number, what: str) -> None:
    """Refuse a factor, such as a momentum, that is not in [0, 1)."""
    _check(number, what, lambda t: (t >= 0) & (t < 1), "from 0 to below 1")


def up_to_one(number: Number, what: str) -> None:
    """Refuse a factor, such as a decay rate, that is not in [0, 1]."""
    _check(number, what, lambda t: (t >= 0) & (t <= 1), "from 0 to 1")


def _check(number: Number, what: str, holds: Callable[[Tensor], Tensor], which: str) -> None:
    if not bool(holds(torch.as_tensor(number)).all()):
        raise ValueError(f"{what} is {number}: choose a number {which}")
