"""What a round of a fleet takes beside one of an empty Flower app that sends the model back.

The seconds are printed, for docs/fleet.md, and not judged: they depend on what else runs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from fedlens.config.experiment import Experiment
from fedlens.fleet import CA, NODE_KEY
from fedlens.fleet.flower import end, environment, free_port
from fedlens.setup import build
from fedlens.storage.run_files import read_records
from tests.fleet.real import Federation, wait_until

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")
pytestmark = pytest.mark.fleet

ROUNDS, SITES = 6, 2
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "empty"
version = "1.0.0"
description = "It sends back what it is sent"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedlens"

[tool.flwr.app.components]
serverapp = "empty.server:app"
clientapp = "empty.client:app"

[tool.flwr.app.config]
out = ""
sizes = ""
"""
CLIENT = """\
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("echo")
def echo(message, context):
    return Message(message.content, reply_to=message)
"""
SERVER = f"""\
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    sizes = json.loads(str(context.run_config["sizes"]))
    arrays = ArrayRecord({{name: Array(np.ones(size, "f4")) for name, size in sizes.items()}})
    nodes, seconds = [], []
    while len(nodes) < {SITES}:
        nodes = list(grid.get_node_ids())
        time.sleep(0.25)
    for _ in range({ROUNDS}):
        begun = time.monotonic()
        content = RecordDict({{"arrays": arrays}})
        waiting = set(grid.push_messages([Message(content, n, "query.echo") for n in nodes]))
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                assert not reply.has_error(), reply.error
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.25)
        seconds.append(time.monotonic() - begun)
    Path(str(context.run_config["out"])).write_text(json.dumps(seconds))
"""


EXPERIMENT = f"""\
dataset = "fashion-mnist-mini"
model = "{{model}}"
rounds = {ROUNDS}
local = {{{{ max_steps = 1, batch_size = 8 }}}}
clients = {{{{ count = {SITES} }}}}
"""


def started(words, home):
    """A process of Flower, which finds its other programs by PATH."""
    places = Path(sys.executable).parent
    home.mkdir()
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            [str(places / words[0]), *map(str, words[1:])],
            stdout=log,
            stderr=log,
            env=environment(home) | {"PATH": f"{places}{os.pathsep}{os.environ['PATH']}"},
            start_new_session=True,
        )


def floor(fleet, folder, sizes):
    """Seconds of rounds of the empty app, on SuperNodes that are Flower's own throughout."""
    app, out = folder / "app", folder / "seconds.json"
    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (app / "empty" / f"{name}.py").write_text(text)
    nodes = []
    for site in fleet.sites.values():
        home = site.home
        words = ["flower-supernode", "--superlink", fleet.link.address]
        words += ["--root-certificates", home / CA, "--auth-supernode-private-key", home / NODE_KEY]
        words += ["--host", "127.0.0.1", "--port", free_port(), "--isolation", "subprocess"]
        nodes.append(started(words, folder / home.name))
    try:
        fleet.link.run(app, {"out": str(out), "sizes": json.dumps(sizes)})
        wait_until(out.is_file, 1800)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            end(node)
    return json.loads(out.read_text())


@pytest.mark.parametrize("model", ["linear", "mcmahan-cnn", "hsu-cnn"])
def test_rounds_are_timed_beside_those_of_an_empty_app(tmp_path, model):
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT.format(model=model))
    network = build(Experiment.read(path, ["engine=sequential"])).network
    sizes = {name: list(t.shape) for name, t in network.params.items()}
    fleet = Federation(tmp_path / "fleet", path)
    with fleet.opened():
        empty = floor(fleet, tmp_path, sizes)
        time.sleep(65)  # for a minute after it ended, a SuperNode with the same key is refused
        for name in fleet.sites:
            fleet.start(name)
        assert fleet.run(path, tmp_path / "run", wait=600.0) == "finished"
    ours = [record["seconds"] for record in read_records(tmp_path / "run")]
    print(f"{model}, {network.num_parameters:,} parameters")
    for name, seconds in (("empty app", empty), ("fedlens", ours)):
        print(f"{name}: median {median(seconds):.1f} s of", ", ".join(f"{s:.1f}" for s in seconds))
    assert len(ours) == len(empty) == ROUNDS
