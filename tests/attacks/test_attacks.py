"""Attacks: what they send, by their formulas; and that all engines see the same ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.algorithm import compose
from fedlens.algorithm.slots import Received
from fedlens.algorithms import bucketing, krum, median, nnm, trimmed_mean
from fedlens.attacks import Attack, Seen, hostile_key, under_attack
from fedlens.attacks.attack import (
    alie,
    free_rider,
    gaussian,
    ipm,
    largest_hidden,
    mimic,
    min_max,
    min_sum,
    optimal_alie,
    optimal_ipm,
    scale,
    sign_flip,
)
from fedlens.config.names import ATTACKS, TRUST
from fedlens.core import Cohort, keys
from fedlens.runs.sweep import prepare
from fedlens.setup import build
from fedlens.setup.algorithm import attack_of
from tests.conformance.quadratics import DOUBLE, close, plain
from tests.conformance.test_robust import LAYOUT, some_updates
from tests.toys import toy


def updates_of(rows):  # [C, 5] as two tensors
    return {"w": rows[:, :2].clone(), "b": rows[:, 2:].clone()}


def flat(tree):
    return torch.cat([tree["w"], tree["b"]], -1)


def seen(honest=7, hostile=2, seed=0, defence=None):
    rows = some_updates(honest + hostile, seed)
    return Seen(
        updates_of(rows[:honest]),
        updates_of(rows[honest:]),
        keys.root(seed),
        defence or (lambda t: t),
    )


def sent(attack, known):
    return flat(attack.sending(known))


def test_what_is_sent_is_what_the_formulas_say():
    known = seen()
    honest, own = flat(known.honest), flat(known.own)
    mean, deviation = honest.mean(0, True), honest.std(0, correction=0, keepdim=True)
    close(sent(sign_flip(scale=2.0), known), -2 * own)
    close(sent(scale(), known), 9 / 2 * own)
    close(sent(ipm(epsilon=0.3), known), -0.3 * mean)
    close(sent(alie(z=1.5), known), mean - 1.5 * deviation)
    assert not sent(free_rider(), known).any()


def test_a_boosted_update_of_one_client_is_the_whole_mean():
    known = seen(honest=4, hostile=1)
    everyone = torch.cat([0 * flat(known.honest), sent(scale(), known)])
    close(everyone.mean(0), flat(known.own)[0])


def test_noise_has_its_deviation_and_differs_between_clients():
    rows = torch.zeros(4, 20_000, dtype=DOUBLE)
    known = Seen({"w": rows[:2]}, {"w": rows[2:]}, keys.root(1), lambda tree: tree)
    sending = gaussian(sigma=3.0).sending
    assert sending is not None
    found = sending(known)["w"]
    assert found.std().item() == pytest.approx(3, rel=0.02)
    assert abs(np.corrcoef(found.numpy())[0, 1]) < 0.05


def test_a_little_is_enough_has_the_z_of_its_paper():
    """n = 50, m = 24: s = 26 - 24 = 2, and Phi(1.43) = 24 / 26, as in the paper's section 3."""
    assert largest_hidden(50, 24) == pytest.approx(1.426, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_min_max_is_just_as_far_away_as_honest_updates_are_from_each_other(seed):
    known = seen(seed=seed)
    honest, found = flat(known.honest), sent(min_max(), known)
    close(torch.cdist(found, honest).max(), torch.cdist(honest, honest).max())


@pytest.mark.parametrize("seed", range(5))
def test_min_sum_is_just_as_far_from_all_as_an_honest_update_is(seed):
    known = seen(seed=seed)
    honest, found = flat(known.honest), sent(min_sum(), known)
    sums = torch.cdist(honest, honest).square().sum(1)
    close(torch.cdist(found, honest).square().sum(), sums.max())


@pytest.mark.parametrize(("best", "fixed"), [(optimal_ipm, ipm), (optimal_alie, alie)])
def test_the_strength_is_that_which_moves_the_defence_most(best, fixed):
    honest = seen().honest

    def defence(tree):
        each = {n: torch.cat([u, tree[n].expand(2, -1)]) for n, u in honest.items()}
        return {n: u.median(0).values for n, u in each.items()}

    known = seen(defence=defence)
    mean = flat(honest).mean(0)

    def moved(attack):
        return (flat(defence(attack.sending(known))) - mean).norm()

    assert moved(best()) >= moved(fixed())


def test_the_mimic_sends_what_one_honest_client_sends_along_the_main_direction():
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) * 0.1
    rows[:, 3] += torch.linspace(-5, 5, 8, dtype=DOUBLE)
    known = Seen(updates_of(rows), updates_of(rows[:2]), keys.root(0), lambda tree: tree)
    sending = mimic().sending
    assert sending is not None
    memory = sending.init({n: u[0] for n, u in known.honest.items()})
    for _ in range(5):
        found, memory = sending.update(known, memory)
    z = flat(memory)
    assert abs(z[3]) > 0.99
    assert any(torch.equal(flat(found)[0], rows[one]) for one in (0, 7))


def arrived(attack, base, rows, round=0):
    count = len(rows)
    ones = torch.ones(count, dtype=torch.int64)
    shares = torch.full((count,), 1 / count, dtype=DOUBLE)
    cohort = Cohort(torch.arange(count), ones, ones, shares, None, count, count)
    slot = under_attack(base, attack, seed=0).combine
    memory = slot.init({n: u[0] for n, u in updates_of(rows).items()})
    given = Received(updates_of(rows), shares, cohort, LAYOUT, memory, keys.root(round))
    return flat(slot.update(given)[0])


def test_only_the_hostile_clients_are_replaced():
    rows = some_updates(6)
    found = arrived(sign_flip(clients=(1, 4)), plain(6), rows)
    flipped = rows.clone()
    flipped[[1, 4]] *= -1
    close(found, flipped.mean(0))


def test_buffers_are_those_that_were_trained():
    rows = some_updates(4)
    tree = {**updates_of(rows), "running_mean": rows[:, :1].clone()}
    ones = torch.ones(4, dtype=torch.int64)
    shares = torch.full((4,), 0.25, dtype=DOUBLE)
    cohort = Cohort(torch.arange(4), ones, ones, shares, None, 4, 4)
    slot = under_attack(plain(4), scale(clients=1, factor=1e6), seed=0).combine
    found = slot.update(Received(tree, shares, cohort, LAYOUT, {}, keys.root(0)))[0]
    close(found["running_mean"], rows[:, :1].mean(0))
    assert found["w"].abs().max() > 1e4


@pytest.mark.parametrize("attack", [sign_flip(clients=2), optimal_ipm(clients=2), mimic(clients=2)])
@pytest.mark.parametrize("made", [median(), trimmed_mean(0.3), krum(byzantine=2)])
def test_what_a_defence_gives_stays_among_the_honest_updates(attack, made):
    rows = some_updates(9)
    hostile = attack.hostile(9, hostile_key(0))
    honest = rows[~hostile]
    found = arrived(attack, compose(plain(9), made), rows)
    assert (found <= honest.max(0).values + 1e-9).all()
    assert (found >= honest.min(0).values - 1e-9).all()


def test_as_many_are_hostile_as_were_asked_for_and_the_same_ones_in_every_round():
    key = hostile_key(3)
    assert Attack(0.2).hostile(10, key).sum() == 2
    assert Attack(3).hostile(10, key).sum() == 3
    assert Attack((1, 7)).hostile(10, key).nonzero().squeeze(1).tolist() == [1, 7]
    few, more = (Attack(count).hostile(10, key) for count in (2, 4))
    assert (few <= more).all()


def test_hostile_clients_may_be_drawn_anew_in_each_round():
    rows = some_updates(8)
    found = {tuple(arrived(sign_flip(clients=2, redraw=True), plain(8), rows, r)) for r in range(6)}
    assert len(found) > 1


EXPERIMENT = fl.Experiment(
    dataset=toy(96),
    model="linear",
    rounds=3,
    precision="fp64",
    engine="sequential",
    clients=fl.Clients(count=8, per_round=6),
    local=fl.LocalTraining(batch_size=4, lr=0.1),
)
OPTIONS: dict[str, dict[str, float]] = {
    "edge-case": {"source": 0, "target": 1},
    "backdoor": {"share": 1.0, "size": 2},
}


def described(name):
    return replace(EXPERIMENT, attack=fl.Named(name, {"clients": 0.25, **OPTIONS.get(name, {})}))


@pytest.mark.parametrize("name", ATTACKS)
def test_all_engines_see_the_same_attack(name):
    one = described(name)
    first, other = (fl.run(replace(one, engine=engine)) for engine in ("sequential", "stacked"))
    honest = fl.run(EXPERIMENT)
    for key, found in first.model.items():
        torch.testing.assert_close(found, other.model[key])
    assert any(not torch.equal(found, honest.model[key]) for key, found in first.model.items())


def test_points_of_a_sweep_under_different_attacks_are_those_of_single_runs():
    names = ["sign-flip", "alie", "label-flip"]
    swept = fl.sweep({name: replace(described(name), engine="stacked") for name in names})
    for name in names:
        alone = fl.run(replace(described(name), engine="stacked"))
        for key, found in alone.model.items():
            torch.testing.assert_close(found, swept[name].model[key])


def test_an_attacked_run_goes_on_where_it_stopped(tmp_path):
    one = replace(described("mimic"), rounds=4)
    whole = fl.run(one, out=tmp_path / "whole")
    fl.run(replace(one, rounds=2), out=tmp_path / "half")
    gone_on = fl.resume(tmp_path / "half", rounds=4, experiment=replace(one, rounds=2))
    assert all(torch.equal(t, gone_on.model[name]) for name, t in whole.model.items())


def test_a_backdoor_is_learned_and_measured():
    rounds = replace(described("backdoor"), rounds=30)
    bad = fl.run(
        replace(rounds, attack=fl.Named("backdoor", {"clients": 0.5, "share": 0.5, "size": 2}))
    )
    one = fl.run(
        replace(rounds, attack=fl.Named("backdoor", {"clients": 1, "share": 0.01, "size": 2}))
    )
    assert bad.final["backdoor_success"] > one.final["backdoor_success"]
    assert 0 <= one.final["backdoor_success"] <= bad.final["backdoor_success"] <= 1


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("alie", {"clients": 9}, "clients"),
        ("alie", {"clients": 0}, "share"),
        ("alie", {"clients": []}, "different"),
        ("alie", {"clients": 2.5}, "number"),
        ("alie", {"clients": [0, 0]}, "different"),
        ("alie", {"clients": [8]}, "different"),
        ("sign-flip", {"scale": -1.0}, "scale"),
        ("gaussian", {"sigma": math.nan}, "sigma"),
        ("label-flip", {"source": 1}, "both"),
        ("label-flip", {"source": 1, "target": 3}, "label"),
        ("backdoor", {"size": 40}, "side"),
        ("backdoor", {"target": 3}, "label"),
        ("backdoor", {"share": 0.0}, "share"),
        ("ally", {}, "unknown"),
    ],
)
def test_mistakes_are_told_before_anything_runs(name, options, word):
    with pytest.raises(ValueError, match=word):
        fl.run(replace(EXPERIMENT, attack=fl.Named(name, options)))


def test_a_root_that_is_no_client_is_told_before_anything_runs():
    with pytest.raises(ValueError, match="root"):
        build(replace(EXPERIMENT, algorithm=(fl.Named("fltrust", {"root": 8}),)))


def test_clients_that_draw_anew_have_no_data_to_poison():
    clients = replace(EXPERIMENT.clients, partition=fl.Named("fresh", {"per_class": 2}))
    with pytest.raises(ValueError, match="partition"):
        fl.run(replace(described("label-flip"), clients=clients))


def defended(*papers, attack="sign-flip", **options):
    named = fl.Named(attack, {"clients": (1, 4), **options})
    return replace(EXPERIMENT, clients=fl.Clients(count=8), algorithm=papers, attack=named)


@pytest.mark.parametrize(
    ("papers", "total"),
    [
        (("geometric-median", "bucketing"), 1),
        (("mda", "nnm"), 1),
        (({"name": "centred-clipping", "radius": 0.1},), None),
        (("norm-bound",), None),
    ],
)
def test_records_say_how_much_each_client_counts_if_a_defence_knows(papers, total):
    for record in fl.run(defended(*papers, scale=10.0)).records:
        count = dict(zip(record["clients"], record["trust"], strict=True))
        assert len(count) == 8
        if total:
            assert sum(count.values()) == pytest.approx(total)
        else:
            assert 0 < sum(count.values()) < 1
            assert max(count[k] for k in (1, 4)) < min(count[k] for k in (0, 2, 3, 5, 6, 7))
    assert "trust" not in fl.run(replace(defended("median"), rounds=1)).records[0]


def test_what_clients_count_is_that_of_their_bucket_and_of_their_neighbours():
    rows = some_updates(6)
    rows[2] = 100.0
    trust = {}
    for name, before in (("nnm", nnm(1)), ("bucketing", bucketing(2))):
        algorithm = compose(plain(6), krum(byzantine=0, keep=1), before)
        ones = torch.ones(6, dtype=torch.int64)
        cohort = Cohort(torch.arange(6), ones, ones, ones / 6, None, 6, 6)
        given = Received({"w": rows}, cohort.size_shares, cohort, LAYOUT, {}, keys.root(1))
        memory = algorithm.combine.update(given)[1]
        trust[name] = memory[TRUST][TRUST]
        assert memory[TRUST][TRUST].sum() == pytest.approx(1)
        assert memory[TRUST][TRUST][2] == 0
    assert sorted(trust["nnm"].tolist()) == pytest.approx([0, *[0.2] * 5])
    assert sorted(trust["bucketing"].tolist()) == pytest.approx([0, 0, 0, 0, 0.5, 0.5])


def test_points_of_a_sweep_under_attacks_on_updates_train_side_by_side():
    papers = [("fedavg",), ("median",), ("krum",)]
    points = {
        f"{paper[0]} {attack}": replace(defended(*paper, attack=attack), engine="stacked")
        for paper in papers
        for attack in ("sign-flip", "alie", "optimal-ipm")
    }
    assert "9 points in 2 stacks" in prepare(points).describe()
    swept = fl.sweep(points)
    for name in ("krum alie", "median optimal-ipm"):
        alone = fl.run(points[name])
        for key, found in alone.model.items():
            torch.testing.assert_close(found, swept[name].model[key])


def drawn(one):
    attack = attack_of(one)
    assert attack is not None
    return attack.hostile(8, hostile_key(one.seed))


def test_the_client_that_fltrust_trusts_is_never_drawn_as_hostile():
    for seed in range(6):
        one = replace(
            EXPERIMENT,
            seed=seed,
            algorithm=(fl.Named("fltrust", {"root": 3}),),
            attack=fl.Named("sign-flip", {"clients": 7}),
        )
        hostile = drawn(one).nonzero().flatten().tolist()
        assert hostile == [0, 1, 2, 4, 5, 6, 7]
        less = replace(one, attack=fl.Named("sign-flip", {"clients": 2}))
        others = drawn(replace(less, algorithm=()))
        if not others[3]:
            assert torch.equal(drawn(less), others)
    with pytest.raises(ValueError, match="another root"):
        fl.run(replace(one, attack=fl.Named("sign-flip", {"clients": [3]})))


@pytest.mark.parametrize(
    ("papers", "options", "words"),
    [
        (("krum",), {"clients": 2}, "2 of the 8 clients of a round are hostile, and krum withst"),
        (("trimmed-mean", "nnm"), {"clients": 2}, "trimmed-mean with nnm withstands 0"),
        (("fedavg",), {"clients": 8}, "all 8 clients are hostile"),
        (("krum",), {"clients": 1}, ""),
        (("fedavg",), {"clients": 3}, ""),
    ],
)
def test_more_than_a_defence_withstands_is_told_in_a_line(caplog, papers, options, words):
    fl.run(replace(defended(*papers, **options), rounds=1))
    found = [record.getMessage() for record in caplog.records]
    assert [words in one for one in found] == ([True] if words else [])


def test_hostile_clients_without_an_example_to_change_are_told(caplog):
    data = toy(96)
    kept = data.train.take((data.train.labels != 2).nonzero().squeeze(1))
    one = defended(attack="label-flip", source=2, target=0)
    fl.run(replace(one, dataset=replace(data, train=kept), rounds=1))
    assert "no example" in caplog.text
