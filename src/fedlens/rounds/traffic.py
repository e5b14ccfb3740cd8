"""How many bytes clients send and receive."""

from __future__ import annotations

import torch

from fedlens.algorithm.secure import SecureSum
from fedlens.core import Facts, Memory, Plan, Tree
from fedlens.core.trees import stack
from fedlens.rounds.client import ClientProgram
from fedlens.rounds.work import ClientInputs, Shared, exact_model, work_alone


def num_bytes(tree: Tree) -> int:
    """The bytes of a tree as it is sent: only the server uses float64, others send float32."""
    return sum(
        t.numel() * min(t.element_size(), 4) if t.is_floating_point() else t.nbytes
        for t in tree.values()
    )


def bytes_sent(program: ClientProgram, model: Tree, extra: Memory) -> int:
    """The bytes that a client sends: its update, after the steps of the channel, and the rest."""
    secure, total = program.algorithm.combine, sum_of_bytes(extra)
    if isinstance(secure, SecureSum):
        trees = (program.leaving(model), *extra.values())
        return -(-secure.bits * sum(t.numel() for tree in trees for t in tree.values()) // 8)
    for name, tensor in program.leaving(model).items():
        bits = 8 * num_bytes({name: tensor})
        for step in program.algorithm.channel if tensor.is_floating_point() else ():
            bits = step.num_bits(tensor.shape, bits, program.layout.entries[name].role)
        total += -(-bits // 8)
    return total


def sum_of_bytes(memory: Memory) -> int:
    return sum(map(num_bytes, memory.values()))


def traffic(program: ClientProgram, params: Tree, buffers: Tree, told: Memory) -> tuple[int, int]:
    """The bytes that a client sends in a round, and those that it receives."""
    model = params | buffers
    extra = sent_besides(program, params, buffers, told)
    return bytes_sent(program, model, extra), num_bytes(model) + sum_of_bytes(told)


def sent_besides(program: ClientProgram, params: Tree, buffers: Tree, told: Memory) -> Memory:
    """What a client sends besides its update, computed for a client that has not trained."""
    zero, memory = torch.zeros(1, dtype=torch.int64), program.memory(params, buffers, told)
    no_steps = Plan(zero.new_empty(1, 0, 1), zero.new_empty(1, 0))
    work = work_alone(no_steps, zero, Facts(zero, zero[None]), memory)
    params, buffers, told = (stack([part]) for part in (params, buffers, told))
    shared = Shared(params, buffers, exact_model(params | buffers), told)
    return program.sends_besides(shared, ClientInputs.of(work))
