"""The plain fillings of the slots: together they are FedAvg.

A filling is a value: a frozen dataclass whose fields are its numbers. So two fillings can be
compared, an algorithm can be printed and sent to another process, and a sweep can put one
number per experiment where one number was.
"""

from fedlens.pieces.combine import WeightedSum
from fedlens.pieces.draw import Epochs
from fedlens.pieces.objective import Objective, cross_entropy
from fedlens.pieces.select import Uniformly
from fedlens.pieces.solve import Sgd
from fedlens.pieces.upload import difference
from fedlens.pieces.weigh import ByExamples, Constant

__all__ = [
    "ByExamples",
    "Constant",
    "Epochs",
    "Objective",
    "Sgd",
    "Uniformly",
    "WeightedSum",
    "cross_entropy",
    "difference",
]
