"""Hafez Ghaemi's report on FedAvg, FedProx and LIADMM for Fashion-MNIST (Tehran, 2022)."""

from fedlens.recipes.ghaemi.centralised import centralised
from fedlens.recipes.ghaemi.fedadmm import fedadmm
from fedlens.recipes.ghaemi.fedavg import fedavg
from fedlens.recipes.ghaemi.fedprox import fedprox
from fedlens.recipes.ghaemi.liadmm import liadmm
from fedlens.recipes.ghaemi.samples import samples
from fedlens.recipes.ghaemi.why_liadmm_fails import why_liadmm_fails

ITEMS = {
    "centralised": centralised,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "liadmm": liadmm,
    "fedadmm": fedadmm,
    "why-liadmm-fails": why_liadmm_fails,
    "samples": samples,
}
