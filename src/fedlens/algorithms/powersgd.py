"""Updates of low rank with error feedback, PowerSGD (Vogels et al., NeurIPS 2019,
arXiv:1905.13727).

Of each matrix M of an update (of a convolution: outputs by all else), with what was left out before
added, a client sends P and Q of r columns; the server reads P Q^T:

    P = orthonormal columns of M Q',   Q = M^T P,   e = M - P Q^T     (a step of a power iteration)

Q' is the client's own Q of the round before, so that it comes nearer to M's largest directions. A
matrix of rank r is sent exactly, up to float32. In the paper workers agree on P by a sum of theirs,
and then on Q; a client of a round sends once, so each has its own. Vectors are sent as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.pieces.feedback import Feedback, Short
from fedlens.core import Memory, Tree, keys
from fedlens.network.layout import Role

START = keys.purpose("powersgd")
NONE = 1e-9  # of its length: what is left of a column that depends on the others


@dataclass(frozen=True)
class PowerSgd(Feedback):
    rank: int
    feedback: bool = True

    @property
    def remembers(self) -> bool:
        return True

    def init(self, params: Tree) -> Memory:
        like = {n: _start(p, self.rank) for n, p in params.items() if self._is_less(p.shape)}
        return {**super().init(params), "q": like}

    def _is_less(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and self.rank * sum(_sides(shape)) < shape.numel()

    def shortened(self, whole: Tensor, memory: Mapping[str, Tensor]) -> Short:
        if not self._is_less(whole.shape[1:]):
            return Short(whole)
        m, q = whole.flatten(2).double(), memory["q"]  # [C, n, m], [C, m, r]
        p = _orthonormal(m @ q).float()
        q = (m.transpose(1, 2) @ p.double()).float()
        again = _start(whole[0], self.rank)  # for a column that would stay 0 for good
        kept = torch.where(q.abs().amax(1, keepdim=True) > 0, q.double(), again)
        return Short(_product(p, q).view(whole.shape).to(whole), {"p": p, "q": q}, {"q": kept})

    def num_bits(self, shape: torch.Size, bits: int, role: Role) -> int:
        if role == "buffer" or not self._is_less(shape):
            return bits
        return 32 * self.rank * sum(_sides(shape))

    def pack(self, numbers: Tensor, role: Role, notes: Tree) -> Tree | None:
        if "p" not in notes:
            return None
        p, q = notes["p"], notes["q"]
        return {"p": p, "q": q} if torch.equal(_product(p, q).flatten(), numbers) else None

    def unpack(self, parts: Tree, count: int, numbers: Callable[[int], Tensor]) -> Tensor:
        p, q = parts.get("p"), parts.get("q")
        if p is None or q is None or len(parts) > 2:
            raise ValueError("a tensor lacks its two factors")
        fits = p.dim() == q.dim() == 2 and p.shape[1] == q.shape[1] == self.rank
        if not fits or len(p) * len(q) != count or {p.dtype, q.dtype} != {torch.float32}:
            raise ValueError(f"a tensor has factors {[*p.shape]} and {[*q.shape]} for {count}")
        return _product(p, q).flatten()


def _sides(shape: torch.Size) -> tuple[int, int]:
    return shape[0], shape[1:].numel()


def _start(like: Tensor, rank: int) -> Tensor:
    """The Q' [m, r] of the first round, the same for all clients."""
    words = torch.arange(_sides(like.shape)[1] * rank, device=like.device)
    return keys.normal(keys.fold(words, START)).view(-1, rank)


def _product(p: Tensor, q: Tensor) -> Tensor:
    """P Q^T [.., n, m] in float32 numbers, term by term: all machines have the same bits."""
    p, q = p.double(), q.double()
    total = p[..., :, None, 0] * q[..., None, :, 0]
    for column in range(1, p.shape[-1]):
        total = total + p[..., :, None, column] * q[..., None, :, column]
    return total.float().double()


def _orthonormal(p: Tensor) -> Tensor:
    """The columns of p [C, n, r] made orthonormal by Gram and Schmidt; one that depends on those
    before it becomes 0."""
    done: list[Tensor] = []
    for column in p.unbind(2):
        left, length = column, column.norm(dim=1, keepdim=True)
        for _ in range(2):  # twice, against rounding
            for other in done:
                left = left - other * (left * other).sum(1, keepdim=True)
        now = left.norm(dim=1, keepdim=True)
        is_new = now > NONE * length
        done.append(torch.where(is_new, left / torch.where(is_new, now, 1.0), 0.0))
    return torch.stack(done, 2)


@paper
def powersgd(base: Algorithm, rank: int = 2, feedback: bool = True) -> Algorithm:
    """Send two thin factors of each matrix of a client's update, and what they leave out later.

    Args:
        rank: how many columns each factor has.
        feedback: whether a client remembers what it did not send.
    """
    if rank < 1:
        raise ValueError(f"powersgd: rank is {rank}: choose 1 or more")
    return replace(base, channel=(*base.channel, PowerSgd(rank, feedback)))
