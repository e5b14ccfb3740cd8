"""Linear layers whose clients never get weights of their own.

With gradient descent from a common start w0, a client's weights are w0 - lr * sum of d x' over the
examples it has seen, d being the slope of the loss at the layer's output and x its input. So

    w x = w0 x - lr * D' (X x),

where the rows of X and D are these examples; and the round's whole update is the one product
-lr * D' X over all clients, each weighed by its share. That is exact. It holds for descent along
the plain gradient, also with a pull towards the start (FedProx), under which what a step did fades
by a factor with every further one, and with a drift that is the same in every step (ADMM's dual),
which each client then has a matrix of. An upload that is more than the difference gets weights that
are multiplied out at the end. It pays where a client sees few examples and the matrix is large. Of
a sweep, each experiment has its own start and its own rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.core import Cohort, Contraction, Local, Tree, Upload
from fedlens.network.factors import Factors
from fedlens.network.layout import Layout
from fedlens.network.network import Network
from fedlens.network.stacked.products import drifted, faded, wide_product
from fedlens.pieces.combine import WeightedSum
from fedlens.pieces.upload import difference
from fedlens.trees import join, map_tensors
from fedlens.work import Given, Part, Shared, Spans, Work

WORTH_IT = 2  # how many times smaller the matrix may be than the factors: its copies cost more

INPUTS, SLOPES, TAKEN, DRIFT = ".inputs", ".slopes", ".steps taken", ".drift"
ROOMS = (INPUTS, SLOPES, TAKEN)
OF_FACTORS = (*ROOMS, DRIFT)


def factorable(network: Network, program: ClientProgram, work: Work) -> tuple[str, ...]:
    """The weights that are better not given to clients, by name; none if that does not hold."""
    if not all(map(_holds, program.each or (program.algorithm,))) or not _is_regular(work):
        return ()
    _, steps, batch = work.plan.index.shape
    names = []
    for name, layer in network.module.named_modules():
        if isinstance(layer, nn.Linear) and network.takes_rows(name):
            out, features = layer.out_features, layer.in_features
            if steps * batch * (out + features) <= WORTH_IT * out * features:
                names.append(f"{name}.weight")
    return tuple(names)


def _holds(algorithm: Algorithm) -> bool:
    step, weights = algorithm.contraction, algorithm.objective.weights
    contracts = step is not None and 0 < step.keep <= 1 and algorithm.reset
    # A weight of examples that looks at the model must find all of it.
    return contracts and not any(getattr(weight, "reads_model", True) for weight in weights)


def _is_regular(work: Work) -> bool:
    """Whether each experiment has as many clients, and all of them stay in its place."""
    counts, steps = {end - first for _, first, end in work.spans}, work.plan.steps
    return work.group is None or (len(counts) == 1 and bool((steps == steps[0]).all()))


class Factored:
    """A program as it is for clients without these weights, and their model."""

    takes_steps: ClassVar[bool] = False

    def __init__(
        self, network: Network, program: ClientProgram, names: tuple[str, ...], groups: list[int]
    ) -> None:
        self.network, self.names, self.groups = network, names, groups
        # Where only the sum of the differences is asked for, no client's own is ever made.
        self.sums_up = all(
            isinstance(one.combine, WeightedSum) and one.upload is difference
            for one in program.each or (program.algorithm,)
        )
        self.program = FactoredProgram(
            self._amended(program.algorithm),
            program.layout,
            program.augment,
            tuple(map(self._amended, program.each)),
            form=self,
        )
        own = [program.each[g] for g in groups] if program.each else [program.algorithm]
        self.contractions = [cast(Contraction, one.contraction) for one in own]
        self.channels = {n: network.flattened_channels(n.removesuffix(".weight")) for n in names}
        self.batch = 0
        self.start: Tree = {}  # [G, ...] w0, in the same memory: a recorded step reads it there
        self.rooms: dict[tuple[str, int, int], Tree] = {}  # zeros, to start from
        self.rates: tuple[Tensor, Tensor] | None = None
        self.times: dict[int, Tensor] = {}  # by the steps that there is room for

    def _amended(self, algorithm: Algorithm) -> Algorithm:
        step, combine = algorithm.contraction, algorithm.combine
        if self.sums_up:
            assert isinstance(combine, WeightedSum)
            return replace(
                algorithm, upload=SendFactors(self), combine=MultiplyFactors(combine, self)
            )
        return replace(algorithm, upload=MultiplyOut(self, step, algorithm.upload))

    def send(self, shared: Shared, work: Work) -> Shared:
        """What clients get instead: no weights, and room for their factors."""
        _, steps, self.batch = work.plan.index.shape
        params, buffers, exact = dict(shared.params), dict(shared.buffers), dict(shared.exact)
        for name in self.names:
            weight = params.pop(name)
            if self.sums_up:
                exact.pop(name)
            whole, (out, features) = len(weight), weight.shape[1:]
            weight = weight if len(self.groups) == whole else weight[self.groups]
            if name not in self.start:
                self.start[name] = torch.empty_like(weight, dtype=self.network.compute)
            weight = self.by_pixel(name, weight)
            self.start[name].view(weight.shape).copy_(weight)
            rows = steps * self.batch
            if (name, whole, rows) not in self.rooms:
                room = self.start[name].new_zeros
                rooms = room(1, rows, features), room(1, rows, out)
                taken = torch.zeros(1, dtype=torch.int64, device=weight.device)
                self.rooms[name, whole, rows] = {
                    name + part: t.expand(whole, *t.shape[1:])
                    for part, t in zip(ROOMS, (*rooms, taken), strict=True)
                }
            buffers |= self.rooms[name, whole, rows]
        return Shared(params, buffers, exact, shared.told)

    def factors(self, name: str, buffers: Tree) -> Factors:
        inputs, slopes, taken = (buffers[name + part] for part in ROOMS)
        device, wide = slopes.device, torch.promote_types(slopes.dtype, torch.float32)
        if self.rates is None:
            numbers = [(step.lr, step.keep) for step in self.contractions]
            lr, decay = torch.tensor(numbers, dtype=torch.float64).T
            self.rates = lr.to(device, wide), decay.log2().to(device, wide)
        most = slopes.shape[1] // self.batch
        if most not in self.times:
            steps = torch.arange(most + 1)
            table = torch.stack([drifted(steps, one.lr, one.keep) for one in self.contractions])
            self.times[most] = table.to(device, wide)
        return Factors(
            self.start[name],
            inputs,
            slopes,
            taken,
            self.batch,
            *self.rates,
            drift=buffers.get(name + DRIFT),
            times=self.times[most],
            by_pixel=self.channels[name] is not None,
        )

    def drift(self, local: Local) -> Tree:
        """What every step adds, for these layers: of a sweep, by each experiment's own numbers."""
        clients, steps = len(local.steps), self.contractions
        size, found = clients // len(steps), []
        for number, step in enumerate(steps):
            if step.drift is None:
                return {}
            rows = slice(number * size, (number + 1) * size)
            mine = map_tensors(local, partial(_only, rows, clients))
            found.append({name: step.drift(mine, name) for name in self.names})
        together: Tree = found[0] if len(found) == 1 else join(found)
        return together

    def by_pixel(self, name: str, matrices: Tensor) -> Tensor:
        """Matrices [..., out, features], or [..., out, pixels, channels] of flattened images."""
        channels = self.channels[name]
        if channels is None:
            return matrices
        return matrices.reshape(*matrices.shape[:-1], channels, -1).transpose(-1, -2)

    def in_order(self, name: str, product: Tensor) -> Tensor:
        """A product of factors [..., out, features] with the features as the layer has them."""
        channels = self.channels[name]
        if channels is None:
            return product
        return product.reshape(*product.shape[:-1], -1, channels).transpose(-1, -2).flatten(-2)

    def __call__(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        factors: dict[str, Any] = {name: self.factors(name, buffers) for name in self.names}
        own = _without_factors(buffers)
        logits, moved = self.network.stacked(params | factors, own, images, keys, mask)
        for name in self.names:
            buffers[name + TAKEN] += 1
        return logits, buffers | moved

    def receive(self, parts: list[Part]) -> list[Part]:
        """Without what this form alone counts."""
        return [
            part._replace(
                counters={n: c for n, c in part.counters.items() if not n.endswith(OF_FACTORS)}
            )
            for part in parts
        ]


@dataclass(frozen=True)
class FactoredProgram(ClientProgram):
    """Clients that have a matrix of their drift, where there is one, but none of their weights."""

    form: Factored | None = None

    def _start(self, shared: Shared, given: Given) -> Local:
        local, form = super()._start(shared, given), self.form
        assert form is not None
        drift = form.drift(local)
        for name in form.names if drift else ():
            mine = form.by_pixel(name, drift[name])
            local.buffers[name + DRIFT] = mine.to(form.network.compute).flatten(2)
        return local

    def _uploads(self, spans: Spans, local: Local, exact: Tree) -> list[Upload]:
        """Of several experiments in one go, where what they send is small and made alike."""
        assert self.form is not None
        if local.group is None or not self.form.sums_up:
            return super()._uploads(spans, local, exact)
        own = {name: t[local.group] for name, t in exact.items()}
        whole = SendFactors(self.form)(replace(local, exact=own))
        return [map_tensors(whole, itemgetter(slice(first, end))) for _, first, end in spans]


@dataclass(frozen=True)
class SendFactors:
    """upload: the difference of what a client has, and the factors of what it has not."""

    form: Factored

    def __call__(self, local: Local) -> Upload:
        upload = difference(replace(local, buffers=_without_factors(local.buffers)))
        update = dict(upload.update)
        assert self.form.rates is not None
        each = len(local.steps) // len(self.form.contractions)
        lr, log_decay = (t[:, None].expand(-1, each).flatten() for t in self.form.rates)
        for name in self.form.names:
            slopes = _weighed(self.form, lr, log_decay, local, name)
            update |= {name + INPUTS: local.buffers[name + INPUTS], name + SLOPES: slopes}
        return replace(upload, update=update)


@dataclass(frozen=True)
class MultiplyOut:
    """upload: another one, of clients whose weights are made of their factors."""

    form: Factored
    step: Contraction | None
    inner: Callable[[Local], Upload]

    def __call__(self, local: Local) -> Upload:
        params, anchor = dict(local.params), dict(local.anchor)
        assert self.step is not None
        lr, log_decay = (
            torch.full_like(local.steps, number, dtype=torch.float64)
            for number in (self.step.lr, math.log2(self.step.keep))
        )
        for name in self.form.names:
            slopes = _weighed(self.form, lr, log_decay, local, name)
            dtype = torch.promote_types(slopes.dtype, torch.float32)
            product = wide_product(slopes.mT, local.buffers[name + INPUTS], dtype)
            anchor[name] = local.exact[name].to(dtype)
            params[name] = anchor[name] + self.form.in_order(name, product)
            if self.step.drift is not None:
                times = drifted(local.steps, self.step.lr, self.step.keep).to(dtype)
                params[name].addcmul_(self.step.drift(local, name), times[:, None, None])
        buffers = _without_factors(local.buffers)
        return self.inner(replace(local, params=params, anchor=anchor, buffers=buffers))


def _only(rows: slice, clients: int, tensor: Tensor) -> Tensor:
    """These rows of a tensor that has one for each client."""
    return tensor[rows] if len(tensor) == clients else tensor


def _without_factors(buffers: Tree) -> Tree:
    return {name: b for name, b in buffers.items() if not name.endswith(OF_FACTORS)}


def _weighed(form: Factored, lr: Tensor, log_decay: Tensor, local: Local, name: str) -> Tensor:
    """The slopes of a layer, each times what its step did to the weights in the end."""
    slopes = local.buffers[name + SLOPES]
    left = faded(slopes, form.batch, local.steps, log_decay)
    return _times(slopes, -lr[:, None] * left)


def _times(slopes: Tensor, weights: Tensor) -> Tensor:
    """Slopes [C, n, out] times weights [C, n], which are not rounded to their dtype before."""
    wide = torch.promote_types(slopes.dtype, torch.float32)
    return (slopes * weights.to(wide)[:, :, None]).to(slopes.dtype)


@dataclass(frozen=True)
class MultiplyFactors:
    """combine: the weighted sum, and the product of the factors, which is one."""

    inner: WeightedSum
    form: Factored
    linear: ClassVar[bool] = True
    uses_shares: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        rest = {name: u for name, u in updates.items() if not name.endswith(OF_FACTORS)}
        combined = self.inner(rest, shares, cohort, layout)
        for name in self.form.names:
            x, d = updates[name + INPUTS], updates[name + SLOPES]
            weighed = _times(d, shares[:, None].expand(d.shape[:2])).flatten(0, 1)
            product = wide_product(weighed.mT[None], x.flatten(0, 1)[None], torch.float32)
            combined[name] = self.form.in_order(name, product[0]).double()
        return combined
