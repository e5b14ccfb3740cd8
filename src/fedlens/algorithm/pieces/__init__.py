"""The plain fillings of the slots: together they are FedAvg.

A filling is a value: a frozen dataclass whose fields are its numbers. So two fillings can be
compared, an algorithm can be printed and sent to another process, and a sweep can put one
number per experiment where one number was.
"""

from fedlens.algorithm.pieces.combine import WeightedSum
from fedlens.algorithm.pieces.draw import WHOLE_EPOCHS, Epochs, Steps, Virtual
from fedlens.algorithm.pieces.losses import cross_entropy, double_softmax, squared_error
from fedlens.algorithm.pieces.objective import ByEffectiveNumber, Objective
from fedlens.algorithm.pieces.personal import OwnHead, OwnNorms
from fedlens.algorithm.pieces.select import BySize, Poisson, Uniformly
from fedlens.algorithm.pieces.solve import (
    ClippedByNorm,
    ClippedByValue,
    Corrected,
    GradientDescent,
    Probed,
    Sgd,
    is_sgd,
)
from fedlens.algorithm.pieces.upload import difference
from fedlens.algorithm.pieces.weigh import ByExamples, Constant, Equally

__all__ = [
    "WHOLE_EPOCHS",
    "ByEffectiveNumber",
    "ByExamples",
    "BySize",
    "ClippedByNorm",
    "ClippedByValue",
    "Constant",
    "Corrected",
    "Epochs",
    "Equally",
    "GradientDescent",
    "Objective",
    "OwnHead",
    "OwnNorms",
    "Poisson",
    "Probed",
    "Sgd",
    "Steps",
    "Uniformly",
    "Virtual",
    "WeightedSum",
    "cross_entropy",
    "difference",
    "double_softmax",
    "is_sgd",
    "squared_error",
]
