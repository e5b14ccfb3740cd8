"""Chen, Wen, Zhang and Hao: a report on image classification by FedAvg, on CIFAR-10."""

from fedlens.recipes.fedavg_cifar10.architectures import architectures
from fedlens.recipes.fedavg_cifar10.fedprox import fedprox
from fedlens.recipes.fedavg_cifar10.figure12 import figure12
from fedlens.recipes.fedavg_cifar10.figure13 import figure13
from fedlens.recipes.fedavg_cifar10.figure14 import figure14
from fedlens.recipes.fedavg_cifar10.figure16 import figure16
from fedlens.recipes.fedavg_cifar10.figure17 import figure17
from fedlens.recipes.fedavg_cifar10.figure18 import figure18
from fedlens.recipes.fedavg_cifar10.headline import headline
from fedlens.recipes.fedavg_cifar10.samples import samples

ITEMS = {
    "headline": headline,
    "figure12": figure12,
    "figure13": figure13,
    "figure14": figure14,
    "figure16": figure16,
    "figure17": figure17,
    "figure18": figure18,
    "architectures": architectures,
    "fedprox": fedprox,
    "samples": samples,
}
