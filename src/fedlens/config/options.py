"""Options by name: one check for experiment files, command lines and Python.

Everything that a user can name (an algorithm, a partition, a model, a data set) is a function.
Fedlens passes its positional parameters; its keyword-only parameters, with their types and
defaults, are the options that an experiment file may set. They are declared nowhere else.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar, Union

from fedlens.config.consent import NotApproved, lacks, place_of_error, why_not_imported
from fedlens.config.signatures import Read, read
from fedlens.storage.reading import shortened

LARGEST = 1e38  # about the largest number of float32

G = TypeVar("G")
V = TypeVar("V")
T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """Something chosen by name, with its options; in a file, a name or a table."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, where: str) -> Named:
        if isinstance(value, Named):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            return cls(value["name"], {k: v for k, v in value.items() if k != "name"})
        name = '"module:function" (a notebook\'s is __main__)' if callable(value) else "a name"
        raise ValueError(f"{where} is {_shown(value)}: give {name}, or a table with a name")


class Given(Generic[G, V]):
    """The type of a dataclass field that is given as a G and read as a V.

    To type checkers it is a descriptor: the constructor takes a G, and reading the field gives a V.
    At run time it is only an annotation, from which `check` knows how to make the V.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> V: ...
        def __set__(self, instance: object, value: G) -> None: ...


class Bounds(NamedTuple):
    """Between which numbers a field lies, as the second part of its type's `Annotated`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def fit(self, made: Any, where: str) -> Any:
        """What a field was given, if it is no number or lies between them.

        Infinity does so only if it is the `most`.
        """
        if not isinstance(made, (int, float)) or (
            (self.least is None or made >= self.least)
            and (self.above is None or made > self.above)
            and (self.most is None or made <= self.most)
            and (self.below is None or made < self.below)
            and (math.isfinite(made) or self.most == made)
        ):
            return made
        finite = "" if math.isfinite(made) else ", and finite"
        raise OutOfBounds(f"{where} is {made!r}: choose {self}{finite}")

    def __str__(self) -> str:
        lowest = f"{self.least:g}" if self.above is None else f"above {self.above:g}"
        if self.most is None and self.below is None:
            return f"{lowest} or more" if self.above is None else f"a number {lowest}"
        return (
            f"{lowest} to {self.most:g}"
            if self.below is None
            else f"{lowest} to below {self.below:g}"
        )


class OutOfBounds(ValueError):
    """A value of the right type that lies outside of its bounds."""


class Elsewhere(type):
    """The type of classes that stand for those of a module whose import takes seconds.

    A value can be an instance of them only if that module was imported.
    """

    def __instancecheck__(cls, value: Any) -> bool:
        home = sys.modules.get(cls.__module__)
        return isinstance(value, getattr(home, cls.__name__, ()))


def default(value: object) -> Any:
    """The default of a `Given` field: a V."""
    return value


def required() -> Any:
    """A `Given` field without a default.

    Type checkers use the descriptor only of fields with a default: `Any` hides that there is none.
    """
    return field()


OWN = ""
"""In a `ByName`: each function is in a module of its own, which is called as it is."""


_as_data: ContextVar[bool] = ContextVar("as data", default=False)


@contextmanager
def names_as_data() -> Iterator[None]:
    """Within it nothing that has a name is looked up or imported: the names may be anyone's."""
    token = _as_data.set(True)
    try:
        yield
    finally:
        _as_data.reset(token)


class ByName(Mapping[str, Callable[..., Any]]):
    """Functions by name, from the modules of a package; a module is imported on first access.

    A function is called as the name it is chosen by, with _ for -. `modules` has the names, one or
    several with spaces between them, and the module of these. `libraries` are other packages,
    whose contents are chosen as "library:name": the function called `library`, given the name,
    returns its inner function `make`. Error messages call such a thing a `kind`. With `schedules`,
    options that are numbers may be schedules, which are named there. The name `automatic` stands
    for one that the rest of the experiment decides.

    It may stand in the `Annotated` type of a field, whose names are then chosen from it.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        modules: Mapping[str, str],
        libraries: Mapping[str, str] | None = None,
        schedules: ByName | None = None,
        automatic: str | None = None,
    ) -> None:
        self.kind, self.package, self.libraries = kind, package, libraries or {}
        self.schedules, self.automatic = schedules, automatic
        self.modules = {
            name: module or _function_named(name)
            for names, module in modules.items()
            for name in names.split()
        }

    def __getitem__(self, name: str) -> Callable[..., Any]:
        library, _, inner = name.partition(":")
        if library in self.libraries:
            asked = self._function(self.libraries[library], library)
            found: Callable[..., Any] = asked(inner)
            return found
        return self._function(self.modules[name], _function_named(name))

    def _function(self, module: str, name: str) -> Callable[..., Any]:
        home = importlib.import_module(f"{self.package}.{module}")
        return typing.cast(Callable[..., Any], getattr(home, name))

    def read(self, name: str) -> Read:
        """The description of a function, which is not imported for it."""
        library, colon, _ = name.partition(":")
        if colon:
            return read(f"{self.package}.{self.libraries[library]}", "make")
        return read(f"{self.package}.{self.modules[name]}", _function_named(name))

    def find(self, name: str, what: str = "") -> Callable[..., Any]:
        """The function called `name`, here or by import path ("package.module:function")."""
        if name in self:
            return self[name]
        kind = what or self.kind
        if name.startswith("<"):  # written in a run folder for an object without a name
            raise ValueError(
                f"{kind} {name} was given from Python: use fl.resume(RUN, experiment=)"
            )
        module, colon, attribute = name.partition(":")
        if not colon:
            # What is no mistype of a name of ours may be a name of a library.
            libraries = () if nearest(name, self, cutoff=0.85) else self.libraries
            known = [*self, *(f"{library}:{name}" for library in libraries)]
            hint = did_you_mean(name, known, n=1 + len(libraries))
            raise ValueError(f"unknown {kind} {name!r}: {hint}")
        try:
            if lacks(module, attribute):
                raise AttributeError(f"module {module!r} has no attribute {attribute!r}")
            found = getattr(importlib.import_module(module), attribute)
        except NotApproved:
            raise
        except Exception as error:  # a module of the user's own may raise anything
            why = why_not_imported(error)
            raise ValueError(f"{kind} {name!r} cannot be imported {why}") from error
        if not callable(found):
            raise ValueError(f"{kind} {name!r} is {found!r}: name a function")
        return typing.cast(Callable[..., Any], found)

    def options(self, name: str, what: str = "") -> dict[str, inspect.Parameter]:
        """The options of the function called `name`, here or by import path."""
        return self.read(name).options if name in self else options_of(self.find(name, what))

    def may_be_scheduled(self, option: inspect.Parameter) -> bool:
        """Whether a schedule may give an option of these functions: whether it is a number."""
        kind = option.annotation
        return self.schedules is not None and float in (kind, *typing.get_args(kind))

    def fit(self, made: Any, where: str) -> Any:
        """What a field was given; of names, with every option checked or set to its default."""
        if isinstance(made, tuple):
            return tuple(self.fit(one, where) for one in made)
        if not isinstance(made, Named) or made.name == self.automatic or _as_data.get():
            return made
        what = self.kind if self.kind in where else f"{self.kind} of {where}"
        known = self.options(made.name, what)
        changing = {
            key: self.schedules.fit(Named.of(value, key), f"{where}.{made.name}.{key}")
            for key, value in made.options.items()
            if self.schedules and _is_table(value) and key in known
            if self.may_be_scheduled(known[key])
        }
        numbers = {**made.options, **dict.fromkeys(changing, 0.0)}
        return Named(made.name, resolve(known, numbers, f"{what} {made.name!r}") | changing)

    def make(self, named: Named, *handed: Any, of: type = object) -> Any:
        """What the function makes of what it is handed and of its options; it must be an `of`."""
        made = call(self.find(named.name), *handed, options=named.options)
        return expect(made, of, f"{self.kind} {named.name!r}")

    # A table is equal to itself alone: to compare what is in it would import all of it.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __contains__(self, name: object) -> bool:
        library, _, inner = str(name).partition(":")
        return name in self.modules or (bool(inner) and library in self.libraries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


def _function_named(name: str) -> str:
    return name.rpartition("/")[2].replace("-", "_")


def nearest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Up to `n` words that are as near as `cutoff`, in capitals or not; the nearest first."""
    lowered = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=n, cutoff=cutoff)
    return [lowered[one] for one in found]


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, n: int = 1) -> str:
    """The end of a message: 'did you mean X?' or, if none is as near as `cutoff`, all choices."""
    known = sorted(known)
    if near := nearest(word, known, n, cutoff):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"choose one of {', '.join(known)}" if known else "there is none to choose from"


@cache  # a schedule is called in every round
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function, eval_str=True)


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options that a function takes, by the name an experiment file uses."""
    parameters = _signature(function).parameters.values()
    return {p.name.rstrip("_"): p for p in parameters if p.kind is p.KEYWORD_ONLY}


def resolve(
    known: Mapping[str, inspect.Parameter], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Every one of the `known` options: as given and checked, else its default."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it takes none"
            raise ValueError(f"{where} has no option {name!r}: {hint}")
    resolved = {}
    for name, parameter in known.items():
        if name in given:
            resolved[name] = check(given[name], parameter.annotation, f"{where}: {name}")
        elif parameter.default is parameter.empty:
            raise ValueError(f"{where} needs {name!r}: set {name} = ...")
        else:
            resolved[name] = parameter.default
    return resolved


def call(function: Callable[..., Any], *handed: Any, options: Mapping[str, Any]) -> Any:
    """Call `function` with options named as in an experiment file (`lambda` for `lambda_`)."""
    known = options_of(function)
    named = {known[name].name: value for name, value in options.items()}
    called = getattr(function, "__name__", function)
    try:
        _signature(function).bind(*handed, **named)
    except TypeError as error:
        raise ValueError(
            f"{called} does not take the {len(handed)} arguments it is handed ({error}): "
            "change its parameters"
        ) from error
    try:
        return function(*handed, **named)
    except ValueError:
        raise
    except Exception as error:
        if function.__module__.startswith("fedlens."):
            raise
        reason = place_of_error(error) or f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{function.__module__}:{called} failed ({reason}): fix it") from error


def check(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as a `kind`, or raise a ValueError that says what was expected."""
    return _checker(kind)(value, kind, where)


@cache
def _checker(kind: Any) -> Callable[[Any, Any, str], Any]:
    form = typing.get_origin(kind) or kind
    return KINDS.get(form, _record if is_dataclass(form) else _instance)


def no_column(where: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for clients that are named by a column that is not there."""
    hint = did_you_mean(name, known) if known else "add it, or choose another partition"
    return ValueError(f"{where} no column {name!r} to name clients: {hint}")


def refuse_unknown(
    content: Mapping[str, Any],
    known: Iterable[str],
    prefix: str,
    elsewhere: Iterable[str] = (),
) -> None:
    """Refuse unknown keys; `elsewhere` are the keys of other sections, with dots, for a hint."""
    for key in content:
        if key not in known:
            places = [place for place in elsewhere if place.rpartition(".")[2] == key]
            hint = f"did you mean {' or '.join(places)}?" if places else did_you_mean(key, known)
            raise ValueError(f"unknown key {prefix + key!r}: {hint}")


def _anything(value: Any, kind: Any, where: str) -> Any:
    return value


def _literal(value: Any, kind: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if value in choices and type(value) in {type(choice) for choice in choices}:
        return value
    raise ValueError(f"{where} is {value!r}: {did_you_mean(str(value), map(str, choices), 0.8)}")


def _union(value: Any, kind: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if value is None and type(None) in choices:
        return None
    if Named in choices and float in choices:  # a number, or a name, as of a schedule
        is_name = _is_table(value) or isinstance(value, str)
        return Named.of(value, where) if is_name else check(value, float, where)
    if Named in choices:  # the other types cannot be written in a file
        others = tuple(choice for choice in choices if choice not in (Named, type(None)))
        if others and not isinstance(value, (str, Mapping, Named, *others)):
            ways = f"a name, a table with a name, or a {others[0].__name__}"
            raise ValueError(f"{where} is {_shown(value)}: give {ways}")
        return value if isinstance(value, others) else Named.of(value, where)
    some = [choice for choice in choices if choice is not type(None)]
    if len(some) == 1:
        return check(value, some[0], where)
    tables = [choice for choice in choices if is_dataclass(choice)]
    if isinstance(value, Mapping) and len(tables) == 1:
        return check(value, tables[0], where)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and float in choices and int not in choices:
        return check(value, float, where)
    for choice in choices:
        try:
            return check(value, choice, where)
        except OutOfBounds:
            raise
        except ValueError:
            continue
    raise _unexpected(value, kind, where)


def _is_table(value: Any) -> bool:
    return isinstance(value, (Mapping, Named))


def _sequence(value: Any, kind: Any, where: str) -> Any:
    form, inner = typing.get_origin(kind), typing.get_args(kind)
    if form is None or not isinstance(value, (list, tuple)):
        return _instance(value, kind, where)
    if form is tuple and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise ValueError(f"{where} is {value!r}: expected {len(inner)} values")
        return tuple(check(v, k, where) for v, k in zip(value, inner, strict=True))
    return form(check(v, inner[0], where) for v in value)


def _number(value: Any, kind: Any, where: str) -> Any:
    """A float. An int is accepted, too; a bool is not."""
    is_one = isinstance(value, Real) and not isinstance(value, bool)  # also of NumPy
    given = value if is_one else _instance(value, kind, where)
    if LARGEST < abs(given) < float("inf"):
        raise ValueError(f"{where} is {_in_short(given)}: models compute with up to {LARGEST:.0e}")
    return float(given)


def _whole(value: Any, kind: Any, where: str) -> Any:
    is_one = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if is_one else _instance(value, kind, where)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{where} is {_in_short(number)}: choose a number of at most 18 digits")
    return number


def _in_short(number: float) -> str:
    """A number as text; if it is very long, only its number of digits."""
    digits = math.log10(abs(number)) if number else 0.0
    return repr(number) if digits < 25 else f"a number of {digits + 1:.0f} digits"


def _instance(value: Any, kind: Any, where: str) -> Any:
    wanted = typing.get_origin(kind) or kind
    fits = isinstance(wanted, type) and isinstance(value, wanted)
    if fits and (wanted is bool or not isinstance(value, bool)):
        return value
    raise _unexpected(value, kind, where)


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, cached: to read them takes longer than to check values."""
    return typing.get_type_hints(kind, include_extras=True)


def _record(value: Any, kind: Any, where: str) -> Any:
    """A dataclass, or a table of its fields."""
    if not isinstance(value, Mapping):
        return _instance(value, kind, where)
    hints = types_of(kind)
    refuse_unknown(value, hints, f"{where}.")
    for one in fields(kind):
        if one.default is MISSING and one.default_factory is MISSING and one.name not in value:
            raise ValueError(f"{where} needs {one.name!r}: set {where}.{one.name} = ...")
    return kind(**{k: check(part, hints[k], f"{where}.{k}") for k, part in value.items()})


def _named(value: Any, kind: Any, where: str) -> Named:
    return Named.of(value, where)


def _given(value: Any, kind: Any, where: str) -> Any:
    _, settled = typing.get_args(kind)
    if typing.get_origin(settled) is tuple and isinstance(value, (str, Mapping, Named)):
        value = (value,)  # a single value stands for a list of one
    return check(value, settled, where)


def _annotated(value: Any, kind: Any, where: str) -> Any:
    inner, *rules = typing.get_args(kind)
    names = [rule for rule in rules if isinstance(rule, ByName)]
    unknown = names and isinstance(value, str) and value not in names[0] and ":" not in value
    if unknown and float in typing.get_args(typing.get_args(inner)[-1]):  # a number, or a schedule
        raise _unexpected(value, float, where)
    made = check(value, inner, where)
    for rule in rules:  # Bounds, or a ByName
        made = rule.fit(made, where)
    return made


KINDS: dict[Any, Callable[[Any, Any, str], Any]] = {
    Any: _anything,
    inspect.Parameter.empty: _anything,
    Literal: _literal,
    Union: _union,
    types.UnionType: _union,
    tuple: _sequence,
    list: _sequence,
    float: _number,
    int: _whole,
    Named: _named,
    Given: _given,
    Annotated: _annotated,
}
"""The function that checks a value, by the form of the expected type."""


def _unexpected(value: Any, kind: Any, where: str) -> ValueError:
    tables = typing.get_args(kind)[:1] == (Named,)
    expected = f"a name, or a list of names or tables ([[{where}]])" if tables else in_words(kind)
    return ValueError(f"{where} is {_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    """A value on one line, although the text of an array has several."""
    return shortened(" ".join(repr(value).split()), 100)


WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", str: "text", bool: "true or false"},
    **{dict: "a table", list: "a list", tuple: "a list"},
}


def written(kind: Any) -> list[Any]:
    """The types of a union that a file can contain: no None, tensor, module or data set."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return [kind]
    choices = typing.get_args(kind)
    return [one for one in choices if typing.get_origin(one) or one in WORDS or is_dataclass(one)]


def section_of(kind: Any) -> type | None:
    """The dataclass whose fields are the keys of a table, if a field of this type is one."""
    read = typing.get_args(kind)[-1] if typing.get_origin(kind) is Given else kind
    (part, *others) = written(read)
    is_table = not others and is_dataclass(part) and part is not Named
    return typing.cast(type, part) if is_table else None


def in_words(kind: Any) -> str:
    """A type in words, for people who write experiment files."""
    inner, choices = typing.get_args(kind), written(kind)
    if typing.get_origin(kind) is Annotated:
        return in_words(inner[0])
    if choices != [kind]:  # a whole number is a number
        return " or ".join(in_words(one) for one in choices if one is not int or float not in inner)
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in inner)
    if is_dataclass(kind):
        needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        return f"{{ {', '.join(f'{name} = ...' for name in needed)} }}" if needed else "a table"
    return WORDS.get(typing.get_origin(kind) or kind, str(getattr(kind, "__name__", kind)))


def expect(made: Any, kind: type[T], what: str) -> T:
    """Return what a function, maybe the user's own, made; refuse it if it is not a `kind`."""
    if not isinstance(made, kind):
        raise ValueError(f"{what} gave {type(made).__name__}: it must return {kind.__name__}")
    return made
