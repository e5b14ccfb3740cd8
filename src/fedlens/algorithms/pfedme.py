"""pFedMe (Dinh et al., NeurIPS 2020, arXiv:2006.08848), algorithm 1: Moreau envelopes.

A client minimises its envelope min_theta f_k(theta) + lambda / 2 ||theta - w||^2. In each local
step it comes near the inner minimum by K steps on one batch, and then moves along the gradient of
the envelope, lambda (w - theta):
    theta = theta - lr_theta (grad f_k(theta) + lambda (theta - w)),  K times;
    w = w - lr lambda (w - theta).
theta begins each round at the server's model and goes on from step to step, as in the authors'
code. The w are averaged with equal weights; the paper's beta is `server.lr`. A client is measured
by its theta. With K = 1, theta taken afresh and lr lambda = 1, a step would be one of FedAvg.
"""

from dataclasses import dataclass, replace

import torch

from fedlens.algorithm import Algorithm, at_least, paper
from fedlens.algorithm.pieces import Equally, SecondModel, Sgd
from fedlens.algorithm.slots import OWN, Solve
from fedlens.core import Local, Memory, Moved, Number, Tree, per_row


@dataclass(frozen=True)
class Envelope(Solve):
    lr: Number
    lr_theta: Number
    lambda_: Number
    steps: int  # K

    @property
    def reads_batch(self) -> bool:
        return True

    @property
    def learning_rate(self) -> Number | None:
        return None  # of a gradient: the step is along another vector

    def init(self, params: Tree) -> Memory:
        return {}

    def update(self, grads: Tree, memory: Memory, params: Tree, local: Local) -> Moved:
        assert local.gradients is not None and local.step is not None
        own, is_first = memory[OWN], local.step == 0
        theta = {n: torch.where(is_first, p, own[n]) for n, p in params.items()}
        for _ in range(self.steps):
            found = local.gradients(own | theta)
            for name, t in theta.items():
                pull = per_row(self.lambda_, t) * (t - params[name])
                theta[name] = t - per_row(self.lr_theta, t) * (found[name] + pull)
        for name, w in params.items():
            w.sub_(per_row(self.lr * self.lambda_, w) * (w - theta[name]))
        return params, {OWN: own | theta}


@paper
def pfedme(
    base: Algorithm, lambda_: Number = 15.0, k: int = 5, lr: Number | None = None
) -> Algorithm:
    """Let each client find a model near its own copy of the server's.

    Args:
        lambda_: how near (lambda, called `lambda` in an experiment file).
        k: the steps of the personal model on each batch (K).
        lr: the learning rate of these steps; local.lr, if none is given.
    """
    at_least(lambda_, 0, "pfedme: lambda")
    at_least(k, 1, "pfedme: k")
    solve = base.solve
    if not isinstance(solve, Sgd) or solve.step is None or not solve.step.is_plain:
        raise ValueError(
            'pfedme takes steps of its own: set local.optimizer = "sgd" without momentum and '
            "weight decay, and leave other local rules out"
        )
    at_least(solve.lr if lr is None else lr, 0, "pfedme: lr")
    own = solve.lr if lr is None else lr
    for rate, what in ((own, "lr"), (solve.lr, "local.lr")):
        if not bool((torch.as_tensor(rate * lambda_) < 2).all()):
            raise ValueError(
                f"pfedme: {what} times lambda is {rate * lambda_:g}, and steps diverge from 2 on: "
                f"choose a smaller {what} or lambda"
            )
    return replace(
        base,
        solve=Envelope(solve.lr, own, lambda_, k),
        weigh=Equally(),
        personal=SecondModel(),
    )
