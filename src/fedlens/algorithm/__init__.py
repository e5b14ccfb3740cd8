"""An algorithm as a row of slots, what fills them, and the channel between clients and server."""

from fedlens.algorithm.algorithm import EXCLUSIVE as EXCLUSIVE
from fedlens.algorithm.algorithm import PROTOCOLS as PROTOCOLS
from fedlens.algorithm.algorithm import Algorithm as Algorithm
from fedlens.algorithm.algorithm import Amendment as Amendment
from fedlens.algorithm.algorithm import at_least as at_least
from fedlens.algorithm.algorithm import below_one as below_one
from fedlens.algorithm.algorithm import check_pull as check_pull
from fedlens.algorithm.algorithm import compose as compose
from fedlens.algorithm.algorithm import is_paper as is_paper
from fedlens.algorithm.algorithm import numbers_of as numbers_of
from fedlens.algorithm.algorithm import paper as paper
from fedlens.algorithm.algorithm import pick as pick
from fedlens.algorithm.algorithm import same as same
from fedlens.algorithm.algorithm import same_but_numbers as same_but_numbers
from fedlens.algorithm.algorithm import side_by_side as side_by_side
from fedlens.algorithm.algorithm import up_to_one as up_to_one
from fedlens.algorithm.algorithm import with_numbers as with_numbers
from fedlens.algorithm.algorithm import wraps as wraps
