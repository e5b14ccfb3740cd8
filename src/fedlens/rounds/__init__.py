"""A round: who takes part, what clients do, what they send, and how the server goes on."""

from fedlens.rounds.round import (
    ClientMemory,
    Outcome,
    RoundInput,
    State,
    begin,
    run_round,
    run_rounds,
)

__all__ = [
    "ClientMemory",
    "Outcome",
    "RoundInput",
    "State",
    "begin",
    "run_round",
    "run_rounds",
]
