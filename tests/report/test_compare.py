from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import fedlens as fl
from fedlens.report.blocks import Curves
from fedlens.report.compare import (
    _differences,
    _picture_of_differences,
    _pictures,
    _results,
    compare,
)
from fedlens.report.pairs import Pair, Score, pairs, ranks, tasks
from fedlens.report.tables import table
from fedlens.runs.records import read_all

Make = Callable[..., Path]

# typer 0.20 asks click for names that click is about to drop.
COMMAND_LINE = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")


def told(folders: list[Path], by: tuple[str, ...] = ()) -> list[Pair]:
    """The pairs of runs, without a page."""
    runs = read_all(folders)
    return pairs(tasks(runs, by), Score.of(runs, "test", None))


def sheet(page: Path, name: str) -> list[dict[str, str]]:
    with (page.parent / "figures" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_difference_that_is_no_chance_is_said_with_its_numbers(variants):
    found = compare(variants({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]}))
    (pair,) = found.pairs
    assert (pair.one, pair.other, pair.seeds) == ("fedavg", "fedprox", ("0", "1", "2"))
    assert pair.difference is not None
    assert pair.difference.mean == pytest.approx(-0.095 / 3)
    # t = 19 with 2 degrees of freedom
    assert pair.p == pytest.approx(0.002759, abs=1e-6)
    assert found.verdicts == [
        "fedprox is better than fedavg, by 3.17 points of final test accuracy "
        "(95% confidence interval 2.45 to 3.88 points, p = 0.003, n = 3)."
    ]
    assert found.page.name == "report.html" and found.page.parent.name == "comparison"
    rows = sheet(found.page, "results")
    assert [row["variant"] for row in rows] == ["fedavg", "fedprox"]
    assert rows[1]["final test accuracy"] == "74.2% ± 1.0%" and rows[1]["seeds"] == "3"


def test_runs_are_compared_over_their_last_evaluations(recorded, quick_pages):
    """Where the last alone would say that one is better, and its rounds before say nothing."""
    folders = []
    for seed in range(3):
        for algorithm, last in (("fedavg", 0.5), ("fedprox", 0.6 + seed / 1000)):
            values = [0.5 + 0.1 * ((n + seed) % 3 - 1) * (algorithm != "fedavg") for n in range(9)]
            lines = [{"round": n, "test_accuracy": x} for n, x in enumerate([0.9, *values, last])]
            folders.append(recorded(f"{algorithm}-{seed}", lines))
            (folders[-1] / "experiment.toml").write_text(
                f'dataset = "digits"\nmodel = "mlp"\nrounds = 10\nseed = {seed}\n'
                f'[[algorithm]]\nname = "{algorithm}"\n'
            )
    found, ended = compare(folders), compare(folders, last=1)
    (pair,), (at_end,) = found.pairs, ended.pairs
    assert at_end.is_sure and at_end.measure == "final test accuracy"
    assert not pair.is_sure and pair.measure == "mean test accuracy of the last 2 evaluations"
    assert pair.measure in found.verdicts[0]
    with pytest.raises(ValueError, match="last is 11: choose 1 to 10"):
        compare(folders, last=11)


@pytest.mark.parametrize(("evaluations", "last"), [(4, 1), (15, 3), (200, 10)])
def test_the_last_evaluations_are_a_fifth_and_ten_at_most(recorded, evaluations, last):
    lines = [{"round": n, "test_accuracy": 0.5} for n in range(evaluations + 1)]
    assert Score.of(read_all([recorded("a", lines)]), "test", None).last == last


def test_a_difference_that_may_be_chance_is_called_that(variants):
    (pair,) = told(variants({"fedavg": [0.7, 0.6, 0.8], "fedprox": [0.6, 0.8, 0.71]}))
    said = pair.words()
    assert said.startswith("It cannot be said that fedprox is better than fedavg")
    assert "may be chance" in said and "n = 3" in said


def test_one_pair_proves_nothing(variants):
    (pair,) = told(variants({"fedavg": [0.7], "fedprox": [0.8]}))
    assert pair.words() == (
        "fedprox came out 10.00 points of final test accuracy above fedavg with seed 0. One pair "
        "of runs may differ by chance (n = 1): run both with more seeds."
    )
    (pair,) = told(variants({"fedavg": [0.7], "fedprox": [0.7]}, "equal"))
    assert "came out with the same final test accuracy as" in pair.words()


def test_runs_without_a_common_seed_are_not_paired(variants):
    folders = variants({"fedavg": [0.7, 0.7], "fedprox": [0.8, 0.8, 0.8]})
    (pair,) = told([*folders[:2], folders[4]])
    assert pair.difference is None and pair.p is None
    assert "share no seed, so their runs are not paired" in pair.words()
    assert "run both with the same seeds" in pair.words()


def test_differences_without_spread_are_not_tested(variants):
    (pair,) = told(variants({"fedavg": [0.5, 0.25], "fedprox": [0.75, 0.5]}))
    assert "always 25.00 points of final test accuracy above fedavg (n = 2)" in pair.words()


def test_the_price_of_a_target_is_told(variants):
    folders = variants({"fedavg": [0.5, 0.9], "fedprox": [0.8, 0.86]})
    first, second = sheet(compare(folders, target=0.42).page, "what_the_target_costs")
    assert (first["reached it"], first["rounds"], first["MB"]) == (
        "2 of 2",
        "1.5 ± 0.7",
        "3.0 ± 1.4",
    )
    assert (second["rounds"], second["target"]) == ("1.5 ± 0.7", "42.0%")


def test_without_a_target_it_is_nine_tenths_of_the_best(variants):
    folders = variants({"fedavg": [0.5, 0.9], "fedprox": [0.8, 0.86]})
    first, second = sheet(compare(folders).page, "what_the_target_costs")
    assert first["target"] == "75.0%"
    assert (first["reached it"], second["reached it"]) == ("1 of 2", "2 of 2")


def test_tasks_are_compared_apart_and_variants_ranked_over_them(variants):
    better = {"fedavg": [0.5, 0.52], "fedprox": [0.6, 0.63]}
    worse = {"fedavg": [0.7, 0.72], "fedprox": [0.65, 0.66]}
    found = compare([*variants(better, "digits"), *variants(worse, "clothes")])
    assert [task.name for task in found.tasks] == ["digits", "clothes"]
    assert len(found.pairs) == 2 and found.verdicts[0].startswith("On digits: ")
    rows = sheet(found.page, "ranks_over_tasks")
    assert [row["fedprox"] for row in rows] == ["1", "2", "1.50"]
    raw = [pair.difference.p for pair in found.pairs if pair.difference]
    assert max(pair.p or 0 for pair in found.pairs) == pytest.approx(
        max(max(p or 0 for p in raw), 2 * min(p or 0 for p in raw))
    )


def test_variants_may_be_told_apart_by_any_setting(variants):
    folders = [
        *variants({"fedavg": [0.5, 0.51]}, lr=0.1),
        *variants({"fedavg": [0.6, 0.63]}, lr=0.2),
    ]
    for by in ((), ("local.lr",), ("local",)):
        (pair,) = told(folders, by)
        assert (pair.one, pair.other) == ("fedavg, lr 0.1", "fedavg, lr 0.2")
    with pytest.raises(ValueError, match=r"local\.lr"):
        compare(folders, by="model")


def test_algorithms_that_were_tuned_apart_are_compared_all_the_same(variants):
    folders = [
        *variants({"fedavg": [0.5, 0.51]}, lr=0.1),
        *variants({"fedprox": [0.6, 0.6]}, lr=0.2),
    ]
    (pair,) = told(folders)
    assert (pair.one, pair.other) == ("fedavg, lr 0.1", "fedprox, lr 0.2")


def test_runs_that_did_not_finish_are_left_out_and_named(variants, run_folder):
    folders = variants({"fedavg": [0.5, 0.6], "fedprox": [0.6, 0.7]})
    cut = run_folder("digits/cut", status="diverged")
    page = compare([*folders, cut]).page.read_text("utf-8")
    assert "Left out, since they did not finish: cut (diverged)." in page
    with pytest.raises(ValueError, match="finish: cut"):
        compare([*folders[:2], cut])
    with pytest.raises(ValueError, match="div"):
        compare([cut])


@COMMAND_LINE
@pytest.mark.usefixtures("quick_pages")
def test_runs_that_are_not_equally_long_are_told_of(run_folder, fedlens):
    rounds = {"a": (40, 40), "b": (20, 30)}
    runs = {
        name: [run_folder(f"{name}{seed}", rounds=n, planned=40, seed=seed, algorithm=algorithm)
               for seed, n in enumerate(some)]
        for (name, some), algorithm in zip(rounds.items(), ("fedavg", "fedprox"), strict=True)
    }  # fmt: skip
    line = "Runs differ in rounds, and each is compared at its own end: a 40, b 20 to 30."
    found = compare(runs)
    assert found.unequal == line and line in found.page.read_text("utf-8")
    named = [f"{name}={folder}" for name, some in runs.items() for folder in some]
    assert fedlens("compare", *named, "--quiet").err == f"fedlens: {line}\n"
    alike = {"a": runs["a"][:1], "b": [run_folder("c", seed=0, algorithm="fedprox")]}
    assert compare(alike).unequal == ""


def test_what_cannot_be_compared_is_refused(variants, run_folder):
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(variants({"fedavg": [0.5, 0.6]}))
    with pytest.raises(ValueError, match="no run finished"):
        compare([run_folder("blind", every=0)])
    twice = [run_folder("a"), run_folder("b"), run_folder("c", algorithm="fedprox")]
    with pytest.raises(ValueError, match="twice"):
        compare(twice)


def test_ranks_of_equals_are_shared():
    assert ranks([0.5, 0.9, 0.5, 0.1]) == [2.5, 1, 2.5, 4]


def test_real_runs_are_paired_by_their_seeds(tmp_path):
    folders = []
    for algorithm in ("fedavg", "fedavgm"):
        for seed in (3, 4):
            experiment = fl.Experiment(
                dataset=fl.Named("fashion-mnist-mini"),
                model=fl.Named("linear"),
                rounds=1,
                seed=seed,
                clients=fl.Clients(count=20, per_round=2),
                algorithm=(fl.Named(algorithm),),
            )
            folders.append(tmp_path / f"{algorithm}-{seed}")
            fl.run(experiment, folders[-1])
    found = fl.compare(folders, out=tmp_path / "page")
    assert found.page == tmp_path / "page" / "report.html"
    (pair,) = found.pairs
    # The first step of FedAvgM is that of FedAvg: with the same seeds nothing differs.
    assert pair.seeds == ("3", "4") and pair.difference and pair.difference.mean == 0
    assert found.verdicts == [
        "fedavg was always equal to fedavgm (n = 2): there is no spread to test against."
    ]


@COMMAND_LINE
def test_the_command_says_what_it_found_and_where(variants, run_folder, tmp_path, fedlens):
    folders = variants({"fedavg": [0.7, 0.71], "fedprox": [0.8, 0.82]})
    done = fedlens("compare", *folders, "--target", 0.5, "--out", tmp_path / "page")
    assert done.status == 0 and done.err == ""
    verdict, page = done.out.splitlines()
    assert verdict.startswith("fedprox is better than fedavg, by 10.50") and "n = 2" in verdict
    assert page == f"report: {tmp_path / 'page' / 'report.html'}"
    done = fedlens("compare", *folders, "--last", 2, "--out", tmp_path / "page")
    assert "mean test accuracy of the last 2 evaluations" in done.out
    cut = run_folder("digits/cut", status="interrupted")
    done = fedlens("compare", *folders, cut, "--out", tmp_path / "page")
    assert done.err == "fedlens: left out: runs that did not finish: cut (interrupted)\n"


@COMMAND_LINE
def test_the_command_prints_json_if_asked(variants, fedlens):
    folders = variants({"fedavg": [0.7, 0.71], "fedprox": [0.8, 0.82]})
    (pair,) = json.loads(fedlens("compare", *folders, "--json").out)
    assert pair["difference"]["n"] == 2 and pair["one"] == "fedavg"


@COMMAND_LINE
def test_the_command_refuses_in_one_line_what_cannot_be_compared(variants, fedlens):
    done = fedlens("compare", *variants({"fedavg": [0.7, 0.71]}))
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "nothing to compare" in done.err


@COMMAND_LINE
@pytest.mark.usefixtures("quick_pages")
def test_experiment_files_are_run_with_the_same_seeds_and_compared(tmp_path, fedlens):
    work = 'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 2\nengine = "sequential"\n'
    clients = "clients = { count = 20, per_round = 2 }\n"
    files = [tmp_path / "plain.toml", tmp_path / "heavy.toml"]
    for file, lr in zip(files, (0.1, 0.2), strict=True):
        file.write_text(f"{work}{clients}local = {{ lr = {lr} }}\n")
    words = ("compare", *files, "--seeds", 2, "--out", tmp_path / "out")
    done = fedlens(*words)
    assert done.status == 0 and "round 8/8" in done.err, done.err
    assert "n = 2" in done.out and (tmp_path / "out" / "report.html").is_file()
    runs = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert runs == ["figures", "heavy-0", "heavy-1", "plain-0", "plain-1"]
    longer = fedlens(*words[:3], "rounds=3", "local.lr=0.3", *words[3:5], "--out", tmp_path / "3")
    assert longer.status == 0 and "round 12/12" in longer.err, longer.err
    for name in ("plain-0", "heavy-1"):
        experiment = fl.Experiment.read(tmp_path / "3" / name / "experiment.toml")
        assert (experiment.rounds, experiment.local.lr) == (3, 0.3)
    written = (tmp_path / "out" / "plain-0" / "rounds.jsonl").stat().st_mtime_ns
    assert fedlens(*words, "-q").out == done.out  # what is finished is kept
    assert (tmp_path / "out" / "plain-0" / "rounds.jsonl").stat().st_mtime_ns == written


@COMMAND_LINE
def test_mistakes_in_what_is_to_be_compared_are_told_before_anything_runs(
    tmp_path, run_folder, fedlens
):
    file, folder = tmp_path / "a.toml", run_folder("a")
    file.write_text("")
    for words, told in (
        ((file,), "name two experiment files or more"),
        ((file, folder), "name experiment files or run folders, not both"),
        ((folder, "--seeds", 3), "--seeds 3 is for experiment files"),
        ((file, folder, "--target", 80), "--target is 80: choose a share above 0, up to 1"),
        ((folder, "rounds=3"), "rounds=3 is for experiment files"),
        ((file, "ronds=3"), "did you mean 'rounds'?"),
        ((file, "seed=3"), "choose --seeds"),
    ):
        done = fedlens("compare", *words)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert told in done.err


def test_accuracies_on_different_test_images_are_not_compared(variants):
    folders = variants({"fedavg": [0.7, 0.71], "fedprox": [0.8, 0.82]})
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["test_data"] = "other" if "fedprox" in folder.name else "one"
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="different images"):
        compare(folders)


def test_only_what_can_be_said_to_be_better_stands_out(variants):
    def strong(finals: dict[str, list[float]]) -> frozenset[tuple[int, int]]:
        runs = read_all(variants(finals))
        found, score = tasks(runs), Score.of(runs, "test", None)
        return _results(found, pairs(found, score), score).strong

    assert strong({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]}) == {(1, 1)}
    assert strong({"median": [0.7, 0.6, 0.8], "krum": [0.6, 0.8, 0.71]}) == frozenset()


def test_nothing_stands_out_where_it_was_not_compared(variants):
    """A variant alone on its task; and one whose mean is higher by a seed that others lack."""
    both = variants({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]})
    alone = variants({"fedavg": [0.70, 0.71, 0.72]}, dataset="letters")
    lucky = variants({"fedavg": [0.70, 0.71, 0.72, 0.99], "fedprox": [0.73, 0.745, 0.75]}, "faces")
    for folders, expected in (([*both, *alone], {(0, 2)}), (lucky, set())):
        runs = read_all(folders)
        found, score = tasks(runs), Score.of(runs, "test", None)
        assert _results(found, pairs(found, score), score).strong == expected


@COMMAND_LINE
def test_a_folder_of_runs_stands_for_its_runs(variants, fedlens):
    folders = variants({"fedavg": [0.7, 0.71], "fedprox": [0.8, 0.82]})
    whole = folders[0].parent
    named = fedlens("compare", *folders).out
    assert fedlens("compare", whole).out == named
    assert fl.compare(str(whole)).verdicts == fl.compare(folders).verdicts
    assert fedlens("report", whole).status == 0
    inside = sorted(whole.iterdir())  # with figures/, comparison/ and report.html
    assert len(inside) == len(folders) + 3
    assert fedlens("compare", *inside).out == named
    assert fedlens("report", *inside).status == 0


def test_a_table_that_is_too_wide_goes_on_below():
    header, row = ["run", *(f"column {k}" for k in range(12))], ["x", *"abcdefghijkl"]
    wide = table(header, [row], 80)
    assert max(map(len, wide.splitlines())) <= 80
    first, second = wide.split("\n\n")
    assert first.split()[0] == second.split()[0] == "run"
    assert (first + second).count("column") == 12
    assert len(table(header, [row]).splitlines()) == 3  # a pipe takes what comes
    assert table(["long" * 30, "b"], [["x", "y"]], 80).count("b") == 1


def test_columns_stand_below_each_other_in_any_script():
    """A Chinese character takes two columns of a terminal; the dots of an a\u0308 take none."""
    told = table(["site", "images"], [["北京", "1"], ["Sa\u0308lle", "2"], ["north", "3"]])
    assert told.splitlines()[2:] == ["北京   1", "Sa\u0308lle  2", "north  3"]


def test_the_table_and_the_verdict_have_one_sign(variants):
    told_of = told(variants({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]}))
    rows = _differences(told_of).rows
    assert list(rows[0][:2]) == ["fedprox", "fedavg"]
    assert list(rows[0][2:4]) == ["3.17", "2.45 to 3.88"]
    assert "by 3.17 points" in told_of[0].words()


def test_differences_are_in_points_wherever_they_stand(variants):
    """Percent might be shares of the other."""
    runs = read_all(variants({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]}))
    found, score = tasks(runs), Score.of(runs, "test", None)
    paired = pairs(found, score)
    (ahead,) = _picture_of_differences(paired)
    (curve,) = (b for b in _pictures(found, "test", score) if b.slug.startswith("difference"))
    rows = _differences(paired)
    assert isinstance(curve, Curves) and not (ahead.percent or curve.percent)
    assert "points" in ahead.x_label and "points" in curve.y_label
    assert list(ahead.series[0].values) == pytest.approx([9.5 / 3])
    (line,) = curve.lines  # of the other than FedAvg
    assert line.y[-1] == pytest.approx(9.5 / 3)
    assert rows.header[2] == "points ahead" and "in points of" in rows.caption


@pytest.mark.usefixtures("quick_pages")
def test_a_comparison_names_what_accuracies_hide(variants):
    folders = variants({"fedavg": [0.70, 0.71], "fedprox": [0.73, 0.75]})
    about = json.loads((folders[0] / "manifest.json").read_text()) | {"classes": ["cat", "dog"]}
    (folders[0] / "manifest.json").write_text(json.dumps(about))
    judged = {"part": "test", "confusion": [[150, 0, 0], [50, 0, 0]]}
    (folders[0] / "evaluation.json").write_text(json.dumps(judged))
    page = compare(folders).page.read_text("utf-8")
    assert "But look closer: fedavg-0.1-0 (weak at dog)." in page
    assert "recall 0.0%" in page  # in the table with the sentences


def test_variants_have_the_names_they_are_given(variants, fedlens, tmp_path):
    slow = variants({"fedavg": [0.70, 0.71, 0.72]}, lr=0.1)
    fast = variants({"fedavg": [0.73, 0.745, 0.75]}, "digits", lr=0.5)
    found = compare({"slow": slow, "fast": fast}, out=tmp_path / "page")
    (pair,) = found.pairs
    assert (pair.one, pair.other) == ("slow", "fast")
    assert found.verdicts[0].startswith("fast is better than slow, by 3.17 points")
    page = found.page.read_text("utf-8")
    assert "slow or fast?" in page and page.count("is better than") == 1
    with pytest.raises(ValueError, match="leave out one"):
        compare({"slow": slow, "fast": fast}, by="local.lr")


@COMMAND_LINE
def test_names_are_given_on_the_command_line(variants, fedlens, tmp_path, monkeypatch):
    folders = variants({"fedavg": [0.70, 0.71, 0.72], "fedprox": [0.73, 0.745, 0.75]})
    named = [f"plain={one}" for one in folders[:3]] + [f"pulled={one}" for one in folders[3:]]
    done = fedlens("compare", *named, "--out", tmp_path / "page")
    assert done.out.startswith("pulled is better than plain, by 3.17 points"), done
    half = fedlens("compare", *named[:3], *folders[3:])
    assert half.status == 2 and "has no name: write NAME=" in half.err
    assert "lacks a name" in fedlens("compare", "=x", "b=y").err
    setting = fedlens("compare", *folders, "rounds=2")
    assert setting.status == 2 and "rounds=2 is for experiment files" in setting.err
    monkeypatch.chdir(folders[0].parent)
    for seed, one in enumerate(folders[:3]):
        one.rename(f"lr=1,seed={seed}")  # a sweep's folders are no names
    assert fedlens("compare", *[f"lr=1,seed={seed}" for seed in range(3)], *folders[3:]).status == 0


def test_tasks_of_other_algorithms_are_called_by_them(variants):
    finals = {"fedavg": [0.5, 0.51], "fedprox": [0.6, 0.63]}
    folders = [*variants(finals, lr=0.1), *variants(finals, lr=0.2)]
    told_of = told(folders, ("local.lr",))
    assert [(pair.task, pair.one, pair.other) for pair in told_of] == [
        ("fedavg", "lr 0.1", "lr 0.2"),
        ("fedprox", "lr 0.1", "lr 0.2"),
    ]


def test_a_page_of_many_tasks_has_few_pictures(variants):
    finals = {"fedavg": [0.5, 0.51], "fedprox": [0.6, 0.63]}
    folders = [one for lr in (0.1, 0.2, 0.3) for one in variants(finals, lr=lr)]
    found = compare(folders, by="algorithm")
    drawn = {path.stem for path in (found.page.parent / "figures").glob("*.csv")}
    assert {"ahead", "final_accuracy", "paired_differences"} <= drawn
    assert len([name for name in drawn if name.startswith("test_accuracy")]) == 3
    assert not [name for name in drawn if name.startswith(("difference_", "test_loss"))]
    assert found.summary.startswith("12 runs on 3 tasks: ")


def test_a_comparison_is_short_when_it_is_printed(variants):
    found = compare(variants({"fedavg": [0.5, 0.6], "fedprox": [0.6, 0.7]}))
    assert repr(found) == f"<Comparison: {found.summary} Page: {found.page}>"
