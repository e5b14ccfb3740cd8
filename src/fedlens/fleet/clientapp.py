"""What a site starts for each message in the place of Flower's `flwr-clientapp`.

Flower would install the app that the server sent, and run it. Here that is left out: whatever was
sent, the app is the one of the Fedlens that is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

REPLACED = ("install_from_fab", "get_project_dir", "get_load_client_app_fn")
"""What `run_clientapp` uses to install and to load what the server sent."""


def main() -> None:
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    missing = [name for name in REPLACED if not hasattr(runtime, name)]
    if missing:
        sys.exit(f"this Flower loads apps in another way ({missing[0]}): install flwr 1.41")

    def installs_nothing(*_: Any, **__: Any) -> None:
        return None

    def no_folder(*_: Any, **__: Any) -> Path:
        return Path()

    def load_ours(*_: Any, **__: Any) -> Any:
        def load(*_: Any, **__: Any) -> Any:
            from fedlens.fleet.apps import client_app

            return client_app()

        return load

    for name, ours in zip(REPLACED, (installs_nothing, no_folder, load_ours), strict=True):
        setattr(runtime, name, ours)
    sys.argv[0] = "flwr-clientapp"
    flwr_clientapp()


if __name__ == "__main__":
    main()
