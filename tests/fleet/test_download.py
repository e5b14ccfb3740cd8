"""The way down in few bits: a site is sent what it does not have."""

import fedlens as fl
from fedlens.fleet.terms import for_fleet
from fedlens.storage.run_files import read_records
from tests.fleet.sites import Nearby, make_sites, model_bytes, run_nearby, write_experiment

ALL = "reporting = { quorum = 1.0 }\n"


def ran(tmp_path, change=None, more=ALL, rounds=4):
    path = write_experiment(
        tmp_path, '{ name = "download", bits = 8 }', more, rounds=rounds, per_round=4
    )
    sites, nearby = make_sites(path, tmp_path / "sites"), list[Nearby]()
    run_nearby(path, tmp_path / "fleet", sites, change, nearby=nearby)
    text = path.read_text().replace("secure = true", 'secure = "simulated"')
    path.write_text(text)
    fl.run(for_fleet(fl.Experiment.read(path)), tmp_path / "here")
    assert model_bytes(tmp_path / "fleet") == model_bytes(tmp_path / "here")
    return nearby[-1], sites


def test_who_has_the_model_is_sent_the_difference_and_who_lost_it_the_model(tmp_path):
    lost = list[int]()

    def change(name, what, arrived):
        if what == "train" and name == "bob" and "refused" not in arrived.facts:
            folder = next((tmp_path / "sites" / "bob" / "memory").iterdir()) / "model"
            if len(lost) < 1:  # after the first round
                lost.append(len([one.unlink() for one in folder.iterdir()]))
        return arrived

    sent, sites = ran(tmp_path, change)
    assert lost == [1]
    kinds = {name: list[bool]() for name in ("ann", "bob")}
    for name, what, tensors in sent.sent:
        if what == "train" and name in kinds:
            kinds[name].append(any(one.startswith("params/") for one in tensors))
    assert kinds["ann"] == [True, False, False, False]
    assert kinds["bob"] == [True, False, True, False, False]  # the second was refused
    refused = [r.facts["refused"] for _, what, r in sent.replies if "refused" in r.facts]
    assert refused == ["it has lost the model of the round before"]
    folders = [next((site.home / "memory").iterdir()) / "model" for site in sites]
    assert all(len([*folder.iterdir()]) == 2 for folder in folders)


def test_sums_are_secure_too_where_some_are_sent_the_model_and_some_the_difference(tmp_path):
    ran(tmp_path, more=ALL + "aggregation = { secure = true }\n", rounds=3)


def test_what_comes_down_is_counted_as_it_is(tmp_path):
    sent, _ = ran(tmp_path)
    records = read_records(tmp_path / "fleet")
    numbers = 4 * 192 + 4
    assert records[0]["bytes_down"] == 4 * 4 * numbers
    assert records[1]["bytes_down"] == 4 * (numbers + 2 * 4)
    counted = sum(record["bytes_down"] for record in records)
    trained = [tensors for _, what, tensors in sent.sent if what == "train"]
    assert counted == sum(t.nbytes for tensors in trained for t in tensors.values())
