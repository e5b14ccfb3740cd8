"""`run` and `resume`: an experiment from its description to its result.

Before it begins, a line warns of what is not tested, has no effect, or is done twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens.algorithm import same
from fedlens.config.consent import approve
from fedlens.config.experiment import Experiment, expect_experiment
from fedlens.config.names import EngineName, own_names
from fedlens.core.federation import Holdings
from fedlens.core.trees import tensors_in
from fedlens.data import statistics
from fedlens.data.partitions import natural_column
from fedlens.evaluation.evaluate import Twin
from fedlens.evaluation.metrics import chosen, try_out
from fedlens.rounds import State, begin
from fedlens.rounds.client_memory import Room
from fedlens.runs.folder import Checkpoint, RunFolder, check_free, readable_json
from fedlens.runs.loop import ActiveRun, room_of_clients, run_to_end
from fedlens.runs.manifest import (
    as_it_began,
    check_settings,
    check_there,
    check_unchanged,
    going_on,
    manifest,
)
from fedlens.runs.progress import Watch, all_of, decoding, expect_watch, in_rounds, shown
from fedlens.runs.result import Result
from fedlens.runs.spending import Spending
from fedlens.runs.twin import by_client, check_clients_are_tested, trained
from fedlens.setup import Setup, build
from fedlens.setup.algorithm import make_algorithm
from fedlens.storage import free_memory, run_files
from fedlens.storage.files import write_atomically
from fedlens.storage.words import count_of

logger = logging.getLogger(__name__)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    data: str | Path | None = None,
    watch: Watch | None = None,
    progress: bool | None = None,
) -> Result:
    """Run an experiment, and write its folder if `out` names one.

    `data` is the folder where named data sets are searched first. `watch` is called with each
    record and, before the first, with the number of images decoded and with each pass of the
    centralised twin, if one is trained (see `progress.OUTSIDE`). `progress` shows progress; by
    default in a terminal and in a notebook.
    """
    expect_experiment(experiment, "run")
    expect_watch(watch, "run")
    if out is not None:
        check_free(Path(out), overwrite)
    name = Path(out).name if out is not None else experiment.dataset.name
    source = Path(data) if data is not None else None
    with shown(progress, in_rounds, name, experiment.rounds) as bar:
        both = all_of(bar, watch)
        setup = build(experiment, source, watch=decoding(both))
        say_beforehand([setup], out is not None)
        (result,) = run_to_end([start(experiment, setup, out, overwrite=overwrite, watch=both)])
    return result


def resume(
    path: str | Path,
    *,
    rounds: int | None = None,
    data: str | Path | None = None,
    watch: Watch | None = None,
    experiment: Experiment | None = None,
    engine: EngineName | None = None,
    progress: bool | None = None,
    trust_code: bool = False,
) -> Result:
    """Resume a run where it stopped, to the result it would have had.

    `rounds` changes the number of rounds: more than the run was started with, or fewer to end it
    soon. If data were moved, set their path in the run's experiment.toml. `experiment` is needed
    only if the run's data or model were given from Python. `engine` is for another machine: a run
    started on `ray` may be resumed on `processes`, and the reverse. `watch` and `progress` are as
    in `run`, and `trust_code` is as in `Experiment.read`.
    """
    expect_watch(watch, "resume")
    run_files.check_run(Path(path), [run_files.EXPERIMENT, run_files.MANIFEST])
    folder = RunFolder.open(Path(path))
    try:
        before = run_files.read_manifest(folder.path)
        file = folder.path / run_files.EXPERIMENT
        described = experiment or Experiment.read(file, trust_code=trust_code)
        described = described if rounds is None else replace(described, rounds=rounds)
        check_settings(folder.path, described, before)
        done = run_files.last_saved(folder.path) or 0
        check_there(folder.path, described)
        begun = as_begun(described, before)
        begun = replace(begun, engine=_going_on(begun.engine, engine))
        with shown(progress, in_rounds, folder.path.name, described.rounds, done) as bar:
            both = all_of(bar, watch)
            source = Path(data) if data is not None else None
            active = reopen(folder, build(begun, source, watch=decoding(both)), both)
            if described.rounds != before.get("settings", {}).get("rounds", described.rounds):
                folder.write(run_files.EXPERIMENT, described.toml())
            (result,) = run_to_end([active])
    finally:
        folder.close()
    return result


def _going_on(begun: EngineName, wanted: EngineName | None) -> EngineName:
    """The engine of a resumed run: its own, or one with byte-identical results."""
    if wanted is None or wanted == begun:
        return begun
    if {begun, wanted} == {"processes", "ray"}:
        return wanted
    raise ValueError(
        f"engine is {wanted!r}, but the run began on {begun!r}, and would not come to the same "
        "result: leave the engine out"
    )


def as_begun(experiment: Experiment, manifest: dict[str, Any]) -> Experiment:
    """The experiment with the engine and precision that the run began with, in place of `auto`."""
    if manifest.get("engine") == "fleet":
        raise ValueError("it ran on a fleet: go on with `fedlens fleet serve` and --resume")
    chosen = {key: manifest[key] for key in ("engine", "precision") if key in manifest}
    return replace(experiment, **chosen)


def start(
    experiment: Experiment,
    setup: Setup,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> ActiveRun:
    """A new run; its folder is created if `out` is given."""
    check_asked(setup)
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    folder = new_run(experiment, setup, Path(out), overwrite) if out is not None else None
    saved = Checkpoint(state)
    return ActiveRun(setup, saved, folder, twin=twin, watch=watch, by_client=by_client)


def check_asked(setup: Setup) -> None:
    """Raise before training if something that is asked for cannot be measured, or spent."""
    check_clients_are_tested(setup)
    if setup.experiment.privacy is not None:
        Spending(setup).check()
    metrics = chosen(setup.experiment)
    if metrics and setup.parts:
        network, some = setup.network, next(iter(setup.parts.values())).images[:1].cpu()
        logits = network.predict(network.params, network.buffers, some)
        dataset = setup.dataset
        try_out(metrics, logits.to(setup.device), dataset.num_classes, dataset.multi_label)


def new_run(experiment: Experiment, setup: Setup, out: Path, overwrite: bool) -> RunFolder:
    """Create the folder of a new run, and approve its code: the user runs it."""
    approve(own_names(experiment.plain()))
    files = {
        run_files.EXPERIMENT: experiment.toml(),
        run_files.MANIFEST: readable_json(manifest(setup) | {"settings": experiment.plain()}),
        run_files.PARTITION: readable_json(_partition(setup)),
        run_files.ROUNDS: "",
    }
    return RunFolder.create(out, overwrite, files)


def reopen(folder: RunFolder, setup: Setup, watch: Watch | None = None) -> ActiveRun:
    """A run at its last checkpoint; `setup` is built from the run's own experiment."""
    path, before = folder.path, run_files.read_manifest(folder.path)
    setup = as_it_began(setup, before, path)
    check_unchanged(path, setup, before)
    twin = _twin(setup, watch)
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    saved = folder.load_checkpoint(setup.device)
    if saved is None:
        if run_files.read_status(path) in run_files.OVER:
            raise ValueError(f"{path} is over and kept no checkpoint: run it again from the start")
        logger.warning("%s has no checkpoint: its rounds are run from the first one on", path)
        saved = Checkpoint(state)
    if _shapes(saved.state) != _shapes(state):
        raise ValueError(f"{path} was run with another model: put the old one back")
    done, rounds = saved.state.round, setup.experiment.rounds
    if done > rounds:
        raise ValueError(f"{path} has {count_of(done, 'round')} already: {rounds} is too few")
    folder.keep(saved)
    active = ActiveRun(setup, saved, folder, twin=twin, watch=watch, by_client=by_client)
    if active.has_rounds_to_start and (now := going_on(before, setup, done, path)) != before:
        folder.write_json(run_files.MANIFEST, now)
    return active


def _twin(setup: Setup, watch: Watch | None) -> Twin | None:
    return trained(setup, watch) if setup.experiment.evaluate.twin else None


def _partition(setup: Setup) -> dict[str, Any]:
    federation = setup.federation
    held, num_clients = federation.described(), federation.num_clients
    labels = federation.labels if setup.knows_labels else None
    counts = statistics.counts(held, labels, federation.num_classes, num_clients)
    return counts | ({"emd": setup.emd} if setup.knows_labels else {})


def write_partition(path: Path, setup: Setup) -> None:
    """Write what clients hold now, where others have come to a run."""
    digest = setup.federation.described().digest()
    known = run_files.read_manifest(path) | {"partition": digest}
    for name, content in ((run_files.PARTITION, _partition(setup)), (run_files.MANIFEST, known)):
        write_atomically(path / name, readable_json(content).encode())


def _shapes(state: State) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (state.params | state.buffers).items()}


MODELS = 4  # as large as the model is what a client remembers, at the most
MOST_NAMED = 5  # clients or classes in one line


def say_beforehand(setups: Iterable[Setup], has_folder: bool = True) -> None:
    """Log the warnings of all runs, one line each and equal lines once."""
    about = (
        partial(_remembered, has_folder=has_folder),
        _unmeasured,
        _untested,
        _tested_alone,
        _untested_classes,
        lambda setup: epochs_without_effect(setup.experiment),
        _softmax_twice,
    )
    lines = [say(setup) for setup in setups for say in about]
    for line in dict.fromkeys(filter(None, lines)):
        logger.warning("%s", line)


def _remembered(setup: Setup, has_folder: bool) -> str:
    """A warning if what clients come to remember finds no room in memory."""
    experiment, network, room = setup.experiment, setup.network, room_of_clients()
    many = min(setup.federation.num_clients, experiment.rounds * experiment.clients.cohort)
    model = sum(t.nbytes for t in (*network.params.values(), *network.buffers.values()))
    if setup.engine.reporting is not None or many * MODELS * model <= room:
        return ""
    state = begin(setup.network, setup.program, setup.federation, setup.device)
    first = setup.program.memory(state.params, state.buffers, state.told)
    each = sum(t.nbytes for t in tensors_in(first))
    most = room + (Room().on(setup.device).gpu or 0)
    if many * each <= most:
        return ""
    words = free_memory.in_words
    rest, where = words(many * each - most), "to files of the run's folder"
    if not has_folder:
        where = f"{where}, if you give it one"
    return (
        f"{count_of(many, 'client')} will remember {words(each)} each, {words(many * each)} in "
        f"all: {words(most)} have room in memory, and {rest} go {where}"
    )


def _unmeasured(setup: Setup) -> str:
    """A warning if clients have models of their own and nothing to test them on."""
    wanted = setup.is_personal and setup.experiment.evaluate.baselines
    if not wanted or setup.client_tests is not None or setup.engine.reporting is not None:
        return ""
    names = " + ".join(named.name for named in setup.experiment.algorithm)
    why = "clients have no images to test it on; set clients.holdout, say to 0.25"
    if setup.program.algorithm.covered:
        why = "what their own are worth would be told without noise"
    return f"{names} gives each client its own model, and only the server's is measured: {why}"


def _untested(setup: Setup) -> str:
    if setup.client_tests is None:
        return ""
    part, held = setup.client_tests
    count, total = int((held.sizes == 0).sum()), len(held)
    if not count:
        return ""
    why, share = "", setup.experiment.clients.holdout
    if part == "train":
        why = f" (clients.holdout = {share:g} takes none of fewer than {math.ceil(1 / share)})"
    have, them = ("has", "its own") if count == 1 else ("have", "their own")
    return (
        f"{count:,} of {total:,} clients {have} no images of {them} to be tested on{why}: "
        f"accuracies by client leave {'it' if count == 1 else 'them'} out"
    )


def _tested_alone(setup: Setup) -> str:
    """A warning if test images have owners that do not train: accuracies by client omit them."""
    if setup.client_tests is None or setup.client_tests.part != "test":
        return ""
    held, test = setup.client_tests.holdings, setup.dataset.test
    count = len(test) - len(held.index)
    if not count:
        return ""
    named = setup.experiment.clients.partition
    column = natural_column(named.name, named.options)
    assert column is not None, "else no test examples are the clients' own"
    names = sorted({str(name) for name in test.columns[column]} - set(held.names or ()))
    return (
        f"{count:,} of {len(test):,} test images belong to nobody who trains "
        f"({column} {_first(names)}): "
        "they count in accuracy, and accuracies by client leave them out"
    )


def _untested_classes(setup: Setup) -> str:
    """A warning if classes of the training set have no test images, so are not measured."""
    if "test" not in setup.parts:
        return ""
    dataset = setup.dataset  # its labels stay where they were loaded, not on the engine's device
    count = dataset.num_classes
    trained, tested = (
        everyone.label_counts(part.wanted(everyone.index, count), count)[0] > 0
        for part in (dataset.train, dataset.test)
        for everyone in [Holdings.of([torch.arange(len(part))])]
    )
    names = [dataset.classes[k] for k in (trained & ~tested).nonzero().flatten().tolist()]
    if not names:
        return ""
    have = "has" if len(names) == 1 else "have"
    return (
        f"{len(names):,} of {count:,} classes {have} no test images "
        f"({_first(names)}): accuracy and macro F1 say nothing of how the model does there"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_NAMED], *["..."] * (len(names) > MOST_NAMED)])


def epochs_without_effect(experiment: Experiment) -> str:
    """A warning if local.epochs does not change what the algorithm draws."""
    local = experiment.local
    if local.epochs == 1 or local.steps is not None:
        return ""
    plain = replace(experiment, local=replace(local, epochs=1))
    try:
        if not same(make_algorithm(plain).draw, make_algorithm(experiment).draw):
            return ""
    except ValueError:  # the algorithm refuses one epoch
        return ""
    names = " + ".join(named.name for named in experiment.algorithm)
    return f"local.epochs is {local.epochs}, which has no effect: {names} has its own local work"


def _softmax_twice(setup: Setup) -> str:
    """A warning if the model ends in a softmax, or a sigmoid, and the loss expects logits."""
    *_, last = setup.network.module.modules()
    loss = setup.experiment.loss.name
    kind = {"cross_entropy": nn.Softmax, "binary_cross_entropy": nn.Sigmoid}.get(loss)
    if kind is None or not isinstance(last, kind):
        return ""
    return (
        f"the model ends in {kind.__name__}, and the loss {loss} has one of its own, which slows "
        "learning and may end it: leave out the model's"
    )
