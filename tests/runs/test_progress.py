"""What people see while something takes its time."""

import re
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

import fedlens as fl
from fedlens.runs import loop, points, progress
from fedlens.runs.progress import Watching
from tests.sites import write_sites


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr("fedlens.runs.progress.time.monotonic", lambda: now[0])
    return now


def on_terminal(monkeypatch, kind="xterm"):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", kind)


def test_what_is_counted_says_how_long_it_will_take(clock, capsys):
    with progress.counted("images") as watch:
        for done in range(1, 7):
            watch(done, 6)
            clock[0] += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "images: 3/6  about 3 s left",
        "images: 5/6  about 1 s left",
        "images: 6/6",
    ]


def test_of_what_is_over_at_once_nothing_is_said(clock, capsys):
    with progress.counted("images") as watch:
        watch(0, 2)
        clock[0] += 1.9
        watch(2, 2)
    assert capsys.readouterr().err == ""


def test_what_was_done_before_does_not_count_as_fast(clock, capsys):
    """90 of 100 were there at the start, and one more took 4 s: nine are left, of 4 s each."""
    with progress.counted("set") as watch:
        watch(90, 100, "decoding")
        clock[0] += 4
        watch(91, 100, "decoding")
        clock[0] += 2
        watch(10, 100, "writing")
        clock[0] += 2
        watch(20, 100, "writing")
    assert capsys.readouterr().err.splitlines() == [
        "set: decoding  91/100  about 36 s left",
        "set: writing  10/100",
        "set: writing  20/100  about 16 s left",
    ]


def test_bytes_of_an_unknown_number_are_told(clock, capsys):
    with progress.counted("set", progress.megabytes) as watch:
        clock[0] += 2
        watch(1_500_000, None)
    assert capsys.readouterr().err == "set: 1.5 MB\n"


def test_a_terminal_has_a_bar_of_what_takes_longer(clock, capsys, monkeypatch):
    on_terminal(monkeypatch)
    with progress.counted("quick") as watch:
        watch(1, 1)
    assert capsys.readouterr().err == ""
    with progress.counted("slow") as watch:
        clock[0] += 1
        watch(1, 2)
        watch(2, 2)
    shown = capsys.readouterr().err
    assert "slow" in shown and "2/2" in shown
    assert "0:0" in shown, "the time since it began"


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_cannot_draw_bars_has_lines(clock, capsys, monkeypatch, kind):
    on_terminal(monkeypatch, kind)
    with progress.counted("images") as count:
        clock[0] += 2
        count(2, 2)
    with progress.working("making a"):
        pass
    with progress.in_rounds("a", 2) as watch:
        watch({"round": 1, "train_loss": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "images: 2/2",
        "making a ...",
        "a: round 1/2  train loss 1.000",
    ]


def test_images_that_are_decoded_are_counted_before_the_first_round(clock, capsys):
    with progress.in_rounds("a", 4) as watch:
        tell = progress.decoding(watch)
        assert tell is not None
        for number in range(1, 5):
            clock[0] += 1.5
            tell(number, 4)
    line = "a: reading images"
    assert capsys.readouterr().err.splitlines() == [f"{line} 2/4  about 3 s left", f"{line} 4/4"]
    assert progress.decoding(None) is None


def test_rounds_that_are_done_again_end_no_run(clock, capsys):
    with progress.in_rounds("a", 9, done=9) as watch:  # of which the last checkpoint is damaged
        for number in (8, 9):
            clock[0] += 3
            watch({"round": number, "train_loss": 1.0})
    assert [line[:12] for line in capsys.readouterr().err.splitlines()] == [
        "a: round 8/9",
        "a: round 9/9",
    ]


def test_what_the_first_round_took_to_start_is_not_expected_of_the_others(clock, capsys):
    """Two points side by side: 60 s until both have one round, and 4 s for the next of both."""
    with progress.in_rounds("a", 20) as watch:
        for number in range(4):
            clock[0] += (60, 0, 4, 0)[number]
            watch({"done": number + 1, "point": "b", "round": 1, "train_loss": 1.0})
    told = [line.partition("train loss 1.000")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["", "  about 34 s left"]  # after 3 of 20: two in 4 s since the first

    with progress.in_rounds("a", 4) as watch:
        for number, seconds in ((1, 9), (2, 3)):
            clock[0] += seconds
            watch({"round": number, "train_loss": 1.0})
    told = [line.partition("train loss 1.000")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["  about 27 s left", "  about 6 s left"]


def test_rounds_are_expected_to_take_what_was_estimated_of_them(clock, capsys):
    """Ten of 8 s, then a thousand of a tenth: after two of the first there are 164 s to go."""
    with progress.in_rounds("a", 1010) as watch:
        for done, left in ((1, 172.0), (2, 164.0)):
            clock[0] += 8
            record = {"done": done, "left": left, "point": "b", "round": done, "train_loss": 1.0}
            watch(record)
    told = [line.partition("train loss 1.000")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["", "  about 3 min left"]


def test_what_a_server_waited_for_its_sites_is_not_expected_of_rounds(clock, capsys):
    with progress.in_rounds("a", 11) as watch:
        clock[0] += 3600
        watch({"round": 1, "train_loss": 1.0, "seconds": 4.0, "evaluation_seconds": 2.0})
    assert capsys.readouterr().err == "a: round 1/11  train loss 1.000  about 60 s left\n"


def test_in_a_long_round_one_sees_how_many_clients_have_trained(clock, capsys):
    with progress.in_rounds("a", 5) as watch:
        for trained in (1, 2, 3):
            clock[0] += 8
            watch({"trained": trained, "of": 4, "share": trained / 4})
        clock[0] += 8
        watch({"round": 1, "train_loss": 1.0, "seconds": 32.0})
        clock[0] += 12
        watch({"trained": 1, "of": 4})
    assert capsys.readouterr().err.splitlines() == [
        "a: round 1/5  clients trained 1/4  about 3 min left",
        "a: round 1/5  clients trained 3/4  about 2 min left",
        "a: round 1/5  train loss 1.000  about 2 min left",
        "a: round 2/5  clients trained 1/4  about 2 min left",
    ]


def test_without_a_terminal_every_evaluation_is_a_line(clock, capsys):
    """What is shown within a round, or shortly before, takes no result's place."""
    with progress.in_rounds("a", 9) as watch:
        for number in range(1, 6):
            clock[0] += 12
            watch({"trained": 1, "of": 4})
            clock[0] += 0.1
            watch({"round": number, "train_loss": 1.0, "test_accuracy": number / 10})
            clock[0] += 0.1
            watch({"round": number, "train_loss": 1.0, "test_accuracy": number / 10 + 0.01})
    lines = [line for line in capsys.readouterr().err.splitlines() if "accuracy" in line]
    found = [float(line.partition("test accuracy ")[2].partition("%")[0]) for line in lines]
    assert found == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51]


def test_a_terminal_shows_the_clients_of_a_round_beside_the_last_one(clock, capsys, monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    with progress.in_rounds("a", 5, 1) as watch:
        watch({"round": 2, "train_loss": 1.0, "test_accuracy": 0.5})
        watch({"tested": 300, "of": 4000, "point": "b"})
    shown = capsys.readouterr().err
    assert "round 2/5" in shown
    assert "test 50.0%  tested 300/4,000  loss 1.000" in shown


@pytest.fixture
def drawn(clock, capsys, monkeypatch):
    """The last line of a bar on a terminal of some columns, told of records some seconds apart."""

    def draw(width: int, name: str, *told: tuple[float, dict[str, Any]]) -> str:
        on_terminal(monkeypatch)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        with progress.in_rounds(name, 400) as watch:
            for seconds, record in told:
                clock[0] += seconds
                watch(record)
        lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", capsys.readouterr().err)
        # Behind a full line ^C is on the next one, where the bar would be drawn again.
        assert max(map(cell_len, lines)) <= width - len("^C^C")
        return [line for line in lines if line][-1]

    return draw


MEASURES = {"train_loss": 0.256, "test_accuracy": 0.85, "seconds": 60.0}
ROUNDS = [(60.0, {"round": number, **MEASURES}) for number in (1, 2)]


@pytest.mark.parametrize(
    "name", ["a", "short-name", "a-name-of-25-letters-long", "名前が長い実行の名前"]
)
@pytest.mark.parametrize("width", [36, 38, 40, 50, 60, 80, 120])
def test_on_a_narrow_terminal_the_count_and_the_time_left_stay_whole(drawn, width, name):
    for told in (ROUNDS, [*ROUNDS, (0.0, {"trained": 44, "of": 50})]):
        line = drawn(width, name, *told)
        assert "round 2/400 " in line and "about 6.6 h left" in line


def test_a_name_gives_way_to_measures_and_a_number_is_never_cut(drawn):
    name = "a-name-of-25-letters-long"
    lines = [drawn(width, name, *ROUNDS) for width in range(36, 130)]
    for line in lines:
        measures = line.partition("left")[2].split()
        assert measures in ([], ["test", "85.0%"], ["test", "85.0%", "loss", "0.256"])
        assert name not in line or len(measures) == 4, "it has what all else leaves"
    assert lines[-1].startswith(name) and any(line.startswith("a-na… ") for line in lines)
    assert any("…" not in line and "a-" not in line for line in lines)


@pytest.mark.parametrize("width", [5, 10, 20])
def test_a_bar_on_a_terminal_of_a_few_columns_is_no_wider(drawn, width):
    drawn(width, "a-name", *ROUNDS)


def test_on_80_columns_one_sees_the_accuracy_beside_the_count_and_both_times(drawn):
    line = drawn(80, "a-16-letter-name", *ROUNDS)
    assert re.search(
        r"a-16-.* round 2/400 +\d:\d\d:\d\d about 6.6 h left +test 85.0%  loss 0.256$", line
    )
    in_a_round = drawn(80, "a-16-letter-name", *ROUNDS, (0.0, {"trained": 44, "of": 50}))
    assert in_a_round.endswith("left  test 85.0%  trained 44/50")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_tells_how_many_clients_of_a_twin_are_counted_and_how_long_that_takes(drawn, width):
    """427,056 of a million in 30 s: the others take 40."""
    told = [(seconds, {"planned": at, "of": 10**6}) for seconds, at in ((0.0, 0), (30.0, 427_056))]
    line = drawn(width, "a-million-clients", *told)
    assert re.search(r" twin: client 427,056/1,000,000 \d:\d\d:\d\d about 40 s left$", line)


@pytest.mark.parametrize("key", sorted(progress.OUTSIDE))
def test_on_80_columns_what_is_done_besides_rounds_has_its_count_and_its_time(drawn, key):
    told = [(seconds, {key: at, "of": 9000}) for seconds, at in ((0.0, 1), (20.0, 1001))]
    line = drawn(80, "a-run-with-a-name", *told)
    assert " 1,001/9,000 " in line and "about 3 min left" in line


def test_a_bar_of_what_is_counted_keeps_its_count_and_its_time(clock, capsys, monkeypatch):
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "40")
    with progress.counted("a-set-with-a-long-name", progress.megabytes) as watch:
        for seconds, done in ((1, 0), (3, 30_000_000)):
            clock[0] += seconds
            watch(done, 10**8, "fetching")
    assert "30.0 of 100.0 MB about 7 s left" in capsys.readouterr().err


def test_the_first_round_is_judged_by_its_images_once_workers_are_past_their_first_clients(
    monkeypatch,
):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    experiment = fl.Experiment(
        dataset="fashion-mnist-mini",
        model="linear",
        rounds=1,
        engine="sequential",
        clients=fl.Clients(count=10, partition=fl.Named("proportions", {"sizes": "high"})),
    )
    within: list[Any] = []
    fl.run(experiment, watch=Watching(within.append))
    shares = [record.get("share") for record in within if "trained" in record]
    assert shares[0] is None and shares[1:] == sorted(shares[1:]) and shares[-1] == 1.0
    two = shares[1]  # one of ten clients has 91% of the images, the others 1% each
    assert two == pytest.approx(0.02, abs=0.005) or two == pytest.approx(0.92, abs=0.005)


@pytest.mark.parametrize("engine", ["sequential", "processes", "stacked"])
def test_every_engine_tells_how_far_a_long_round_is(engine, monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    experiment = fl.Experiment(
        dataset="fashion-mnist-mini",
        model="linear",
        rounds=2,
        engine=engine,
        clients=fl.Clients(count=8, per_round=4),
    )
    told: list[Any] = []
    fl.run(experiment, watch=Watching(told.append))
    rounds = [number for number, record in enumerate(told) if "round" in record]
    assert len(rounds) == 2
    for first, end in ((0, rounds[0]), (rounds[0] + 1, rounds[1])):
        for what, total in (("trained", 4), ("tested", 1000)):
            some = [record for record in told[first:end] if what in record]
            done = [record[what] for record in some]
            assert done == sorted(done) and done[-1] == total
            assert {record["of"] for record in some} == {total}


def test_a_watch_of_ones_own_is_told_of_whole_rounds_alone(monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    experiment = fl.Experiment(dataset="fashion-mnist-mini", model="linear", rounds=2)
    told: list[Any] = []
    fl.run(experiment, watch=told.append)
    fl.sweep({"a": experiment}, watch=told.append)
    assert [record["round"] for record in told] == [1, 2, 1, 2]


def test_in_a_sweep_the_clients_of_a_round_are_those_of_a_point(monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    experiment = fl.Experiment(dataset="fashion-mnist-mini", model="linear", rounds=1)
    within: list[Any] = []
    fl.sweep({"a": experiment}, watch=Watching(within.append))
    trained = [record for record in within if "round" not in record]
    assert trained and {record["point"] for record in trained} == {"a"}


def test_the_first_round_of_a_sweep_has_an_estimate_and_keeps_it_until_the_next(clock, capsys):
    """Its point has rounds of 20 s, of which 30 are left, or what takes as long as these."""
    with progress.in_rounds("a", 50) as watch:
        for trained in (1, 2):
            clock[0] += 10
            told = {"trained": trained, "of": 2, "share": trained / 2, "rounds": 30.0, "point": "b"}
            watch(told)
        watch({"done": 1, "left": 40.0, "point": "b", "round": 1, "train_loss": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "a: round 1/50  b  clients trained 1/2  about 10 min left",
        "a: round 1/50  b  clients trained 2/2  about 10 min left",
        "a: round 1/50  b  train loss 1.000  about 10 min left",
    ]


def test_a_sweep_tells_how_many_rounds_as_long_as_this_one_are_left(monkeypatch):
    monkeypatch.setattr(loop, "TOLD_SECONDS", 0.0)
    monkeypatch.setattr(points, "num_evaluations", lambda *_: 0)  # what is trained on counts alone
    short = fl.Experiment(
        dataset="fashion-mnist-mini",
        model="linear",
        rounds=3,
        engine="sequential",
        clients=fl.Clients(count=4),
        local=fl.LocalTraining(epochs=1),
    )
    long = replace(short, rounds=2, local=replace(short.local, epochs=5))
    within: list[Any] = []
    fl.sweep({"a": short, "b": long}, watch=Watching(within.append))
    left = {
        name: [r["rounds"] for r in within if r["point"] == name and "rounds" in r] for name in "ab"
    }
    assert left["a"][0] == pytest.approx(3 + 5 * 2)
    assert left["b"][0] == pytest.approx(2)


def test_whoever_runs_an_experiment_is_told_of_images_that_are_decoded(tmp_path):
    sites = write_sites(tmp_path / "sites", count=5)
    files = {"path": str(sites), "layout": "site/class", "size": 8, "channels": 1}
    experiment = fl.Experiment(
        dataset=fl.Named("folder", files),
        model="linear",
        rounds=1,
        engine="sequential",
        clients=fl.Clients(partition=fl.Named("natural", {"column": "site"})),
    )
    out = tmp_path / "run"
    for start in (
        lambda watch: fl.run(experiment, out, watch=watch),
        lambda watch: fl.resume(out, rounds=2, watch=watch),
        lambda watch: fl.sweep({"a": experiment, "b": experiment}, watch=watch),
    ):
        told: list[Any] = []
        start(told.append)
        decoded = [(record["decoded"], record["of"]) for record in told if "decoded" in record]
        assert decoded == [(done, 40) for done in range(1, 41)]
        assert told[:40] == [record for record in told if "decoded" in record]


def test_intervals_are_among_what_is_done_besides_rounds(clock, capsys):
    with progress.in_rounds("a", 4) as watch:
        for number in range(1, 5):
            clock[0] += 1.5
            watch({"drawn": number, "of": 4})
    line = "a: resampling examples for intervals,"
    assert capsys.readouterr().err.splitlines() == [f"{line} 2/4  about 3 s left", f"{line} 4/4"]
