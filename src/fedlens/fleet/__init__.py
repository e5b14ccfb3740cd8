"""A real federation: clients are sites that hold their own data, and Flower carries messages.

Flower is imported by `apps.py`, `flower.py`, `messages.py`, `node.py` and `superexec.py` alone.
"""

from collections.abc import Callable

Notify = Callable[[str], None]
"""A callback that receives a line for the user about what sites and servers do."""

# The files of keys and certificates, in the folders of a server and of a site.
CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
NODE_KEY = "node.key"
ENROL = "/fedlens/enrol"  # where a site that was invited makes its key known
CONNECTED = "connected to the server"  # in the log of a site's node
STAGES = ("keys", "shares", "agree", "open")  # of a secure sum, besides the training
CACHE = "cache"  # in the folder of a site: decoded images
