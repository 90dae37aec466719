"""Private runs from start to end: who takes part, what records state, what a resumed run repeats, what is kept."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_runs import SERVER, normal_federation, plain_model, private_config, settings

import fedhm
from fedhm.config.schema import FederationConfig, PrivacyConfig
from fedhm.errors import FedhmError
from fedhm.machine import files
from fedhm.report.result import Result
from fedhm.runs.privacy import LENGTH, ROUNDS_FILE, SECRET_FILE
from fedhm.runs.rounds import append_record, read_records
from fedhm.runs.verify import verify_run
from fedhm.server.filters.privacy import ORDERS, epsilon, epsilon_after
from fedhm.server.record import Record
from fedhm.server.sampling import expected_to_train, poisson_sample
from fedhm.work.messages import Participant
from run_outcome import outcome

LOCAL = {"clip": 0.5, "noise": 4.0, "where": "client"}
no_figures = pytest.mark.usefixtures("without_figures")


def run(out: Path | None = None, **sections: dict[str, Any]) -> Result:
    there = normal_federation()
    assert there.test is not None
    clients = [(samples.inputs, samples.labels) for samples in there.clients]
    return fedhm.run(plain_model(), clients, (there.test.inputs, there.test.labels), settings(**sections), out)


@pytest.fixture
def known_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhm.runs.privacy.new_secret", lambda: b"k" * LENGTH)
    monkeypatch.setattr("fedhm.experiment.new_secret", lambda: b"k" * LENGTH)


def stated(where: str, q: float, z: float, times: int, delta: float) -> float:
    """ε as the accountant itself has it."""
    import dp_accounting as dp  # takes seconds
    from dp_accounting.rdp import RdpAccountant

    step = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)) if where == "server" else dp.GaussianDpEvent(z / 2)
    accountant = RdpAccountant(ORDERS)
    for _ in range(times):
        accountant.compose(step)
    return float(accountant.get_epsilon(delta))


@no_figures
def test_records_state_what_the_accountant_says(tmp_path: Path) -> None:
    result = run(tmp_path / "run", privacy={**SERVER, "delta": 1e-3})
    expected = [stated("server", 0.5, 1.0, rounds, 1e-3) for rounds in (1, 2, 3)]
    assert [record.epsilon for record in result.records] == pytest.approx(expected, rel=1e-12)
    file = tmp_path / "run" / "records.jsonl"
    stated_on_disk = [json.loads(line)["epsilon"] for line in file.read_text().splitlines()]
    assert stated_on_disk == [record.epsilon for record in result.records]
    assert read_records(file)[0].epsilon == result.records[0].epsilon
    assert "epsilon" not in json.loads(replace(result.records[0], epsilon=None).to_json())


def test_local_noise_counts_the_rounds_of_whoever_was_asked_most_often() -> None:
    config = private_config(privacy=LOCAL)
    records = [Record(n, [Participant(c, "full") for c in clients]) for n, clients in enumerate([(0, 1), (1,), (1, 2)])]
    assert epsilon_after(records, config) == pytest.approx(stated("client", 1, 4.0, 3, 1e-5), rel=1e-12)
    assert epsilon_after(records[:1], config) == pytest.approx(stated("client", 1, 4.0, 1, 1e-5), rel=1e-12)
    assert epsilon_after([Record(1)], config) == 0


def test_without_noise_no_epsilon_is_stated() -> None:
    assert epsilon_after([Record(1)], private_config(privacy={"clip": 1.0, "noise": 0.0})) is None


def test_a_run_that_may_end_early_states_what_all_its_rounds_cost() -> None:
    config = private_config(stop={"patience": 1}, train={"rounds": 7})
    assert epsilon_after([Record(1)], config) == pytest.approx(stated("server", 1.0, 1.0, 7, 1e-5), rel=1e-12)


def test_epsilon_grows_with_rounds_and_falls_with_noise() -> None:
    found = [epsilon(PrivacyConfig(clip=1, noise=z), 0.1, rounds) for z in (1.0, 2.0) for rounds in (1, 100)]
    assert found[2] < found[0] < found[1]
    assert found[2] < found[3] < found[1]


def test_every_client_is_sampled_independently() -> None:
    config, rounds, clients = FederationConfig(participation=0.3), 400, 12
    drawn = [poisson_sample(config, clients, ("full", "1/2"), 0, number, b"s" * 32) for number in range(rounds)]
    taken = torch.zeros(rounds, clients)
    for number, chosen in enumerate(drawn):
        assert [p.client for p in chosen] == sorted(p.client for p in chosen)
        assert all(p.tier == ("1/2" if p.client % 2 else "full") for p in chosen)
        taken[number, [p.client for p in chosen]] = 1
    assert taken.mean(0).tolist() == pytest.approx([0.3] * clients, abs=4 * (0.21 / rounds) ** 0.5)
    pairs = (taken.T @ taken / rounds)[torch.triu(torch.ones(clients, clients), 1).bool()]
    assert pairs.tolist() == pytest.approx([0.09] * len(pairs), abs=4.5 * (0.09 * 0.91 / rounds) ** 0.5)
    assert taken.sum(1).var().item() == pytest.approx(12 * 0.21, rel=0.35)  # 0 if their number were fixed
    other = poisson_sample(config, clients, ("full",), 0, 1, b"t" * 32)
    assert [p.client for p in other] != [p.client for p in drawn[1]]


def test_the_divisor_is_the_number_of_clients_to_expect() -> None:
    levels, tiers = ("full", "1/2", "1/4"), ("full",)
    config = FederationConfig(participation=0.5)
    assert expected_to_train(config, 8, levels, levels) == 4
    assert expected_to_train(config, 8, levels, tiers) == 1.5  # clients 0, 3 and 6
    assert expected_to_train(config.model_copy(update={"heterogeneity": "dynamic"}), 9, levels, tiers) == 1.5
    assigned = config.model_copy(update={"assignment": ("full", "full", "1/2")})
    assert expected_to_train(assigned, 3, levels, tiers) == 1


@no_figures
def test_the_secret_is_the_owners_only(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    kept = [tmp_path / name / SECRET_FILE for name in ("a", "b")]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    assert kept[0].read_bytes() != kept[1].read_bytes()
    assert kept[0].read_bytes().hex() not in (tmp_path / "a" / "config.toml").read_text()
    assert outcome(tmp_path / "a")["full.safetensors"] != outcome(tmp_path / "b")["full.safetensors"]


@no_figures
@pytest.mark.usefixtures("known_secret")
@pytest.mark.parametrize("privacy", [SERVER, LOCAL], ids=["server", "client"])
def test_results_do_not_depend_on_the_number_of_workers(tmp_path: Path, privacy: dict[str, Any]) -> None:
    train = {**settings()["train"], "max_change": 0}
    for workers in (1, 2):
        run(tmp_path / str(workers), privacy=privacy, train=train, engine={"threads": 1, "workers": workers})
    assert outcome(tmp_path / "1") == outcome(tmp_path / "2")


class KilledError(BaseException):
    """Ends a run as SIGKILL does: nobody tidies up."""


@no_figures
@pytest.mark.usefixtures("known_secret")
@pytest.mark.parametrize("privacy", [SERVER, LOCAL], ids=["server", "client"])
@pytest.mark.parametrize("writes", [3, 6])
def test_an_interrupted_run_repeats_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, privacy: dict[str, Any]
) -> None:
    sections = {"privacy": privacy, "train": {**settings()["train"], "max_change": 0}}
    run(tmp_path / "whole", **sections)
    real, count = files.write_atomically, 0

    def dying(path: Path, content: bytes | str) -> None:
        nonlocal count
        count += 1
        if count == writes:
            raise KilledError
        real(path, content)

    with monkeypatch.context() as patch:
        for place in ("fedhm.machine.tensors", "fedhm.machine.seal", "fedhm.runs.folder", "fedhm.runs.rounds"):
            patch.setattr(f"{place}.write_atomically", dying)
        with pytest.raises(KilledError):
            run(tmp_path / "cut", **sections)
    monkeypatch.setattr("fedhm.runs.privacy.new_secret", lambda: b"another secret, of 32 bytes ... ")
    run(tmp_path / "cut", **sections)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@no_figures
def test_without_its_secret_a_run_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path / "run")
    file = tmp_path / "run" / SECRET_FILE
    kept = file.read_bytes()
    file.write_bytes(kept[:7])
    with pytest.raises(FedhmError, match="is damaged; without it a private run cannot be resumed"):
        run(tmp_path / "run")
    file.unlink()
    with pytest.raises(FedhmError, match="put it back"):
        run(tmp_path / "run")


@no_figures
def test_a_private_run_is_not_rewound(tmp_path: Path) -> None:
    changes = ["privacy.clip=1", "privacy.noise=1", "train.rounds=3", "train.masked_loss=false", "train.epochs=1"]
    changes += ["method.aggregate=updates", "evaluation.static_from=never", "federation.clients=4", "model.width=0.1"]
    config = fedhm.load_config("digits", changes).resolved()
    with fedhm.runs.folder.RunFolder.create(tmp_path / "run", config) as folder:
        fedhm.prepare(config).run(folder)
    with pytest.raises(FedhmError, match="a private run, which cannot be rewound"):
        fedhm.resume(tmp_path / "run", from_round=2)
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        checkpoint.unlink()
    with pytest.raises(FedhmError, match="done 3 rounds, and the checkpoint of the last is missing: put it back"):
        fedhm.resume(tmp_path / "run")
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before
    file = tmp_path / "run" / "records.jsonl"
    append_record(file, replace(read_records(file)[-1], round=4))
    with pytest.raises(FedhmError, match="a private run, which cannot be rewound"):
        fedhm.resume(tmp_path / "run")


def test_rounds_in_which_nobody_takes_part() -> None:
    result = run(federation={"participation": 1e-9})
    assert [record.participants for record in result.records] == [[], [], []]
    assert all(record.metrics for record in result.records)


@no_figures
def test_verify_covers_the_secret_and_the_number_of_rounds(tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert not any(state.bad for state in verify_run(tmp_path / "run"))
    for name in (SECRET_FILE, ROUNDS_FILE):
        file = tmp_path / "run" / name
        intact = file.read_bytes()
        for position in range(len(intact)):
            damaged = bytearray(intact)
            damaged[position] ^= 1
            file.write_bytes(damaged)
            assert [state.name for state in verify_run(tmp_path / "run") if state.bad] == [name]
        file.write_bytes(intact)
