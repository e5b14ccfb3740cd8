"""ε and δ against dp-accounting 0.6.0 (PLD in steps of 1e-4, RDP), prints and closed forms."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from fedlens.privacy import accountant
from fedlens.privacy.accountant import delta, epsilon, noise_for, rdp
from fedlens.privacy.events import Release

MNIST = 240 / 60_000

SINGLE = {  # noise: ε at δ = 1e-5, as printed, and by dp-accounting
    0.3: (19.13, 19.13076783684723),
    0.4: (13.21, 13.206712241909576),
    0.5: (10.0, 9.99725615024243),
    0.75: (6.13, 6.129244844298303),
    1.0: (4.38, 4.37717810002493),
    2.0: (1.99, 1.993091407908809),
}
POISSON = {  # the same with q = 0.01 and 2,000 rounds
    0.498: (18.36, 18.356406103414532),
    0.559: (12.51, 12.507873055080532),
    0.61: (9.45, 9.445081486899221),
    0.715: (5.84, 5.838874370796143),
    0.807: (4.20, 4.19811634775392),
    1.16: (1.97, 1.968683935505226),
}
OPACUS_MNIST = {  # noise, epochs of 250 steps: PLD as printed and by dp-accounting, RDP likewise
    (0.7, 45): (5.43, 5.431222694900288, 6.09, 6.093728888449009),
    (1.1, 60): (2.30, 2.2954679391351767, 2.50, 2.5028709296537146),
    (1.3, 15): (0.83, 0.8335891184328208, 0.92, 0.9220489427696636),
}
BY_DP_ACCOUNTING = [  # events, then ε at δ = 1e-5 and δ at ε = 1
    (
        [
            Release(1.0, "poisson", 0.01, count=1000),
            Release(0.8, "poisson", 0.02, count=100),
            Release(5.0),
        ],
        (3.152588429890872, 0.021834513460066974),
    ),
    (
        [Release(1.0, "poisson", 0.01, count=10_000)],
        (6.187744975808358, 0.23914547155544658),
    ),
    (
        [Release(1.0, "poisson", 0.01, "replace", 1000)],
        (2.8434458118173023, 0.03296237136111008),
    ),
    ([Release(0.6, "poisson", 0.1, "replace", 20)], (11.684563399789056, 0.3221131618430001)),
    ([Release(2.0, "all", 1.0, "replace", 10)], (17.85658683146691, 0.8185178155135642)),
    # Its PLD accountant has no samples of fixed size: the profile of Zhu, Dong and Wang from its
    # Gaussian losses of sensitivity 2, connected and composed by its `pld_pmf`.
    ([Release(1.0, "fixed", 0.01, "replace", 1000)], (14.820667433184726, 0.5324907769624028)),
    ([Release(2.0, "fixed", 0.1, "replace", 100)], (7.80488917659549, 0.3098145531124791)),
    ([Release(1.0, "fixed", 0.1, "replace")], (6.57553980972108, 0.01964788111657634)),
]


def agrees(found, oracle):
    """At most 1% above what dp-accounting says, and not below by more than 0.1%."""
    return 0.999 * oracle <= found <= 1.01 * oracle


def closed_form(noise, at):
    """δ(ε) = Φ(1/(2σ) - εσ) - e^ε Φ(-1/(2σ) - εσ) (Balle and Wang, 2018)."""

    def below(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(0.5 / noise - at * noise) - math.exp(at) * below(-0.5 / noise - at * noise)


@pytest.mark.parametrize("noise", SINGLE)
def test_a_single_gaussian_release_costs_what_is_printed(noise):
    printed, oracle = SINGLE[noise]
    found = epsilon([Release(noise)], 1e-5)
    assert f"{found:.2f}" == f"{printed:.2f}" and agrees(found, oracle)


@pytest.mark.parametrize("noise", POISSON)
def test_poisson_sampled_rounds_cost_what_is_printed(noise):
    printed, oracle = POISSON[noise]
    found = epsilon([Release(noise, "poisson", 0.01, count=2000)], 1e-5)
    assert f"{found:.2f}" == f"{printed:.2f}" and agrees(found, oracle)


@pytest.mark.parametrize(("noise", "epochs"), OPACUS_MNIST)
def test_the_mnist_of_opacus_costs_what_is_printed(noise, epochs):
    printed, oracle, printed_rdp, oracle_rdp = OPACUS_MNIST[noise, epochs]
    events = [Release(noise, "poisson", MNIST, count=250 * epochs)]
    found, by_rdp = epsilon(events, 1e-5), rdp(events, 1e-5)
    assert f"{found:.2f}" == f"{printed:.2f}" and agrees(found, oracle)
    assert f"{by_rdp:.2f}" == f"{printed_rdp:.2f}" and agrees(by_rdp, oracle_rdp)


@pytest.mark.parametrize(
    ("rounds", "by_pld", "by_rdp"), [(1500, 0.616, 0.714), (3000, 0.633, 0.725)]
)
def test_the_cifar_10_of_pfl_needs_the_noise_that_is_printed(rounds, by_pld, by_rdp):
    def events(noise):
        return [Release(noise, "poisson", 1000 / 10**6, count=rounds)]

    noise = noise_for(2.0, 1e-6, events)
    assert f"{noise:.3f}" == f"{by_pld}"
    assert 0.999 * 2 < epsilon(events(noise), 1e-6) <= 2
    assert rdp(events(by_rdp), 1e-6) <= 2 < rdp(events(by_rdp - 0.001), 1e-6)


@pytest.mark.parametrize(("rounds", "printed"), [(20, 2.68), (100, 6.00)])
def test_hospitals_in_every_round_need_the_noise_that_is_printed(rounds, printed):
    noise = noise_for(8.0, 1e-5, lambda noise: [Release(noise, count=rounds)])
    assert f"{noise:.2f}" == f"{printed:.2f}"


@pytest.mark.parametrize(("events", "oracle"), BY_DP_ACCOUNTING)
def test_mixed_events_and_relations_cost_what_dp_accounting_says(events, oracle):
    assert agrees(epsilon(events, 1e-5), oracle[0])
    assert agrees(delta(events, 1.0), oracle[1])


@pytest.mark.parametrize("rounds", [1, 100, 10_000])
@pytest.mark.parametrize("at", [0.0, 1.0, 3.0, 5.0])
def test_many_gaussians_are_one_of_less_noise_and_never_below_it(rounds, at):
    found = delta([Release(math.sqrt(rounds), count=rounds)], at)
    assert closed_form(1.0, at) <= found <= 1.005 * closed_form(1.0, at)


@pytest.mark.parametrize("noise", [0.2, 1.0, 10.0])
def test_a_rate_of_one_is_the_gaussian_itself(noise):
    whole = Release(noise, "poisson", 1.0)
    assert epsilon([whole], 1e-5) == pytest.approx(epsilon([Release(noise)], 1e-5), rel=1e-9)
    at = epsilon([whole], 1e-5)
    assert closed_form(noise, at) <= 1e-5 <= 1.005 * closed_form(noise, at)


def test_replacing_one_moves_a_sum_of_all_by_two_clips():
    assert epsilon([Release(2.0, neighbours="replace")], 1e-5) == epsilon([Release(1.0)], 1e-5)


@pytest.mark.parametrize(
    ("sampling", "neighbours"),
    [("poisson", "add-remove"), ("poisson", "replace"), ("fixed", "replace")],
)
def test_less_noise_more_rounds_more_clients_and_a_smaller_delta_cost_more(sampling, neighbours):
    def cost(noise=1.0, rate=0.05, count=50, delta=1e-5):
        return epsilon([Release(noise, sampling, rate, neighbours, count)], delta)

    def rises(costs):
        return bool((np.diff(costs) > 0).all())

    assert rises([cost(noise=noise) for noise in (4, 2, 1.5, 1, 0.8, 0.5)])
    assert rises([cost(rate=rate) for rate in (0.001, 0.01, 0.03, 0.1, 0.5, 0.9, 1)])
    assert rises([cost(count=count) for count in (1, 2, 5, 50, 51, 100, 1000)])
    assert rises([cost(delta=delta) for delta in (1e-2, 1e-4, 1e-6, 1e-8)])


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "by_rdp"),
    [
        (2.0, 0.01, 1000, 3.576111482350549),
        (4.0, 0.1, 100, 5.3790096960759),
        (2.0, 0.1, 1, 2.2750614967090392),
    ],
)
def test_a_fixed_size_costs_less_than_by_rdp_and_no_less_than_poisson(noise, rate, rounds, by_rdp):
    # dp-accounting's RDP of samples without replacement, whose noise is in units of a replacement.
    fixed = epsilon([Release(noise, "fixed", rate, "replace", rounds)], 1e-5)
    assert epsilon([Release(noise, "poisson", rate, "replace", rounds)], 1e-5) <= fixed < by_rdp


@pytest.mark.parametrize(("target", "true"), [(10, 2.3e-5), (50, 0.59)])
def test_the_textbook_formula_for_noise_fails_beyond_an_epsilon_of_1(target, true):
    """Noise of sqrt(2 ln(1.25 / δ)) / ε, which some frameworks take for any ε."""
    noise = math.sqrt(2 * math.log(1.25 / 1e-5)) / target
    assert delta([Release(noise)], target) == pytest.approx(true, rel=0.05)
    assert delta([Release(noise)], target) > 2e-5 > delta([Release(4.84)], 1.0)


def test_cohorts_of_fixed_size_cost_more_than_an_account_of_poisson_sampling_says():
    """What a simulator tells that draws the former and accounts for the latter."""
    drawn, told = (
        epsilon([replace(one, count=1500)], 1e-6)
        for one in (
            Release(0.616, "fixed", 0.001, "replace"),
            Release(0.616, "poisson", 0.001),
        )
    )
    assert told == pytest.approx(2.0, abs=0.01)
    assert drawn > 1.5 * told


def test_rounds_in_a_ledger_cost_what_their_sum_costs():
    one, other = Release(1.1, "poisson", 0.02), Release(2.0, "poisson", 0.1)
    both = [Release(1.1, "poisson", 0.02, count=300), Release(2.0, "poisson", 0.1, count=200)]
    assert epsilon([one, other] * 200 + [one] * 100, 1e-5) == epsilon(both, 1e-5)
    assert Release(**asdict(one)) == one


def test_epsilon_and_delta_are_inverse():
    events = [Release(1.1, "poisson", 0.02, count=300), Release(4.0, count=3)]
    assert delta(events, epsilon(events, 1e-6)) == pytest.approx(1e-6, rel=1e-6)


def test_a_finer_grid_lowers_the_bound_by_little(monkeypatch):
    events = [Release(0.7, "poisson", 0.004, count=5000), Release(3.0, count=2)]
    coarse = epsilon(events, 1e-5)
    monkeypatch.setattr(accountant, "STEP", accountant.STEP / 8)
    monkeypatch.setattr(accountant, "POINTS", accountant.POINTS * 8)
    assert 0.9995 * coarse < epsilon(events, 1e-5) < coarse


def test_what_a_window_leaves_out_counts_as_an_infinite_loss(monkeypatch):
    monkeypatch.setattr(accountant, "TAIL", 0.05)
    for noise in np.geomspace(0.5, 2.0, 9):
        for at in (0.0, 1.0, 2.0, 4.0, 8.0):
            assert delta([Release(float(noise))], at) >= closed_form(noise, at)


def test_rounds_with_nobody_cost_nothing_and_rounds_without_noise_everything():
    assert epsilon([], 1e-5) == 0 and delta([], 0.0) == 0
    assert epsilon([Release(0.0, "poisson", 0.0), Release(1.0, count=0)], 1e-5) == 0
    assert epsilon([Release(1.0), Release(0.0)], 1e-5) == math.inf
    assert delta([Release(0.0)], 3.0) == 1
    assert rdp([Release(0.0)], 1e-5) == math.inf


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1e9])
@pytest.mark.parametrize("neighbours", ["add-remove", "replace"])
def test_extreme_noise_gives_a_number_or_infinity(noise, neighbours):
    found = epsilon([Release(noise, "poisson", 0.3, neighbours, 7)], 1e-5)
    assert found == (0 if noise > 1 else math.inf)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": -1.0},
        {"noise": math.nan},
        {"noise": 1.0, "sampling": "poisson", "rate": 1.5},
        {"noise": 1.0, "sampling": "poisson", "rate": -0.1},
        {"noise": 1.0, "sampling": "shuffled"},
        {"noise": 1.0, "rate": 0.5},
        {"noise": 1.0, "neighbours": "swap"},
        {"noise": 1.0, "sampling": "fixed", "rate": 0.5},
        {"noise": 1.0, "count": -1},
    ],
)
def test_an_impossible_release_is_refused_in_one_line(wrong):
    with pytest.raises(ValueError, match=r"^.* is .*: .*$"):
        Release(**wrong)


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_an_impossible_delta_is_refused(wrong):
    for ask in (epsilon, rdp):
        with pytest.raises(ValueError, match="delta"):
            ask([Release(1.0)], wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_target_is_refused(wrong):
    with pytest.raises(ValueError, match="epsilon"):
        noise_for(wrong, 1e-5, lambda noise: [Release(noise)])


def test_one_epsilon_is_of_one_neighbouring_relation():
    with pytest.raises(ValueError, match="neighbours"):
        epsilon([Release(1.0), Release(1.0, "fixed", 0.1, "replace")], 1e-5)
