"""What hostile clients do: to their data, or to what they send."""

from fedlens.attacks.attack import Attack as Attack
from fedlens.attacks.attack import Data as Data
from fedlens.attacks.attack import Seen as Seen
from fedlens.attacks.attack import Sending as Sending
from fedlens.attacks.attack import hostile_key as hostile_key
from fedlens.attacks.attack import under_attack as under_attack
