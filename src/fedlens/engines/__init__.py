"""Engines run the client program for every client of a cohort. They depend on no algorithm."""

from fedlens.engines.processes import Processes as Processes
from fedlens.engines.ray import Ray as Ray
from fedlens.engines.sequential import Sequential as Sequential
from fedlens.engines.stacked import Stacked as Stacked
from fedlens.rounds.engine import Engine as Engine
from fedlens.rounds.engine import Unreported as Unreported
