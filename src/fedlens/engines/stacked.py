"""Clients as a batch dimension: many train at once on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedlens.core import Tree
from fedlens.core.federation import Examples
from fedlens.core.trees import stack
from fedlens.engines.factored import FactoredForm, factorable, faster_one_by_one
from fedlens.engines.graphs import Captures, CudaGraph, wait_for_aside
from fedlens.engines.recording import run_program, warm_up
from fedlens.network.network import Network
from fedlens.network.ops import compile_ahead
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.engine import Engine, Recorder, Which
from fedlens.rounds.work import Part, Shared, Work

AT_ONCE = 64  # clients side by side, until the memory of one client is measured
SHARE = 0.5  # of a GPU's memory that a block of clients may use
RECORDED = 0.125  # of a GPU's memory that recordings may use for inputs and results of their own


@dataclass
class Prepared:
    """What is kept for one program: its recorder, and the factored forms of its weights."""

    program: ClientProgram
    recorder: Recorder | None
    forms: dict[object, FactoredForm] = field(default_factory=dict)
    formed: dict[object, ClientProgram] = field(default_factory=dict)  # `program` for each form

    def use(self, program: ClientProgram) -> None:
        """Run `program` from now on. Recordings remain valid: its numbers are inputs of them."""
        if program is not self.program:
            self.program, self.formed = program, {}


def stacked(network: Network, examples: Examples, *_: object) -> Engine:
    """Many clients side by side on one device: the default on a GPU."""
    return Stacked(network, examples)


@dataclass
class Stacked(Engine):
    """Trains `at_once` clients together; memory use depends on that number, not on the cohort.

    On a GPU local training is recorded as CUDA graphs: small clients launch many small kernels, and
    without recording most time goes into the launches. The first block on a GPU measures the memory
    of a client, and later blocks fill half of the GPU's memory; if that is still too much, first
    all recordings are dropped, and then blocks are halved. Linear layers are factored where that is
    cheaper.
    """

    network: Network
    examples: Examples
    at_once: int = AT_ONCE
    make_recorder: Callable[[], Recorder] | None = None  # None: CUDA graphs on a GPU, else none
    name: ClassVar[str] = "stacked"
    _prepared: Prepared | None = field(default=None, repr=False)
    _evaluations: Recorder | None = field(default=None, repr=False)
    _has_probed: bool = field(default=False, repr=False)
    _num_real: int = field(default=0, repr=False)
    _num_computed: int = field(default=0, repr=False)
    _predicted: set[object] = field(default_factory=set, repr=False)  # shapes of known batches

    @property
    def padding_share(self) -> float | None:
        """Clients with fewer steps are removed when they are done, and need no padding."""
        return 1 - self._num_real / self._num_computed if self._num_computed else None

    def map(self, program: ClientProgram, shared: Shared, work: Work) -> Iterator[Part]:
        prepared = self._prepared_for(program)
        shared = shared._replace(params=self.network.lay_out_stacked(shared.params))
        counts = {end - first for _, first, end in work.spans}
        start, each = 0, counts.pop() if work.group is not None and len(counts) == 1 else 1
        one_by_one = faster_one_by_one(self.network, program, work)
        has_dropped = prepared.recorder is None  # whether no recordings are left to drop
        while start < len(work):
            # Blocks of one size have the same shapes; experiments that fit in a block stay whole.
            left, most = len(work) - start, self.at_once
            most = min(each, most) if one_by_one else most
            size = -(-left // -(-left // most))
            size = max(size // each * each, each) if each <= most else size
            block = work if size == len(work) else work.rows(slice(start, start + size))
            parts: list[Part] | None = None
            try:
                parts = self._train_block(prepared, shared, block)
            except torch.OutOfMemoryError:
                if size == 1 and has_dropped:
                    raise
            if parts is None:  # the error has gone, and with it what its frames held
                if has_dropped:
                    self.at_once = size // 2
                self.close()
                prepared = self._prepared_for(program)
                torch.cuda.empty_cache()
                has_dropped = True
                continue
            # If the block is the whole cohort, nothing overwrites its memory before the next round.
            yield from parts if size < len(work) else (p._replace(borrowed=False) for p in parts)
            start += size
        self._num_real += int(work.plan.counts.sum())
        self._num_computed += sum(
            training * width for training, width in zip(*work.plan.cuts, strict=True)
        )

    def _prepared_for(self, program: ClientProgram) -> Prepared:
        prepared = self._prepared
        if prepared is None or not program.differs_in_numbers_alone(prepared.program):
            self._prepared = prepared = Prepared(program, self._recorder(urgent=True))
        prepared.use(program)
        return prepared

    def _train_block(self, prepared: Prepared, shared: Shared, work: Work) -> list[Part]:
        device = self.examples.labels.device
        program, recorder = prepared.program, prepared.recorder
        names = factorable(self.network, program, work)
        if names:
            key = names, len(work.spans)  # which experiments these are does not matter
            if key not in prepared.forms:
                prepared.forms[key] = FactoredForm(self.network, program, names)
            form = prepared.forms[key]
            if key not in prepared.formed:
                prepared.formed[key] = form.program(program)
            program, shared = prepared.formed[key], form.send(shared, work)
        model = self.network.private if program.is_private else self.network.stacked
        probes = device.type == "cuda" and not self._has_probed
        if probes:
            warm_up(program, model, self.examples, shared, work)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        parts = run_program(program, model, self.examples, shared, work, recorder)
        if probes:
            each = max((torch.cuda.max_memory_allocated(device) - before) // len(work), 1)
            self.at_once, self._has_probed = max(int(SHARE * memory_of(device) / each), 1), True
        return parts

    def predict(
        self, model: Tree, examples: Examples, batches: Sequence[Which]
    ) -> Iterator[Tensor]:
        if not examples.labels.is_cuda:  # on a CPU the plain module is faster
            yield from super().predict(model, examples, batches)
            return
        sizes = {(examples.images.shape[1:], _size(examples, which)): which for which in batches}
        if not sizes.keys() <= self._predicted:
            self._predicted |= sizes.keys()
            compile_ahead(lambda: [*self._logits(model, examples, sizes.values())])
        yield from self._logits(model, examples, batches)

    def predict_each(
        self,
        model_of: Callable[[int], Tree],
        examples: Examples,
        rows: Sequence[Tensor],
        at_once: int,
    ) -> Iterator[Tensor]:
        """Models of about as many examples are evaluated side by side."""
        if not examples.labels.is_cuda:
            yield from super().predict_each(model_of, examples, rows, at_once)
            return
        found = predict_side_by_side(self.network, model_of, examples, rows, at_once)
        yield from (found[number] for number in range(len(rows)))

    def _logits(
        self, model: Tree, examples: Examples, batches: Iterable[Which]
    ) -> Iterator[Tensor]:
        for which in batches:
            yield self.network.predict_stacked(model, examples.read(which))

    @property
    def evaluation_recorder(self) -> Recorder | None:
        if self._evaluations is None:
            self._evaluations = self._recorder(urgent=False)
        return self._evaluations

    def _recorder(self, *, urgent: bool) -> Recorder | None:
        if self.make_recorder is not None:
            return self.make_recorder()
        device = self.examples.labels.device
        if device.type != "cuda":
            return None
        return Captures(partial(CudaGraph, urgent=urgent), int(RECORDED * memory_of(device)))

    def close(self) -> None:
        wait_for_aside(self.examples.labels.device)  # that stream still uses what is released
        self._prepared = self._evaluations = None


def predict_side_by_side(
    network: Network,
    model_of: Callable[[int], Tree],
    examples: Examples,
    rows: Sequence[Tensor],
    at_once: int,
) -> dict[int, Tensor]:
    """The logits of each model on its own examples, by the model's number.

    Models are taken in the order of their numbers of examples, so that little is padding.
    """
    found: dict[int, Tensor] = {}
    left = sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True)
    while left:
        width = max(len(rows[left[0]]), 1)
        many = max(at_once // width, 1)
        some, left = left[:many], left[many:]
        padded = pad_sequence([rows[number] for number in some], batch_first=True)  # [C, width]
        model = stack([model_of(number) for number in some])
        pieces = []
        for part in torch.split(padded, -(-at_once // len(some)), 1):
            images = examples.read(part.flatten())
            pieces.append(network.predict_each(model, images.view(*part.shape, *images.shape[1:])))
        logits = torch.cat(pieces, 1) if pieces else padded.new_zeros((len(some), 0, 1))
        for number, own in zip(some, logits, strict=True):
            found[number] = own[: len(rows[number])]
    return found


def memory_of(device: torch.device) -> int:
    """The bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def _size(examples: Examples, which: Which) -> int:
    return len(range(len(examples))[which]) if isinstance(which, slice) else len(which)
