"""Per-FedAvg (Fallah et al., NeurIPS 2020, arXiv:2002.07948): a start that is easy to adapt.

Clients minimise F_k(w) = f_k(w - alpha grad f_k(w)), the loss after one step of their own. A step
takes batches in turn: D of the inner step, D' of the outer one, and D'' of the Hessian:
    u = w - alpha grad f_k(w; D);    g = grad f_k(u; D');
    w = w - lr (g - alpha H(D'') g).
First-order (delta = 0) leaves the Hessian out and needs no D''. Hessian-free (delta > 0) takes
    H g = (grad f_k(w + delta g; D'') - grad f_k(w - delta g; D'')) / (2 delta).
Batches that are left over at the end of a round change nothing. At the end of the run each client
tunes the model on its own examples. With alpha = 0 it is FedAvg with every second batch.
"""

from dataclasses import dataclass, replace

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Tuned
from fedlens.algorithm.pieces.solve import where_rows
from fedlens.algorithm.slots import Solve, Wraps
from fedlens.core import Local, Memory, Moved, Number, Tree, is_on, per_row, tree_map, zeros_like
from fedlens.core.trees import copies


@dataclass(frozen=True)
class InTurn(Wraps):
    """`inner` along the outer gradient, on the last batch of each turn."""

    inner: Solve
    alpha: Number
    delta: Number

    @property
    def reads_batch(self) -> bool:
        return is_on(self.delta)

    @property
    def learning_rate(self) -> Number | None:
        return None  # not every step is one

    def init(self, params: Tree) -> Memory:
        memory = {**self.inner.init(params), "start": zeros_like(params)}
        return memory | ({"outer": zeros_like(params)} if is_on(self.delta) else {})

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.step is not None
        turn = 3 if self.reads_batch else 2
        place = local.step % turn  # []
        too_late = local.step - place + turn > local.steps  # [C] for the whole turn
        own = {name: tree for name, tree in memory.items() if name not in ("start", "outer")}
        start = where_rows(place == 0, params, memory["start"])
        ahead = _along(params, grads, -self.alpha)
        kept, outer = {"start": copies(start)}, grads
        if self.reads_batch:
            assert local.gradients is not None
            seen = where_rows(place == 1, grads, memory["outer"])
            behind = local.gradients(_along(start, seen, -self.delta))
            bend = {n: (grads[n] - g) / per_row(2 * self.delta, g) for n, g in behind.items()}
            ahead = where_rows(place == 0, ahead, _along(start, seen, self.delta))
            kept, outer = {**kept, "outer": seen}, _along(seen, bend, -self.alpha)
        before = copies(own)
        moved, own = self.inner.update(outer, own, copies(start), local)
        ends = (place == turn - 1) & ~too_late  # [C]
        stays = where_rows(too_late, start, ahead)
        solver = {name: where_rows(ends, own[name], tree) for name, tree in before.items()}
        return where_rows(ends, moved, stays), solver | kept


def _along(params: Tree, direction: Tree, by: Number) -> Tree:
    return tree_map(lambda p, d: p + per_row(by, p) * d, params, direction)


@paper
def per_fedavg(base: Algorithm, alpha: Number = 0.01, delta: Number = 0.0) -> Algorithm:
    """Train a model that one step of a client's own adapts.

    Args:
        alpha: the learning rate of the inner step.
        delta: how far from the model gradients are compared for the Hessian, say 0.001; 0 leaves
            the Hessian out (first-order).
    """
    at_least(alpha, 0, "per-fedavg: alpha")
    at_least(delta, 0, "per-fedavg: delta")
    return replace(base, solve=InTurn(base.solve, alpha, delta), personal=Tuned(1))
