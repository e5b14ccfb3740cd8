"""What is used of Flower's private parts has the form that is relied on here.

If this fails after an upgrade: see "Upgrading flwr" in docs/fleet.md.
"""

import inspect
from importlib import import_module, metadata

import pytest

pytest.importorskip("flwr", reason="a fleet needs flwr: pip install 'fedlens[fleet]'")

from fedlens.fleet import gate, messages

USED = {  # parameters that are given, by position or name, and the module here that gives them
    "supernode.fleet_http_connection.http_request_response": (
        "server_address insecure root_certificates authentication_keys",
        "node.py",
    ),
    "supernode.fleet_http_client.FleetHttpClient.from_server_address": (
        "server_address insecure root_certificates interceptors",
        "node.py",
    ),
    "supernode.fleet_http_client.FleetHttpClient.DeactivateNode": ("request", "node.py"),
    "supernode.node_auth_http_interceptor.NodeAuthHttpInterceptor": (
        "private_key public_key",
        "node.py",
    ),
    "supercore.inflatable.inflatable_utils.pull_and_inflate_object_from_tree": (
        "object_tree pull_object_fn confirm_object_received_fn return_type initial_backoff",
        "node.py",
    ),
    "supercore.inflatable.inflatable_utils.push_objects": (
        "objects push_object_fn object_ids_to_push",
        "node.py",
    ),
    "supercore.inflatable.inflatable_object.get_all_nested_objects": ("obj", "node.py"),
    "supercore.inflatable.inflatable_object.get_object_tree": ("obj", "node.py"),
    "supercore.inflatable.inflatable_object.no_object_id_recompute": ("", "node.py"),
    "superlink.runtime.run_serverapp.run_serverapp": (
        "runtime_api_address log_queue token insecure certificates parent_pid",
        "superexec.py",
    ),
    "superlink.cli.flower_superlink": ("", "superexec.py"),
    "superlink.grid.http_grid.pull_objects": ("initial_backoff", "superexec.py"),
    "supercore.runtime.RuntimeHttpClient.from_server_address": (
        "server_address insecure root_certificates interceptors retry_invoker",
        "superexec.py",
    ),
    "supercore.control.ControlHttpClient.from_server_address": (
        "server_address insecure root_certificates interceptors",
        "flower.py",
    ),
    "supercore.interceptors.RuntimeVersionHttpInterceptor": ("component_name", "flower.py"),
    "cli.build.build_fab_from_disk": ("app", "flower.py"),
    "common.serde.fab_to_proto": ("fab", "flower.py"),
    "common.serde.user_config_to_proto": ("user_config", "flower.py"),
    "supercore.fab.Fab": ("hash_str content verifications", "flower.py"),
}


def sentence(what, file):
    return f"flwr {metadata.version('flwr')} {what}: adapt src/fedlens/fleet/{file}"


def found(path):
    *modules, name = path.split(".")
    try:
        place = import_module(f"flwr.{'.'.join(modules)}")
    except ModuleNotFoundError:  # a method
        return getattr(found(".".join(modules)), name)
    return getattr(place, name)


@pytest.mark.parametrize("path", USED)
def test_a_private_part_takes_what_it_is_given(path, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    wanted, file = USED[path]
    try:
        part = found(path)
    except (ImportError, AttributeError):
        pytest.fail(sentence(f"has no {path} any more", file))
    has = [*inspect.signature(part).parameters]
    assert set(wanted.split()) <= {*has}, sentence(f"changed {path}, which takes {has}", file)
    by_place = [name for name in has if name in wanted.split()][:4]
    assert by_place == wanted.split()[:4], sentence(f"changed the order of {path}", file)


def test_a_reply_is_pulled_by_the_function_that_is_told_how_soon(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    from flwr.superlink.grid.http_grid import HttpGrid

    uses = HttpGrid.pull_messages.__code__.co_names
    assert "pull_objects" in uses, sentence("pulls replies by another function", "superexec.py")


def test_its_database_waits_for_as_long_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    from flwr.supercore import constant, sql_mixin

    uses = sql_mixin._set_sqlite_pragmas.__code__.co_names
    told = isinstance(constant.SQLITE_PRAGMAS, tuple) and "busy_timeout" in dict(
        constant.SQLITE_PRAGMAS
    )
    assert told and "SQLITE_PRAGMAS" in uses, sentence("sets its database up anew", "superexec.py")


def test_codes_of_errors_are_those_of_flower(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    from flwr.common.constant import ErrorCode

    from fedlens.fleet.apps import FAILED

    told = {
        messages.RAISED: ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        messages.ENDED: ErrorCode.CLIENT_APP_CRASHED,
        3: ErrorCode.MESSAGE_UNAVAILABLE,
        5: ErrorCode.NODE_UNAVAILABLE,
    }
    assert all(ours == theirs for ours, theirs in told.items()), sentence(
        "numbers its errors anew", "messages.py"
    )
    assert FAILED.keys() <= told.keys()


def test_sites_call_no_path_that_the_gate_keeps_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    from flwr.supernode import fleet_http_client

    text = inspect.getsource(fleet_http_client)
    called = {word for word in text.split('"') if word.startswith("/v1/fleet/")}
    assert called == {path.decode() for path in gate.PATHS}, sentence(
        "changed the paths of its Fleet API", "gate.py"
    )


def test_requests_are_signed_in_the_headers_that_the_gate_reads():
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore import constant

    text = inspect.getsource(gate)
    names = (
        TIMESTAMP_HEADER,
        constant.FLEET_HTTP_PUBLIC_KEY_HEADER,
        constant.FLEET_HTTP_SIGNATURE_HEADER,
    )
    for name in names:
        assert f'b"{name.lower()}"' in text, sentence(f"signs in {name}", "gate.py")
