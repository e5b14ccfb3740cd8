"""Hsu, Qi and Brown: federated visual classification with real-world data distribution, 2020."""

from fedlens.recipes.hsu2020.figure1 import figure1
from fedlens.recipes.hsu2020.figure2 import figure2
from fedlens.recipes.hsu2020.figure3 import figure3
from fedlens.recipes.hsu2020.figure4 import figure4
from fedlens.recipes.hsu2020.figure4_pilot import figure4_pilot
from fedlens.recipes.hsu2020.figure5 import figure5
from fedlens.recipes.hsu2020.figure6 import figure6
from fedlens.recipes.hsu2020.figure7 import figure7
from fedlens.recipes.hsu2020.figure8 import figure8
from fedlens.recipes.hsu2020.figure9 import figure9
from fedlens.recipes.hsu2020.figure10 import figure10
from fedlens.recipes.hsu2020.table1 import table1
from fedlens.recipes.hsu2020.table2 import table2
from fedlens.recipes.hsu2020.table3 import table3
from fedlens.recipes.hsu2020.table4 import table4
from fedlens.recipes.hsu2020.table5 import table5

ITEMS = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
    "figure4": figure4,
    "figure4-pilot": figure4_pilot,
    "figure5": figure5,
    "figure6": figure6,
    "figure7": figure7,
    "figure8": figure8,
    "figure9": figure9,
    "figure10": figure10,
}
