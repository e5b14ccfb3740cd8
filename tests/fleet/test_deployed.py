"""The files that start a fleet as a service: units of systemd, compose, Kubernetes."""

import importlib.util
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main

from fedlens.cli.main import app_of

yaml: Any = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "fleet"
UNITS = sorted(FOLDER.glob("*.service"))
MANIFESTS = sorted(FOLDER.glob("kubernetes-*.yaml"))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def commands() -> list[list[str]]:
    """All command lines, without `fedlens`."""
    found = []
    for path in UNITS:
        lines = (one for one in path.read_text().splitlines() if one.startswith("ExecStart="))
        found += [shlex.split(line.replace("%i", "ann"))[1:] for line in lines]
    (compose,) = documents(FOLDER / "compose.yaml")
    found += [shlex.split(one["command"]) for one in compose["services"].values()]
    found += [of_pod(one)["containers"][0]["args"] for one in sets()]
    return found


def sets() -> list[Any]:
    every = (one for path in MANIFESTS for one in documents(path))
    return [one for one in every if one["kind"] == "StatefulSet"]


def of_pod(one: Any) -> Any:
    return one["spec"]["template"]["spec"]


def test_every_command_is_one_that_fedlens_takes():
    group: Any = typer.main.get_command(app_of())
    assert len(commands()) == 6
    for words in commands():
        command, rest = group, [*words]
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context("fedlens", rest)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_hold_by_the_rules_of_systemd(path, tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here: apt install systemd")
    name = path.name.replace("@", "@ann")
    unit = tmp_path / name
    unit.write_text(
        path.read_text().replace("/opt/fedlens/bin/fedlens", shutil.which("true") or "")
    )
    told = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    mine = [line for line in told.stderr.splitlines() if name in line]
    assert (told.returncode, mine) == (0, [])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_hold_by_the_schema_of_kubernetes(path):
    linter = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in documents(path):
        linter.validate(one, "1.31", strict=True)


def test_compose_holds_by_its_schema():
    spec = importlib.util.find_spec("compose")
    if spec is None or spec.origin is None:
        pytest.skip("no schema of compose: pip install --no-deps docker-compose")
    schema = json.loads((Path(spec.origin).parent / "config" / "compose_spec.json").read_text())
    jsonschema.Draft201909Validator(schema).validate(documents(FOLDER / "compose.yaml")[0])


def test_only_the_gate_of_a_server_is_open_and_nothing_of_a_site():
    policies = {
        one["metadata"]["name"]: one["spec"]
        for path in MANIFESTS
        for one in documents(path)
        if one["kind"] == "NetworkPolicy"
    }
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in sets()
    }
    assert {name: one["podSelector"]["matchLabels"] for name, one in policies.items()} == labels
    server, site = policies["fedlens-server"], policies["fedlens-ann"]
    assert all(one["policyTypes"] == ["Ingress", "Egress"] for one in (server, site))
    assert (server["ingress"], server["egress"]) == (
        [{"ports": [{"protocol": "TCP", "port": "gate"}]}],
        [],
    )
    assert site["ingress"] == []
    (own,) = (one for one in sets() if one["metadata"]["name"] == "fedlens-server")
    assert of_pod(own)["containers"][0]["ports"] == [{"name": "gate", "containerPort": 9092}]


@pytest.mark.parametrize("one", sets(), ids=lambda one: one["metadata"]["name"])
def test_containers_have_no_rights_that_they_do_not_need(one):
    pod = of_pod(one)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    own = container["securityContext"]
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    places = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {container["workingDir"], "/tmp"} == places
