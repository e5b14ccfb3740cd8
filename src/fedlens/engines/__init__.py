"""An engine maps the client program over a cohort. It knows nothing of any algorithm."""

from fedlens.engines.engine import Engine
from fedlens.engines.processes import Processes
from fedlens.engines.sequential import Sequential
from fedlens.engines.stacked import Stacked

__all__ = ["Engine", "Processes", "Sequential", "Stacked"]
