"""The plain fillings of the slots: together they are FedAvg.

A filling is a value: a frozen dataclass whose fields are its numbers. So two fillings can be
compared, an algorithm can be printed and sent to another process, and a sweep can put one
number per experiment where one number was.
"""

from fedlens.algorithm.pieces.combine import WeightedSum as WeightedSum
from fedlens.algorithm.pieces.draw import Epochs as Epochs
from fedlens.algorithm.pieces.draw import PoissonBatches as PoissonBatches
from fedlens.algorithm.pieces.draw import Steps as Steps
from fedlens.algorithm.pieces.draw import Virtual as Virtual
from fedlens.algorithm.pieces.draw import epochs_of as epochs_of
from fedlens.algorithm.pieces.losses import cross_entropy as cross_entropy
from fedlens.algorithm.pieces.losses import double_softmax as double_softmax
from fedlens.algorithm.pieces.losses import squared_error as squared_error
from fedlens.algorithm.pieces.objective import ByEffectiveNumber as ByEffectiveNumber
from fedlens.algorithm.pieces.objective import Objective as Objective
from fedlens.algorithm.pieces.per_example import PerExample as PerExample
from fedlens.algorithm.pieces.personal import OwnBody as OwnBody
from fedlens.algorithm.pieces.personal import OwnHead as OwnHead
from fedlens.algorithm.pieces.personal import OwnModel as OwnModel
from fedlens.algorithm.pieces.personal import OwnNorms as OwnNorms
from fedlens.algorithm.pieces.personal import SecondModel as SecondModel
from fedlens.algorithm.pieces.personal import Tuned as Tuned
from fedlens.algorithm.pieces.select import AmongSeen as AmongSeen
from fedlens.algorithm.pieces.select import BySize as BySize
from fedlens.algorithm.pieces.select import Cyclic as Cyclic
from fedlens.algorithm.pieces.select import Poisson as Poisson
from fedlens.algorithm.pieces.select import Uniformly as Uniformly
from fedlens.algorithm.pieces.solve import ClippedByNorm as ClippedByNorm
from fedlens.algorithm.pieces.solve import ClippedByValue as ClippedByValue
from fedlens.algorithm.pieces.solve import Corrected as Corrected
from fedlens.algorithm.pieces.solve import GradientDescent as GradientDescent
from fedlens.algorithm.pieces.solve import Probed as Probed
from fedlens.algorithm.pieces.solve import Sgd as Sgd
from fedlens.algorithm.pieces.solve import is_sgd as is_sgd
from fedlens.algorithm.pieces.upload import Keeping as Keeping
from fedlens.algorithm.pieces.upload import difference as difference
from fedlens.algorithm.pieces.weigh import ByExamples as ByExamples
from fedlens.algorithm.pieces.weigh import Constant as Constant
from fedlens.algorithm.pieces.weigh import Equally as Equally
