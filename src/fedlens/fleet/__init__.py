"""A real federation: clients are sites that hold their own data, and Flower carries messages.

Only `apps.py`, `flower.py` and `superexec.py` import Flower; the rest does not know it.
"""

from collections.abc import Callable

Notify = Callable[[str], None]
"""Called with a line for people: what sites and servers do."""
