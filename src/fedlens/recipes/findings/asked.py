"""Questions that no stored run answers yet: FedNS's network and step, and what CEADMM saves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from fedlens.config.experiment import Clients, Experiment, Named
from fedlens.recipes.fedns.setting import table1
from fedlens.recipes.findings.compared import Sum, ahead, pictured
from fedlens.recipes.findings.items import finding
from fedlens.recipes.ghaemi.algorithms import FORMS, OURS, SPLITS, experiment
from fedlens.recipes.hsu2020.setting import Method, Population, imbalanced
from fedlens.recipes.hsu2020.setting import experiment as of_hsu
from fedlens.recipes.page import curves
from fedlens.recipes.recipe import Recipe, Results, Scale, with_settings
from fedlens.report.blocks import Block, Curves

MOMENTA = (0.0, 0.5)
NETWORKS = {
    "valid padding": ["model.padding=valid"],
    "images of 0 to 1": ["normalise=none"],
    "Glorot": ["initialise=glorot"],
    "He": ["initialise=he"],
    "ReLU on logits": ["model.relu_on_logits=true"],
}


def fedns_network(scale: Scale) -> Recipe:
    """Which network, or which start of it, has the level of paper 3's Table 1?"""
    table, cells = table1(scale).cells, dict[str, Experiment]()
    shown = [cell for cell in table if cell.endswith(("FedAvg", "FedNS"))]
    variants: dict[str, Mapping[str, Experiment]] = {
        "as in Table 1": table,
        **{name: _changed(scale, of) for name, of in NETWORKS.items()},
        "one epoch of 25 a class": {cell: _one_epoch(one) for cell, one in table.items()},
    }
    if scale.name == "smoke":  # its model is linear
        variants = {name: variants[name] for name in ("as in Table 1", "He")}
    for name, of in variants.items():
        for cell in shown:
            for momentum in MOMENTA:
                local = replace(of[cell].local, momentum=momentum)
                cells[f"{cell}, {name}, momentum {momentum:g}"] = replace(of[cell], local=local)
    base, *others = variants
    sums = {
        f"{cell}, momentum {m:g}: {name} − {base}": ahead(
            *(f"{cell}, {one}, momentum {m:g}" for one in (name, base))
        )
        for name in others
        for cell in shown
        if cell.endswith("FedAvg")
        for m in MOMENTA
    }
    return _fedns(scale, "fedns-network", cells, sums, 3)


def _changed(scale: Scale, settings: list[str]) -> Mapping[str, Experiment]:
    is_of_model = any(setting.startswith("model.") for setting in settings)
    if scale.name != "paper" and is_of_model:  # a light model takes the place of the paper's
        return table1(scale).cells
    return with_settings(table1(scale), settings).cells


def _one_epoch(one: Experiment) -> Experiment:
    """As many steps on images that are all different: one pass over five times as many."""
    given = one.clients.partition.options
    options = {name: 5 * given[name] for name in ("per_class", "high") if given.get(name)}
    options |= {"low": 1} if given.get("low") else {}
    clients = replace(one.clients, partition=Named(one.clients.partition.name, options))
    return replace(one, clients=clients, local=replace(one.local, epochs=1))


SERVER_STEPS = (1.05, 1.1, 1.2, 1.3)


def server_step(scale: Scale) -> Recipe:
    """Is FedNS a larger step of the server?"""
    table, cells, sums = table1(scale).cells, dict[str, Experiment](), dict[str, Sum]()
    for split in SPLITS:
        for momentum in (0.0, 0.9):
            plain, theirs = (table[f"{split}, {name}"] for name in ("FedAvg", "FedNS"))
            form = f"{split}, momentum {momentum:g}"
            found = {f"{form}, FedAvg": plain, f"{form}, FedNS": theirs}
            for step in scale.pick(SERVER_STEPS[:1], SERVER_STEPS, SERVER_STEPS):
                longer = replace(plain, server=replace(plain.server, lr=step))
                found[f"{form}, FedAvg, step {step:g}"] = longer
                sums[f"{form}: FedNS − FedAvg with step {step:g}"] = ahead(
                    f"{form}, FedNS", f"{form}, FedAvg, step {step:g}"
                )
            sums[f"{form}: FedNS − FedAvg"] = ahead(f"{form}, FedNS", f"{form}, FedAvg")
            for cell, one in found.items():
                cells[cell] = replace(one, local=replace(one.local, momentum=momentum))
    return _fedns(scale, "server-step", cells, sums, 10)


def _fedns(
    scale: Scale,
    item: str,
    cells: Mapping[str, Experiment],
    sums: Mapping[str, Sum],
    seeds: int,
) -> Recipe:
    def shown(results: Results) -> list[Block]:
        return [pictured(results, sums)]

    return finding(scale, item, cells, sums, shown, dataset="fashion-mnist", seeds=seeds)


ITERATIONS = (1, 5, 10)


def communication(scale: Scale) -> Recipe:
    """Do CEADMM and CELIADMM save communication?"""
    lr, cells, sums = FORMS[OURS]["lr"], dict[str, Experiment](), dict[str, Sum]()
    step: dict[str, Any] = {"momentum": 0.0, "epochs": 1}
    for split in SPLITS:
        for k0 in scale.pick(ITERATIONS[:2], ITERATIONS, ITERATIONS):
            passes: dict[str, Any] = {**FORMS[OURS], "epochs": k0}
            cells[f"{split}, FedAvg, {k0} epochs"] = experiment(scale, split, **passes)
            for name, how in (
                ("CEADMM", {**FORMS[OURS], "epochs": 1}),
                ("CELIADMM", {**FORMS[OURS], **step}),
            ):
                rule = {"gamma": lr} if name == "CELIADMM" else {}
                algorithm = Named(name.lower(), {"k0": k0, **rule})
                cells[f"{split}, {name}, k0 {k0}"] = experiment(scale, split, algorithm, **how)
            sums[f"{split}: CEADMM with k0 {k0} − FedAvg with {k0} epochs"] = ahead(
                f"{split}, CEADMM, k0 {k0}", f"{split}, FedAvg, {k0} epochs"
            )
        once = Named("liadmm", {"gamma": lr})
        cells[f"{split}, LIADMM"] = experiment(scale, split, once, **FORMS[OURS] | step)

    def shown(results: Results) -> list[Block]:
        return [_by_bytes(results, split) for split in SPLITS]

    return finding(scale, "communication", cells, sums, shown, dataset="fashion-mnist", seeds=3)


def _by_bytes(results: Results, split: str) -> Curves:
    """Curves over what clients have sent; all runs of a cell send as much in a round."""
    lines = {
        cell: cell.removeprefix(f"{split}, ") for cell in results.runs if split == _split(cell)
    }
    drawn = curves(results, lines, title=f"{split} clients: accuracy by what is sent")
    sent = {
        name: [*accumulate(record["bytes_up"] / 1e6 for record in results.runs[cell][0].rounds)]
        for cell, name in lines.items()
    }
    by_bytes = [
        replace(line, x=[sent[line.name][int(round) - 1] for round in line.x])
        for line in drawn.lines
    ]
    return replace(drawn, lines=by_bytes, x_label="megabytes sent by clients")


def _split(cell: str) -> str:
    return cell.partition(", ")[0]


POWERS = {"no FedIR": None, "FedIR, power 0.5": 0.5, "FedIR": 1.0}
ALPHA, USERS = 0.0145, 200  # a mean EMD of 1.85


def importance(scale: Scale) -> Recipe:
    """Does FedIR gain where clients are as unalike as the paper's users?"""
    count, goals = scale.pick((20, (10,)), (50, (10,)), (USERS, (10, 100)))
    plain = Experiment(
        Named(scale.dataset("cifar100")),
        scale.pick(Named("linear"), Named("simple-cnn"), Named("hsu-cnn")),
        rounds=1,
        clients=Clients(count=count, partition=imbalanced(ALPHA if scale.name == "paper" else 0.3)),
    )
    users = Population("iNaturalist-User-120k", "unalike CIFAR-100", plain)
    cells, sums = dict[str, Experiment](), dict[str, Sum]()
    for base, goal in itertools.product(("FedAvg", "FedAvgM"), goals):
        form = f"{base}, K {goal}"
        for name, power in POWERS.items():
            one = of_hsu(scale, users, Method(base, vc=True, ir=power is not None, goal=goal))
            weighed = Named("fedir", {"power": power or 1.0})
            algorithm = tuple(weighed if a.name == "fedir" else a for a in one.algorithm)
            cells[f"{form}, {name}"] = replace(one, algorithm=algorithm)
            if power is not None:
                sums[f"{form}: {name} − no FedIR"] = ahead(f"{form}, {name}", f"{form}, no FedIR")
    return finding(scale, "importance", cells, sums, dataset="cifar100", seeds=3)
