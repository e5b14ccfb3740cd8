"""Linear layers whose clients never get weights of their own.

With gradient descent from a common start w0, a client's weights are w0 - lr * sum of d x' over the
examples it has seen, d being the slope of the loss at the layer's output and x its input. So

    w x = w0 x - lr * D' (X x),

where the rows of X and D are these examples; and the round's whole update is the one product
-lr * D' X over all clients, each weighed by its share. That is exact. It holds for descent along
the plain gradient, and for uploads that are differences and are summed; anything else needs the
weights themselves. It pays where a client sees few examples and the matrix is large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedlens.algorithm import Algorithm
from fedlens.client import ClientProgram
from fedlens.core import Cohort, Local, Tree, Upload
from fedlens.layout import Layout
from fedlens.network import Network
from fedlens.pieces.combine import WeightedSum
from fedlens.pieces.upload import difference
from fedlens.products import Factors
from fedlens.work import Part, Shared, Work

WORTH_IT = 2  # how many times smaller the matrix may be than the factors: its copies cost more

INPUTS, SLOPES, TAKEN = ".inputs", ".slopes", ".steps taken"


def factorable(network: Network, program: ClientProgram, work: Work) -> tuple[str, ...]:
    """The weights that are better not given to clients, by name; none if that does not hold."""
    algorithm = program.algorithm
    if work.group is not None or not _holds(algorithm):
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
    return (
        algorithm.rate is not None
        and algorithm.upload is difference
        and type(algorithm.combine) is WeightedSum
        and not algorithm.memory
        and algorithm.reset
    )


class Factored:
    """A program as it is for clients without these weights."""

    def __init__(self, network: Network, program: ClientProgram, names: tuple[str, ...]) -> None:
        self.network, self.names = network, names
        algorithm = program.algorithm
        assert algorithm.rate is not None and isinstance(algorithm.combine, WeightedSum)
        self.lr = algorithm.rate
        amended = replace(
            algorithm,
            upload=SendFactors(names),
            combine=MultiplyFactors(algorithm.combine, names, self.lr),
        )
        self.program = replace(program, algorithm=amended)
        self.batch = 0
        self.start: Tree = {}  # w0, always in the same memory: a recorded step reads it there

    def send(self, shared: Shared, work: Work) -> Shared:
        """What clients get instead: no weights, and room for their factors."""
        _, steps, self.batch = work.plan.index.shape
        params, buffers, exact = dict(shared.params), dict(shared.buffers), dict(shared.exact)
        for name in self.names:
            weight = params.pop(name)[0]
            exact.pop(name)
            if name not in self.start:
                self.start[name] = torch.empty_like(weight, dtype=self.network.compute)
            self.start[name].copy_(weight)
            out, features = weight.shape
            room = self.start[name].new_zeros
            buffers[name + INPUTS] = room(1, steps * self.batch, features)
            buffers[name + SLOPES] = room(1, steps * self.batch, out)
            buffers[name + TAKEN] = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return Shared(params, buffers, exact, shared.told)

    def apply(
        self, params: Tree, buffers: Tree, images: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tree]:
        factors: dict[str, Any] = {
            name: Factors(
                self.start[name],
                buffers[name + INPUTS],
                buffers[name + SLOPES],
                buffers[name + TAKEN],
                self.batch,
                self.lr,
            )
            for name in self.names
        }
        own = {name: b for name, b in buffers.items() if not name.endswith(OF_FACTORS)}
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


OF_FACTORS = (INPUTS, SLOPES, TAKEN)


@dataclass(frozen=True)
class SendFactors:
    """upload: the difference of what a client has, and the factors of what it has not."""

    names: tuple[str, ...]

    def __call__(self, local: Local) -> Upload:
        plain = {n: b for n, b in local.buffers.items() if not n.endswith(OF_FACTORS)}
        upload = difference(replace(local, buffers=plain))
        factors = {
            name + part: local.buffers[name + part]
            for name in self.names
            for part in (INPUTS, SLOPES)
        }
        return replace(upload, update=upload.update | factors)


@dataclass(frozen=True)
class MultiplyFactors:
    """combine: the weighted sum, and the product of the factors, which is one."""

    inner: WeightedSum
    names: tuple[str, ...]
    lr: float
    linear: ClassVar[bool] = True
    uses_shares: ClassVar[bool] = True

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        rest = {name: u for name, u in updates.items() if not name.endswith(OF_FACTORS)}
        combined = self.inner(rest, shares, cohort, layout)
        for name in self.names:
            x, d = updates[name + INPUTS], updates[name + SLOPES]
            weighed = (d * (-self.lr * shares.to(d))[:, None, None]).flatten(0, 1)
            product = _wide(weighed.mT, x.flatten(0, 1))
            combined[name] = product.to(torch.float64)
        return combined


def _wide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype is torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b
