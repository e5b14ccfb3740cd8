"""`fedlens fleet`: a real federation over Flower."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from fedlens.cli import arguments
from fedlens.cli.arguments import notify, print_json, print_table, say
from fedlens.cli.stopping import going_on_by
from fedlens.config.experiment import Experiment
from fedlens.fleet import CACHE
from fedlens.runs.progress import counted, in_rounds, shown
from fedlens.storage.locks import one_writer
from fedlens.storage.reading import argument
from fedlens.storage.run_files import can_go_on, identity, to_json
from fedlens.storage.words import count_of

fleet_app = typer.Typer(no_args_is_help=True, help="A real federation: a server, and sites.")

FLOWER = ("1.41", "1.42")  # the versions that it was tried with
Out = Annotated[Path | None, Option(help="The run folder. [default: runs/NAME]")]


def _check_installed() -> None:
    """Raise ValueError unless Flower is there, in the version whose private parts are used."""
    remedy, wanted = "install it with: pip install 'fedlens[fleet]'", " or ".join(FLOWER)
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"a fleet needs Flower (flwr {wanted}): {remedy}") from error
    if ".".join(found.split(".")[:2]) not in FLOWER:
        raise ValueError(f"flwr is {found}, and a fleet needs {wanted}: {remedy}")


@fleet_app.command("keys")
def keys_command(
    folder: Annotated[Path, Argument(help="Where the keys are put.")],
    host: Annotated[
        list[str] | None, Option(help="An address or name by which sites reach the server.")
    ] = None,
    site: Annotated[str | None, Option(help="The name of a site.")] = None,
    renew: Annotated[bool, Option("--renew", help="Replace keys that are there.")] = False,
) -> None:
    """Make the keys of a server (--host), or of a site (--site)."""
    _check_installed()
    from fedlens.fleet.keys import make_server_keys, make_site_key, renew_server_keys

    if not host and not site:
        raise ValueError("no --host and no --site: give --host for a server, or --site for a site")
    if host:
        (renew_server_keys if renew else make_server_keys)(folder, host)
        print(f"{folder}: ca.pem is for every site; ca.key and server.key stay here")
    if site:
        make_site_key(folder, site, renew)
        print(f"{folder}: {site}.pub is for the server; node.key stays here")


@fleet_app.command("invite")
def invite_command(
    keys: Annotated[Path, Argument(help="The server's keys.")],
    names: Annotated[list[str], Argument(help="The names of the sites.")],
    server: Annotated[str, Option(help="HOST:PORT by which they reach the server.")],
    folder: Annotated[Path, Option("--to", help="Where the files are put.")] = Path(),
    days: Annotated[float, Option(min=0, help="For how long they can be used.")] = 7.0,
) -> None:
    """Write NAME.invite for each site: all that it needs to join."""
    _check_installed()
    _address(server, "--server", "10.0.0.1:9092")
    from fedlens.fleet.keys import check_server_keys, invite

    check_server_keys(keys)
    for name in names:
        path = folder / f"{name}.invite"
        invite(keys, name, server, days, path)
        print(f"{path} is for {name} alone: whoever has it can join in its place")


@fleet_app.command("withdraw")
def withdraw_command(
    folder: Annotated[Path, Argument(help="The server's keys, or a site's own folder.")],
    name: Annotated[
        str, Argument(help="At a server: the name of the site. At a site: digits of the hash.")
    ],
) -> None:
    """Let a site take part no more; or take back what a site approved."""
    _check_home(folder)
    from fedlens.fleet import SERVER

    if (folder / SERVER).is_file():
        from fedlens.fleet.keys import withdraw

        withdraw(folder, name)
        print(f"{name} takes part no more: a server that runs notes it in its log")
        return
    from fedlens.fleet.approvals import Approvals

    approvals = Approvals(folder)
    found = [one for one in approvals.approved() if one.startswith(name)]
    if len(found) != 1:
        many = f"{len(found)} experiments" if found else "no experiment"
        raise ValueError(
            f"{many} approved at {folder} begin with {name}: name the keys of a server, or the "
            "folder of a site and the first digits of one"
        )
    approvals.withdraw(found[0])
    print(f"{found[0][:12]} is approved here no more")


@fleet_app.command("serve")
def serve_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    keys: Annotated[Path, Option(help="The server's keys, and the *.pub of its sites.")] = Path(
        "fleet-keys"
    ),
    address: Annotated[str, Option(help="Where sites reach it.")] = "0.0.0.0:9092",
    home: Annotated[
        Path | None, Option(help="What it remembers of sites. [default: KEYS/server]")
    ] = None,
    out: Out = None,
    overwrite: Annotated[bool, Option(help="Replace a run that is there.")] = False,
    resume: Annotated[bool, Option(help="Go on with the run that is there.")] = False,
    wait: Annotated[float, Option(min=0, help="Seconds to wait for sites.")] = 3600.0,
    at_least: Annotated[
        int | None, Option(min=1, help="Begin with this many sites, if others do not come in time.")
    ] = None,
    data: arguments.DataFolder = None,
    page: Annotated[
        str, Option(help="Where its live page is, or `none`; port 0 is any.")
    ] = "127.0.0.1:0",
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Run an experiment on the sites that join."""
    _check_installed()
    from fedlens.cli.run import finish_run
    from fedlens.fleet.keys import check_server_keys, public_keys

    # What needs no PyTorch, whose import takes seconds, is checked first, here and below.
    described = Experiment.read(experiment, overrides or [])
    host, port = _address(address, "--address", "0.0.0.0:9092")
    shown_at = None if page == "none" else _address(page, "--page", "127.0.0.1:8377")
    check_server_keys(keys)
    from fedlens.fleet.serve import serve
    from fedlens.fleet.server import Job
    from fedlens.fleet.terms import check_possible, for_fleet, say_without_effect
    from fedlens.runs.folder import check_free

    check_possible(for_fleet(described))
    folder = out or Path("runs") / experiment.stem
    if not (overwrite or resume):
        check_free(folder, overwrite, "choose another --out, or add --resume or --overwrite")
    place = home or keys / "server"
    num_sites = len(public_keys(keys))
    if not resume:
        say_without_effect(described, num_sites)
    job = Job(
        experiment=str(place / "experiment.toml"),
        out=str(folder),
        sites={},
        data=str(data) if data else None,
        overwrite=overwrite,
        resume=resume,
        wait=wait,
        at_least=at_least,
    )
    can = partial(can_go_on, folder, None if resume else identity(folder))
    with (
        going_on_by("go on with the same command and --resume", can),
        shown(not quiet, in_rounds, folder.name, described.rounds) as watch,
    ):
        status = serve(described, job, keys, place, host, port, notify, watch, shown_at)
    finish_run(folder, status, as_json, quiet)


@fleet_app.command("join")
def join_command(
    data: Annotated[
        Path, Option(help="Its examples: a folder of class folders, a csv or .npz file.")
    ],
    invite: Annotated[Path | None, Argument(help="What `fedlens fleet invite` wrote.")] = None,
    server: Annotated[
        str | None, Option(help="HOST:PORT of the server. [default: the invitation's]")
    ] = None,
    name: Annotated[
        str | None, Option(help="The name of the site. [default: the invitation's]")
    ] = None,
    home: Annotated[
        Path | None, Option(help="Its own folder: keys, policy, memory. [default: ./NAME]")
    ] = None,
    device: Annotated[str, Option(help="Where it trains: cpu, or cuda.")] = "cpu",
    wait: Annotated[
        float, Option(min=0, help="Seconds to wait for a server, and to be let in.")
    ] = 3600.0,
    on_error: Annotated[
        Literal["stop", "skip"], Option(help="What becomes of images that cannot be decoded.")
    ] = "stop",
    cache: Annotated[
        bool, Option(help="Keep decoded images in its folder, to read them once.")
    ] = True,
) -> None:
    """Take part with the examples of this site, until interrupted."""
    _check_installed()
    from fedlens.fleet.keys import Invitation, check_site_keys

    invitation = None if invite is None else Invitation.read(invite)
    if invitation is not None:
        server, name = server or invitation.server, name or invitation.name
    if server is None or name is None:
        raise ValueError("no --server or no --name: give both, or the file of an invitation")
    place = home or Path(name)
    _address(server, "--server", "10.0.0.1:9092")
    if invitation is not None:
        invitation.accept(place)
    check_site_keys(place, name)
    from fedlens.fleet.join import join
    from fedlens.fleet.site_data import check_files

    kept = (
        f"{place / CACHE} keeps its decoded images for the next run: "
        f"`fedlens fleet clean {argument(place)}` deletes them"
    )
    with shown(True, counted, "images") as watch:
        check_files(data, place, on_error, watch)
    with going_on_by(kept, (place / CACHE).is_dir):
        tell = partial(_notify_of, name)
        join(place, name, data, server, device, wait, tell, cache, invitation)


@fleet_app.command("approve")
def approve_command(
    home: Annotated[Path, Argument(help="The site's own folder.")],
    digits: Annotated[
        str | None, Argument(help="The first digits of its hash. [default: what is offered]")
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Approve without asking.")] = False,
) -> None:
    """Show what a server asks of this site, and approve it."""
    _check_home(home)
    from fedlens.fleet.account import Account
    from fedlens.fleet.approvals import Approvals
    from fedlens.fleet.policy import Policy, Refused
    from fedlens.fleet.site_data import Checked

    approvals = Approvals(home)
    found = approvals.offers()
    if digits is not None:
        before = (approvals.of(one).offer for one in approvals.approved())
        new = {offer.text for offer in found}
        found += [offer for offer in before if offer.text not in new]
        found = [offer for offer in found if offer.terms.hash.startswith(digits)]
    if not found:
        what = f"{digits} was not offered" if digits else "nothing is left to approve"
        raise ValueError(f"{home}: {what}: join the server first")
    if yes and digits is None:
        command = f"fedlens fleet approve {argument(home)} {found[0].terms.hash[:12]}"
        raise ValueError(f"--yes approves what was read: read it by `{command}`, then add --yes")
    refused = []
    for offer in found:
        terms = offer.terms
        print("\n".join(terms.describe()))
        try:
            Policy.read(home).check(terms)
            print("\n".join(terms.effects()))
            for line in Account(home).describe(terms, offer.size):
                print(line)
            print(f"bound to:  client {offer.client}, and the examples there when it was offered")
            if (checked := Checked.read(home)) is not None:
                print(f"examples:  {checked.describe(offer.data)}")
        except (Refused, ValueError) as refusal:
            refused.append(f"{terms.hash[:12]} is not approved: {refusal}")
            continue
        if yes or typer.confirm("approve it?", err=True):
            approvals.approve(offer)
            approval = approvals.of(terms.hash)
            print(f"approved {terms.hash[:12]} by {approval.by} at {approval.at}")
    if refused:
        raise ValueError("; ".join(refused))


@fleet_app.command("log")
def log_command(
    home: Annotated[Path, Argument(help="The own folder of a site, or of a server.")],
    check: Annotated[
        bool, Option("--verify", help="Find lines that were changed, taken out or cut off.")
    ] = False,
    against: Annotated[
        Path | None,
        Option(help="With --verify: the folder of another log, which notes marks of it."),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """What was asked, approved, refused and sent."""
    _check_home(home)
    from fedlens.fleet.log import Log, in_words, verify

    if not check:
        for line in Log(home).events():
            say(to_json(line) if as_json else in_words(line))
        return
    found = verify(home)
    wrong = found.wrong + ([] if against is None else found.against(against))
    if as_json:
        print_json({"lines": found.head.line, "mark": found.head.mark, "wrong": wrong})
    else:
        for words in wrong or ["nothing is changed, and nothing is missing"]:
            say(words)
        print(f"{found.head.line} lines, which end with {found.head.mark}")
    raise SystemExit(1 if wrong else 0)


@fleet_app.command("status")
def status_command(
    home: Annotated[Path, Argument(help="The own folder of a server (KEYS/server), or of a site.")],
    as_json: arguments.Json = False,
) -> None:
    """How a run on sites stands, or what left a site."""
    _check_home(home)
    from fedlens.fleet import NODE_KEY
    from fedlens.fleet.status import FILE, Status

    if (home / FILE).is_file():
        found = Status.read(home)
        if as_json:
            print_json(found.plain())
            return
        say(found.headline())
        if found.begun and Path(found.out).is_dir():
            from fedlens.report import read_all, rows

            print_table(*rows(read_all([Path(found.out)])))
            print()
        print_table(*found.rows())
    elif (home / NODE_KEY).is_file() or (home / "approved").is_dir():
        from fedlens.fleet.told import told_of

        for line in told_of(home):
            say(line)
    else:
        raise ValueError(f"{home} is not the folder of a site, or of a server that was started")


@fleet_app.command("clean")
def clean_command(home: Annotated[Path, Argument(help="The site's own folder.")]) -> None:
    """Delete the decoded images that a site keeps in its folder."""
    _check_home(home)
    with one_writer(home):
        if not (home / CACHE).is_dir():
            print(f"{home} keeps no decoded images")
            return
        shutil.rmtree(home / CACHE)
    print(f"deleted {home / CACHE}")


@fleet_app.command("try")
def try_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    sites: Annotated[
        int | None, Option(min=1, help="How many sites. [default: the experiment's clients]")
    ] = None,
    out: Annotated[Path | None, Option(help="Keep the run here.")] = None,
    data: arguments.DataFolder = None,
    quiet: arguments.Quiet = False,
    as_json: arguments.Json = False,
) -> None:
    """Run a whole federation here, and compare it with the simulation."""
    _check_installed()
    given = Experiment.read(experiment, overrides or [])
    from fedlens.fleet.terms import of_sites
    from fedlens.fleet.trial import run_sites, simulated
    from fedlens.runs.folder import check_free
    from fedlens.setup.data import OtherClients

    described = of_sites(given, sites)
    if described.privacy is not None:
        raise ValueError("sites draw noise of their own, and no bytes are the same: simulate it")
    if out is not None:
        check_free(out, overwrite=False, remedy="choose another --out")
    tell = (lambda _: None) if quiet else notify
    if sites is not None and given.clients.count not in (None, sites):
        whom = count_of(sites, "site")
        tell(f"{whom} in the place of the experiment's {count_of(given.clients.count, 'client')}")
    with tempfile.TemporaryDirectory(prefix="fedlens-fleet-", ignore_cleanup_errors=True) as place:
        folder, where = Path(place), out or Path(place) / "run"
        try:
            with shown(not quiet, in_rounds, "fleet", described.rounds) as watch:
                found = run_sites(described, folder, where, tell, data, watch)
        except OtherClients as error:
            raise OtherClients(error.what, error.found, "choose --sites") from error
        with shown(not quiet, in_rounds, "simulated", described.rounds) as watch:
            found |= simulated(described, folder, where, data, watch)
    if as_json:
        print_json(found | ({"run": str(out)} if out is not None else {}))
    else:
        same = "the same bytes" if found["identical"] else "NOT the same bytes"
        counts = f"{count_of(found['sites'], 'site')}, {count_of(found['rounds'], 'round')}"
        print(f"{counts}: {same} as the simulation")
        print(f"largest difference {found['largest_difference']:g}")
    raise SystemExit(0 if found["identical"] else 1)


@fleet_app.command("app")
def app_command(
    experiment: arguments.ExperimentFile,
    overrides: arguments.Overrides = None,
    folder: Annotated[Path, Option("--to", help="Where the app is put.")] = Path("app"),
    sites: Annotated[int, Option(min=1, help="How many sites it waits for.")] = 2,
    out: Annotated[str, Option(help="The run folder, on the server.")] = "runs/fleet",
) -> None:
    """Make a Flower app of an experiment, for `flwr run`."""
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another --to")
    given = Experiment.read(experiment, overrides or [])
    from fedlens.fleet.flower import write_app
    from fedlens.fleet.terms import check_possible, of_sites

    described = of_sites(given, sites)
    check_possible(described)
    if described.aggregation is not None and described.aggregation.secure:
        raise ValueError(
            "secure sums need the keys of sites, which a Flower app does not have: start the "
            "server by `fedlens fleet serve`"
        )
    write_app(folder, described.toml(), sites, str(Path(out).resolve()))
    print(f"{folder}: run it with: flwr run {argument(folder)}")


def _notify_of(name: str, line: str) -> None:
    notify(f"{name}: {line}")


def _check_home(home: Path) -> None:
    if not home.is_dir():
        raise ValueError(f"{home} is not a folder: give the --home of `fedlens fleet join`")


def _address(text: str, option: str, example: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{option} is {text!r}: give HOST:PORT, as {example}")
    return host.strip("[]"), int(port)
