"""Clients as a batch dimension: many train at once on one device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from fedlens.client import ClientProgram, Record, cuts
from fedlens.core import Examples
from fedlens.engines.factored import Factored, factorable
from fedlens.engines.graphs import Graphs
from fedlens.network.network import Network
from fedlens.work import Part, Shared, Work

AT_ONCE = 64  # clients side by side, until it is known how much memory one takes
T = TypeVar("T")

SHARE = 0.5  # of a GPU's memory that blocks are made for


@dataclass
class Stacked:
    """`at_once` clients together; memory follows that number, not the cohort.

    On a GPU local training is recorded as CUDA graphs: small clients are many small kernels, and
    without that the time goes into launching them. There the first block shows how much memory a
    client takes, and later blocks are as large as half the GPU holds; if that is too much after
    all, they are halved. `factor` says whether linear layers may be factored where that pays.
    """

    name: ClassVar[str] = "stacked"

    network: Network
    examples: Examples
    at_once: int = AT_ONCE
    factor: bool = True
    _made: tuple[ClientProgram, Record | None, dict[object, Factored]] | None = field(
        default=None, repr=False
    )
    _probed: bool = field(default=False, repr=False)
    _real: int = field(default=0, repr=False)
    _computed: int = field(default=0, repr=False)

    @property
    def padding_share(self) -> float | None:
        """How much of what was computed so far were no examples, but filled up shorter batches.

        Clients with fewer steps are cut off when they are done, and cost nothing more. None: it has
        computed nothing.
        """
        return 1 - self._real / self._computed if self._computed else None

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        if self._made is None or self._made[0] is not program:
            self._made = program, self._recorder(), {}
        shared = shared._replace(params=self.network.laid_out(shared.params))
        start, each = 0, _clients_of_each(work)
        while start < len(work):
            # Blocks of about the same size have the same shapes; experiments stay whole.
            left = len(work) - start
            size = -(-left // -(-left // self.at_once))
            size = max(size // each * each, each) if each <= self.at_once else size
            try:
                some = work if size == len(work) else work.rows(slice(start, start + size))
                parts = self._block(program, shared, some)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.at_once = size // 2
                self._made = program, self._recorder(), {}
                torch.cuda.empty_cache()
                continue
            # If they are all, the next round is the first to write there.
            yield from parts if size < len(work) else (p._replace(lent=False) for p in parts)
            start += size
        self._real += int(work.plan.counts.sum())
        self._computed += sum(live * width for live, width in zip(*cuts(work.plan), strict=True))

    def _block(self, program: ClientProgram, shared: Shared, work: Work) -> list[Part]:
        assert self._made is not None
        _, record, factored = self._made
        device = self.examples.labels.device
        probes = device.type == "cuda" and not self._probed
        if probes:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        names = factorable(self.network, program, work) if self.factor else ()
        if names:
            groups = [group for group, _, _ in work.spans]
            key = names, tuple(groups)
            if key not in factored:
                factored[key] = Factored(self.network, program, names, groups)
            form = factored[key]
            sent = form.send(shared, work)
            mine = None if record is None else OfForm(key, record)
            parts = form.receive(form.program(form.apply, self.examples, sent, work, mine))
        else:
            parts = program(self.network.stacked, self.examples, shared, work, record)
        if probes:
            each = max((torch.cuda.max_memory_allocated(device) - before) // len(work), 1)
            whole = torch.cuda.get_device_properties(device).total_memory
            self.at_once, self._probed = max(int(SHARE * whole / each), 1), True
        return parts

    def _recorder(self) -> Record | None:
        return Graphs() if self.examples.labels.is_cuda else None

    def close(self) -> None:
        self._made = None


@dataclass(frozen=True)
class OfForm:
    """Records for one factored form: what is recorded reads where it starts from."""

    form: object
    record: Record

    def __call__(self, key: object, function: Callable[..., T], *inputs: Any) -> T | None:
        return self.record((self.form, key), function, *inputs)


def _clients_of_each(work: Work) -> int:
    """How many clients each experiment has, if that is the same number; else 1."""
    counts = {end - first for _, first, end in work.spans}
    return counts.pop() if work.group is not None and len(counts) == 1 else 1
