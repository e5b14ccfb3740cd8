"""From the description of a run to the parts that run it. All mistakes are found here."""

from fedlens.setup.assemble import Setup as Setup
from fedlens.setup.assemble import build as build
from fedlens.setup.assemble import federate as federate
from fedlens.setup.assemble import partition as partition
