"""Engines run the client program for every client of a cohort. They depend on no algorithm."""

from fedlens.engines.processes import Processes
from fedlens.engines.ray import Ray
from fedlens.engines.sequential import Sequential
from fedlens.engines.stacked import Stacked
from fedlens.rounds.engine import Engine, Unreported

__all__ = [
    "Engine",
    "Processes",
    "Ray",
    "Sequential",
    "Stacked",
    "Unreported",
]
