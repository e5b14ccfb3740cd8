"""`fedlens privacy plan`: the ε of a run that has not begun."""

import json

import pytest

import fedlens as fl
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from tests.command_line import EXPERIMENT  # 30 clients, 3 in a round, 2 rounds


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def plan(fedlens):
    """What the command prints as JSON."""

    def planned(*words):
        done = fedlens("privacy", "plan", *words, "--json")
        assert (done.status, done.err) == (0, "")
        return json.loads(done.out)

    return planned


@pytest.mark.parametrize(("noise", "printed"), [(0.498, 18.36), (0.807, 4.20), (1.16, 1.97)])
def test_epsilon_is_that_of_the_accountants_gates(plan, noise, printed):
    sizes = ("--clients", 1000, "--per-round", 10, "--rounds", 2000)
    found = plan(*sizes, "--noise", noise, "--delta", 1e-5)
    assert f"{found['epsilon']:.2f}" == f"{printed:.2f}"
    assert found | {"epsilon": 0} == {
        "epsilon": 0,
        "delta": 1e-5,
        "noise": noise,
        "unit": "client",
        "sampling": "poisson",
        "neighbours": "add-remove",
        "rounds": 2000,
    }


@pytest.mark.parametrize(("rounds", "noise"), [(20, 2.68), (100, 6.00)])
def test_the_noise_for_an_epsilon_is_that_of_the_gates_and_gives_it_back(plan, rounds, noise):
    words = ("--clients", 5, "--per-round", 5, "--rounds", rounds, "--sampling", "all")
    found = plan(*words, "--epsilon", 8)
    assert f"{found['noise']:.2f}" == f"{noise:.2f}"
    assert 7.99 < found["epsilon"] <= 8
    assert plan(*words, "--noise", found["noise"]) == found


def test_an_experiment_and_its_overrides_say_clients_and_rounds(plan, file):
    for words, rate, rounds in (
        ((), 0.1, 2),
        (("rounds=7", "clients.per_round=0.5"), 0.5, 7),
        (("clients.count=300",), 0.01, 2),
    ):
        found = plan(file, *words, "--noise", 1.5)
        oracle = epsilon([Release(1.5, "poisson", rate, count=rounds)], 1e-5)
        assert (found["epsilon"], found["rounds"]) == (oracle, rounds)


@pytest.mark.parametrize(
    ("sampling", "release"),
    [
        ("fixed", Release(1.5, "fixed", 0.1, "replace", 2)),
        ("all", Release(1.5, "all", count=2)),
    ],
)
def test_every_sampling_has_its_own_neighbours(plan, file, sampling, release):
    found = plan(file, "--noise", 1.5, "--sampling", sampling)
    assert found["epsilon"] == epsilon([release], 1e-5)
    assert found["neighbours"] == release.neighbours


def test_delta_is_below_a_tenth_of_a_client_also_where_there_are_many(plan):
    words = ("--per-round", 1, "--rounds", 1, "--noise", 1, "--clients")
    assert [plan(*words, count)["delta"] for count in (10, 10**6)] == [1e-5, 1e-7]


def test_an_epsilon_without_bound_is_null(plan, file, fedlens):
    words = (file, "--noise", 1e-6)
    assert plan(*words)["epsilon"] is None
    assert "epsilon     infinite after 2 rounds" in fedlens("privacy", "plan", *words).out


def test_the_text_tells_parts_of_the_run_more_clients_and_that_nothing_is_protected(fedlens, file):
    done = fedlens("privacy", "plan", file, "rounds=100", "--noise", 1.5)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()

    def shown(rate, rounds):  # rounded up
        return epsilon([Release(1.5, "poisson", rate, count=rounds)], 1e-5) + 0.005

    for rounds in (25, 50, 100):
        assert f"epsilon     {shown(0.1, rounds):.2f} after {rounds} rounds" in lines
    (ten,) = [line for line in lines if line.startswith("10 times")]
    assert f" {shown(0.01, 100):.2f} with 300 clients" in ten
    assert any(line.startswith("neighbours") and "one client more" in line for line in lines)
    assert "plan" in lines[-1]
    assert max(map(len, lines)) <= 100


PRIVATE = """
dataset = "fashion-mnist-mini"
model = "linear"
rounds = {rounds}
clients = {{ count = 1000, per_round = 50 }}
[privacy]
{privacy}
"""


@pytest.fixture
def private(tmp_path):
    def written(privacy, rounds=10):
        (tmp_path / "private.toml").write_text(PRIVATE.format(rounds=rounds, privacy=privacy))
        return tmp_path / "private.toml"

    return written


@pytest.mark.parametrize(("rounds", "noise"), [(1500, 0.616), (3000, 0.633)])
def test_the_noise_of_pfl_for_cifar10_is_found_from_its_experiment(plan, private, rounds, noise):
    """pfl's benchmark: cohorts of 50 with the noise of 1,000 out of a million, ε 2, δ 1e-6."""
    keys = "epsilon = 2.0\ndelta = 1e-6\nclip = 0.4\nnoise_cohort = 1000\npopulation = 1_000_000"
    found = plan(private(keys, rounds))
    assert found["noise"] == pytest.approx(noise, abs=6e-4)
    assert 1.99 < found["epsilon"] <= 2.0
    assert (found["sampling"], found["rounds"]) == ("poisson", rounds)


@pytest.mark.parametrize(
    ("keys", "release"),
    [
        ('noise = 1.5\nsampling = "fixed"', Release(1.5, "fixed", 0.05, "replace", 10)),
        ('noise = 3.0\nmechanism = { name = "banded", bands = 4 }', Release(3.0)),
        ('noise = 3.0\nmechanism = "tree"', Release(3.0 / 4**0.5)),  # in 10 rounds: 4 levels
    ],
)
def test_a_plan_of_a_private_experiment_counts_its_own_noise(plan, private, keys, release):
    assert plan(private(keys))["epsilon"] == pytest.approx(epsilon([release], 1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "besides"), [("", "nothing else"), ('clip = "adaptive"', "the clip")]
)
def test_a_plan_says_what_its_noise_covers(fedlens, private, keys, besides):
    (line,) = [
        line
        for line in fedlens("privacy", "plan", private(f"noise = 1.5\n{keys}")).out.splitlines()
        if line.startswith("covers")
    ]
    assert line.endswith(besides)


def test_a_plan_for_examples_reads_who_holds_how_many(plan, private, fedlens):
    """6,000 images: 6 for each of 1,000 clients, of which one takes part most often."""
    file = private('unit = "example"\nepsilon = 8.0\ndelta = 1e-3')
    words = (file, "clients.count=20", "clients.per_round=5", "local.batch_size=30")
    found = plan(*words)
    assert 7.95 < found["epsilon"] == found["by_client"]["most"] <= 8
    assert (found["unit"], found["neighbours"]) == ("example", "add-remove")
    private(f'unit = "example"\nnoise = {found["noise"]}\ndelta = 1e-3')
    assert plan(*words)["epsilon"] == found["epsilon"]
    lines = fedlens("privacy", "plan", *words).out.splitlines()
    assert any("probability 0.1 in a batch" in line for line in lines)
    assert any(
        line.startswith("10 times    ") and "10 times the examples" in line for line in lines
    )


def test_a_plan_with_noise_of_the_clients_says_what_its_run_says(plan, tmp_path):
    file = tmp_path / "secure.toml"
    file.write_text(
        'dataset = "fashion-mnist-mini"\nmodel = "linear"\nrounds = 2\nengine = "sequential"\n'
        '[clients]\ncount = 6\n[aggregation]\nsecure = "simulated"\n'
        "[privacy]\nnoise = 1.0\ndelta = 1e-3\n"
    )
    told = plan(file)
    run = fl.run(fl.Experiment.read(file), tmp_path / "run").summary["privacy"]
    assert told["epsilon"] == pytest.approx(run["epsilon"])
    assert told["noise"] == run["noise"] == 1.0


def test_a_page_shows_epsilon_over_rounds_also_for_ten_times_as_many(plan, private, tmp_path):
    words = (private("noise = 1.5"), "--out", tmp_path / "plan")
    page = tmp_path / "plan" / "report.html"
    assert plan(*words)["page"] == str(page)
    assert "ε over rounds" in page.read_text() and "10 times" in page.read_text()
    (table,) = (tmp_path / "plan" / "figures").glob("*over_rounds.csv")
    assert len(table.read_text().splitlines()) == 21


def test_a_page_is_not_replaced_by_itself(fedlens, private, tmp_path):
    words = ("privacy", "plan", private("noise = 1.5"), "--out", tmp_path / "plan")
    assert fedlens(*words).status == 0
    refused(fedlens(*words), "--overwrite")
    assert fedlens(*words, "--overwrite").status == 0


def test_a_private_experiment_is_changed_by_its_keys_and_not_by_options(fedlens, private):
    done = fedlens("privacy", "plan", private("noise = 1.5"), "--noise", 2)
    assert done.status == 2 and "privacy.noise=" in done.err
    done = fedlens("privacy", "plan", private("noise = 1.5"), "privacy.noise=2.0")
    assert done.status == 0 and done.out.startswith("noise       2.0 clips")


def test_a_ledger_is_shown_with_its_limit(fedlens, tmp_path):
    from fedlens.privacy.ledger import Entry, Ledger

    file = tmp_path / "ledger.jsonl"
    assert "is not there" in fedlens("privacy", "ledger", file).err
    Ledger(file).order([Entry("abc", "digits", "client", "run", 1, Release(1.1))])
    done = fedlens("privacy", "ledger", file, "--limit", 8)
    assert done.status == 0
    assert "digits (abc): epsilon 3.93 at delta 1e-05 for each client" in done.out
    assert "limit: epsilon 8" in done.out
    told = json.loads(fedlens("privacy", "ledger", file, "--json").out)
    assert told["limit"] == {"epsilon": 8.0, "delta": 1e-5}
    assert told["spent"][0]["epsilon"] == pytest.approx(epsilon([Release(1.1)], 1e-5))
    for words in (("--limit", -1), ("--limit", "inf"), ("--delta", 0)):
        assert fedlens("privacy", "ledger", file, *words).status == 2


WRONG = [
    ("--noise 1 --epsilon 8", "one of"),
    ("", "one of"),
    ("--noise 0", "noise"),
    ("--noise -1", "noise"),
    ("--noise nan", "noise"),
    ("--epsilon 0", "epsilon"),
    ("--epsilon -2", "epsilon"),
    ("--epsilon nan", "epsilon"),
    ("--epsilon 1 --delta 1e-30", "no noise"),
    ("--noise 1 --delta 0", "delta"),
    ("--noise 1 --delta nan", "delta"),
    ("--noise 1 --delta 0.0334", "clients"),
    ("--noise 1 --rounds 3", "rounds="),
    ("--noise 1 --sampling shuffled", "sampling"),
    ("rounds=1000001 --noise 1", "rounds"),
    ("clients.per_round=31 --noise 1", "per_round"),
    ("clients.devices=synthetic --noise 1", "--sampling all"),
    ("reporting.deadline=9 --noise 1 --sampling fixed", "--sampling all"),
]


@pytest.mark.parametrize(("words", "key"), WRONG)
def test_a_mistake_is_one_line_that_names_it(fedlens, file, words, key):
    refused(fedlens("privacy", "plan", file, *words.split()), key)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--clients 5 --per-round 3 --noise 1", "--rounds"),
        ("--clients 5 --per-round 6 --rounds 1 --noise 1", "per round"),
        ("--clients 5 --per-round 0 --rounds 1 --noise 1", "per round"),
        ("--clients 0 --per-round 0 --rounds 1 --noise 1", "clients"),
        ("--clients 5 --per-round 5 --rounds 0 --noise 1", "rounds"),
        ("--clients 5 --per-round 5 --rounds 1 --noise 1 --delta 0.2", "delta"),
        ("nowhere.toml --noise 1", "nowhere.toml"),
    ],
)
def test_a_mistake_without_a_file_is_one_line_too(fedlens, words, key):
    refused(fedlens("privacy", "plan", *words.split()), key)


def test_clients_that_only_the_data_tell_must_be_counted(fedlens, file):
    file.write_text('dataset = "femnist"\nmodel = "linear"\nrounds = 2\n')
    refused(fedlens("privacy", "plan", file, "--noise", 1), "how many clients")


def refused(done, key):
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1 and key in done.err
