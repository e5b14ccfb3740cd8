"""A dishonest server of real processes."""

import json
from pathlib import Path

import pytest

from fedlens.fleet import flower
from fedlens.fleet.approvals import Approvals
from fedlens.fleet.terms import Terms
from tests.fleet.real import Federation, processes_of, wait_until, with_code_of_tests
from tests.fleet.sites import write_experiment

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from tests.fleet.dishonest import process_that_approves, with_value

pytestmark = pytest.mark.fleet

APP = """
import json
import time
from pathlib import Path
from typing import Any

from flwr.serverapp import ServerApp

from fedlens.fleet.apps import FlowerSites
from tests.fleet.dishonest import model_to_train

app = ServerApp()


@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    site, plan = FlowerSites(grid, lambda: nodes), json.loads(Path(PLAN).read_text())
    while not site.online():
        time.sleep(0.2)

    def ask(what, orders, models):
        for order, model in zip(orders, models, strict=True):
            site.send(what, {0: order}, model, 300.0)
        arrived = []
        while len(arrived) < len(orders):
            arrived += [one.facts for _, one in site.arrived()]
            time.sleep(0.2)
        return arrived

    offered, begun = ask("sizes", plan["sizes"], [{}, {}])
    size = max(offered.get("size", 0), begun.get("size", 0))
    order = {"client": 0, "size": size, "counted": None, "keys": [1], "round": 0}
    orders = [{**order, "experiment": plan["approved"]}] * 8
    answers = ask("train", orders, [model_to_train(number) for number in range(8)])
    Path(PLAN + ".part").write_text(json.dumps({"size": size, "answers": answers}))
    Path(PLAN + ".part").rename(PLAN + ".done")
"""


def test_a_dishonest_server_of_real_processes(tmp_path, monkeypatch):
    """It offers a name that would end the process, and asks with eight models at once."""
    path = write_experiment(tmp_path)
    path.write_text(path.read_text().replace("count = 4, per_round = 3", "count = 1"))
    fleet = Federation(tmp_path / "fleet", path)
    (site,) = fleet.sites.values()
    approvals = Approvals(site.home)
    approved = approvals.of(*approvals.approved()).offer.terms
    offer = with_value(approved, ("experiment", "local", "anneal"), "os:abort")
    orders = [
        {"experiment": Terms(text).hash, "terms": text, "client": 0}
        for text in (offer, approved.text)
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"approved": approved.hash, "sizes": orders}))
    code = APP.replace("PLAN", repr(str(plan))).replace("{", "{{").replace("}", "}}")
    monkeypatch.setattr(flower, "HALF", code)
    with_code_of_tests(monkeypatch)
    with fleet.opened():
        fleet.start(site.home.name)
        flower.write_app(tmp_path / "app", "")
        fleet.link.run(tmp_path / "app", {})
        done = Path(f"{plan}.done")
        wait_until(done.is_file)
    found = json.loads(done.read_text())
    assert found["size"] == 120
    answered = [one for one in found["answers"] if "keys" in one]
    assert 1 <= len(answered) <= approved.rounds
    assert len(approvals.of(approved.hash).updates) <= approved.rounds
    shown = process_that_approves(site.home)
    assert (shown.returncode, "own_code" in shown.stderr) == (2, True)
    wait_until(lambda: not processes_of(tmp_path))
