"""Zhuo and Li: FedNS, ICIP 2021."""

from fedlens.recipes.fedns.figure1 import figure1
from fedlens.recipes.fedns.figure2 import figure2
from fedlens.recipes.fedns.figure3 import figure3
from fedlens.recipes.fedns.table1 import table1
from fedlens.recipes.fedns.table2 import table2
from fedlens.recipes.fedns.table3 import table3

ITEMS = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
}
