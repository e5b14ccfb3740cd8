"""Image classifiers, one architecture a file.

A model is a function of the images' shape (channels, height, width) and of the number of classes;
its keyword-only parameters are its options. Weights come from PyTorch's default initialisation
and the global random numbers, unless the file says otherwise.
"""

from collections.abc import Callable

from torch import nn

from fedlens.models.alexnet import alexnet
from fedlens.models.alexnet_32 import alexnet_32
from fedlens.models.fedns_cnn import fedns_cnn
from fedlens.models.hsu_cnn import hsu_cnn
from fedlens.models.lenet5 import lenet5
from fedlens.models.linear import linear
from fedlens.models.mcmahan_cnn import mcmahan_cnn
from fedlens.models.mobilenetv2 import mobilenetv2
from fedlens.models.pfl_cnn import pfl_cnn
from fedlens.models.resnet18 import resnet18
from fedlens.models.simple_cnn import simple_cnn
from fedlens.models.vgg11 import vgg11

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "alexnet-32": alexnet_32,
    "fedns-cnn": fedns_cnn,
    "hsu-cnn": hsu_cnn,
    "lenet5": lenet5,
    "linear": linear,
    "mcmahan-cnn": mcmahan_cnn,
    "mobilenetv2": mobilenetv2,
    "pfl-cnn": pfl_cnn,
    "resnet18": resnet18,
    "simple-cnn": simple_cnn,
    "vgg11": vgg11,
}
