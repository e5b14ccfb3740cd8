"""The nouns: tensors by name, what a round passes on, federations, and randomness by keys."""

from fedlens.core.types import OWN as OWN
from fedlens.core.types import Batch as Batch
from fedlens.core.types import Cohort as Cohort
from fedlens.core.types import Cuts as Cuts
from fedlens.core.types import FactoredWeights as FactoredWeights
from fedlens.core.types import Facts as Facts
from fedlens.core.types import Gathered as Gathered
from fedlens.core.types import LayerFactors as LayerFactors
from fedlens.core.types import Local as Local
from fedlens.core.types import Memory as Memory
from fedlens.core.types import Moved as Moved
from fedlens.core.types import Number as Number
from fedlens.core.types import Plan as Plan
from fedlens.core.types import StepNumbers as StepNumbers
from fedlens.core.types import Tree as Tree
from fedlens.core.types import Upload as Upload
from fedlens.core.types import is_on as is_on
from fedlens.core.types import per_row as per_row
from fedlens.core.types import squared_distance as squared_distance
from fedlens.core.types import squared_norm as squared_norm
from fedlens.core.types import tree_map as tree_map
from fedlens.core.types import zeros_at_first as zeros_at_first
from fedlens.core.types import zeros_like as zeros_like
