"""A round: who takes part, what clients do, what they send, and how the server goes on."""

from fedlens.rounds.client_memory import ClientMemory as ClientMemory
from fedlens.rounds.round import Outcome as Outcome
from fedlens.rounds.round import RoundInput as RoundInput
from fedlens.rounds.round import State as State
from fedlens.rounds.round import begin as begin
from fedlens.rounds.round import run_round as run_round
from fedlens.rounds.round import run_rounds as run_rounds
