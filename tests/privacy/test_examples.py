"""The ε of clients whose steps protect single examples."""

import numpy as np
import pytest

from fedlens.privacy import accountant
from fedlens.privacy.accountant import epsilon
from fedlens.privacy.events import Release
from fedlens.privacy.examples import ExampleProtection

DELTA = 1e-5


def clients(sizes, rounds=3, batch=32, noise=1.0, chosen=None, count_noise=0.0):
    """Clients of these sizes, by default all of them in each round, for an epoch each."""
    held = np.array(sizes)
    everyone = np.arange(len(held))
    return ExampleProtection(
        noise=noise,
        rates=np.minimum(1.0, batch / held),
        steps=-(-held // batch),
        chosen=[everyone] * rounds if chosen is None else [np.array(one) for one in chosen],
        count_noise=count_noise,
    )


def one(size, turns, noise=1.0, batch=32, more=()):
    steps = turns * -(-size // batch)
    return epsilon([Release(noise, "poisson", min(1, batch / size), count=steps), *more], DELTA)


def test_the_client_that_spends_most_counts_whoever_that_is():
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 5000, 200)
    chosen = [draw.integers(0, 200, 30) for _ in range(10)]
    found = clients(sizes, chosen=chosen)
    turns = np.bincount(np.concatenate(chosen), minlength=200)
    each = [one(n, t) for n, t in zip(sizes.tolist(), turns.tolist(), strict=True) if t]
    assert found.epsilon(10, DELTA) == pytest.approx(max(each), rel=1e-9)
    spread = found.spread(10, DELTA)
    assert spread["most"] == found.epsilon(10, DELTA)
    assert spread["least"] == pytest.approx(min(each), rel=0.2)
    assert spread["median"] == pytest.approx(float(np.median(each)), rel=0.2)


def test_few_clients_are_asked_for_their_epsilon(monkeypatch):
    asked = []

    def ask(releases, delta):
        asked.append(releases)
        return epsilon(releases, delta)

    monkeypatch.setattr(accountant, "epsilon", ask)
    clients(range(1, 3001), noise=1.234).epsilon(3, DELTA)
    assert len(asked) < 60


def test_a_client_with_fewer_examples_spends_more():
    costs = [clients([n]).epsilon(3, DELTA) for n in (40, 400, 4000)]
    assert costs[0] > 2 * costs[1] > 4 * costs[2]


def test_only_own_turns_cost():
    found = clients([100, 100], chosen=[[0], [0], [1]])
    assert [found.epsilon(rounds, DELTA) for rounds in (0, 1, 2, 3)] == pytest.approx(
        [0.0, one(100, 1), one(100, 2), one(100, 2)], rel=1e-9
    )


def test_label_counts_cost_once():
    found = clients([500], count_noise=4.0)
    assert found.epsilon(3, DELTA) == pytest.approx(one(500, 3, more=[Release(4.0)]), rel=1e-9)
    assert found.epsilon(3, DELTA) > clients([500]).epsilon(3, DELTA)


@pytest.mark.parametrize("sizes", [[600], [20, 32, 33, 64, 65, 700, 3000], list(range(1, 400, 7))])
@pytest.mark.parametrize("count_noise", [0.0, 20.0])
def test_the_noise_for_an_epsilon_is_enough_for_all_and_hardly_more(sizes, count_noise):
    found = clients(sizes, rounds=5, count_noise=count_noise).calibrated(4.0, DELTA)
    assert 3.98 < found.epsilon(5, DELTA) <= 4.0


def test_what_a_ledger_counts_is_never_less_than_any_client_spends():
    draw = np.random.default_rng(1)
    sizes = draw.integers(20, 3000, 40)
    chosen = [draw.integers(0, 40, 8) for _ in range(12)]
    found = clients(sizes, chosen=chosen)
    kept = [release for round in range(12) for release in found.releases(round)]
    assert epsilon(kept, DELTA) >= found.epsilon(12, DELTA)
    alike = clients([640] * 5)
    kept = [release for round in range(3) for release in alike.releases(round)]
    assert epsilon(kept, DELTA) == pytest.approx(alike.epsilon(3, DELTA), rel=1e-3)


def test_a_round_that_gives_nobody_more_turns_than_others_had_is_not_counted():
    found = clients([100] * 4, chosen=[[0, 1], [2, 3], [3, 2], [0, 1]])
    assert [len(found.releases(round)) for round in range(4)] == [1, 0, 1, 0]
