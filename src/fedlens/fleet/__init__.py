"""A real federation: clients are sites that hold their own data, and Flower carries messages.

Only `apps.py`, `flower.py` and `superexec.py` import Flower; the other modules do not depend on it.
"""

from collections.abc import Callable

Notify = Callable[[str], None]
"""A callback that receives a line for the user about what sites and servers do."""

# The files of keys and certificates, in the folders of a server and of a site.
CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
NODE_KEY = "node.key"
CACHE = "cache"  # in the folder of a site: decoded images
