"""Makes the parts of a run from its description. All mistakes of the user are found here."""

from fedlens.setup.assemble import Setup as Setup
from fedlens.setup.assemble import build as build
from fedlens.setup.assemble import federate as federate
from fedlens.setup.assemble import partition as partition
from fedlens.setup.assemble import planned_for_examples as planned_for_examples
