"""The variants of FedHM in its published code: averaged factors, and classifier rows of absent labels."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fedhm import answer, both_forms, paper, round_of, start
from torch import Tensor

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_full
from fedhm.lowrank.svd import product_spectrum
from fedhm.methods.fedhm import FedHM, FedHMConfig
from fedhm.methods.method import Setup
from fedhm.networks.exchange import load
from fedhm.server.state import flatten

FACTORS = {"aggregate": "factors", "tiers": [0.25]}
CLASSIFIER = "9"


@both_forms
@pytest.mark.parametrize("weighting", ["uniform", "samples", "softmax"])
def test_averaged_factors_are_fedavg_of_the_hybrid_networks_state(form: str, weighting: str) -> None:
    model = small_model().double()
    method = FedHM(model, paper({**FACTORS, "form": form, "weighting": weighting}))
    state = start(method, model)
    for number in (1, 2):  # the second round begins with factors that are no decomposition
        before = method.weights(state, "1/4")
        updates = [answer(task, number, samples=task.client + 1) for task in round_of(method, state, ["1/4"] * 3)]
        state = method.merge(state, iter(updates), number)
        shares = [1 / 6, 2 / 6, 3 / 6] if weighting == "samples" else [1 / 3] * 3
        after = method.weights(state, "1/4")
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            expected = sum(share * update.tensors[name] for share, update in zip(shares, updates, strict=True))
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
    # the full model that the state holds is the one that the tier's network stands for
    full = to_full(load(method.network(method.spec("1/4")), method.weights(state, "1/4")))
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, full[name], rtol=1e-12, atol=1e-12)
    assert state.diagnostics["energy_beyond/1/4"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("masked_loss", [True, False])
def test_a_whole_run_is_fedavg_of_the_hybrid_network_bit_for_bit(federation: Federation, masked_loss: bool) -> None:
    runs = []
    for method in ({"name": "fedhm", **FACTORS}, {"name": "fedavg", "tier": 0.25}):
        config = small_config(method=method, train={"rounds": 3, "masked_loss": masked_loss})
        runs.append(assemble(small_model(), federation, config).run())
    states = [run.networks["1/4"].state_dict() for run in runs]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.usefixtures("without_figures")
def test_a_run_of_averaged_factors_resumes_exactly(federation: Federation, tmp_path: Path) -> None:
    model, clients = small_model(), [(s.tensor, s.labels) for s in federation.clients]
    assert federation.test is not None
    test = (federation.test.tensor, federation.test.labels)

    def run(folder: str, rounds: int) -> fedhm.Result:
        config = small_config(method={"name": "fedhm", **FACTORS, "warmup": 1}, train={"rounds": rounds})
        return fedhm.run(model, clients, test, config.model_dump(mode="json", exclude_none=True), tmp_path / folder)

    whole = run("whole", 4)
    with pytest.MonkeyPatch.context() as patch:
        merge = FedHM.merge

        def until_the_third(self: FedHM, state: object, updates: object, number: int) -> object:
            if number == 3:
                raise KeyboardInterrupt
            return merge(self, state, updates, number)  # type: ignore[arg-type]

        patch.setattr(FedHM, "merge", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            run("broken", 4)
    resumed = run("broken", 4)
    for name, tensor in whole.networks["1/4"].state_dict().items():
        assert torch.equal(tensor, resumed.networks["1/4"].state_dict()[name]), name


def test_the_state_is_of_the_same_types_as_any_other() -> None:
    model = small_model()
    method = FedHM(model, paper(FACTORS))
    state = start(method, model)
    merged = method.merge(state, (answer(task) for task in round_of(method, state, ["1/4"] * 2)), 1)
    before, after = (flatten(each) for each in (state, merged))
    assert type(before) is type(after)
    assert merged.weights.keys() == state.weights.keys()
    assert {n: (t.shape, t.dtype) for n, t in merged.weights.items()} == {
        n: (t.shape, t.dtype) for n, t in state.weights.items()
    }


@settings(deadline=None, max_examples=40)
@given(sizes=st.tuples(*[st.integers(1, 12)] * 3), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_the_spectrum_of_a_product_is_found_without_the_product(
    sizes: tuple[int, int, int], seed: int, scale: float
) -> None:
    rows, rank, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    left = scale * torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, columns, generator=generator, dtype=torch.float64)
    expected, found = torch.linalg.svdvals(left @ right), product_spectrum(left, right)
    shared = min(len(expected), len(found))
    torch.testing.assert_close(found[:shared], expected[:shared], rtol=1e-9, atol=1e-9 * scale)
    assert found[shared:].abs().sum() <= 1e-9 * scale


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"aggregate": "factors"}, "averages factors of one shape: let all clients have one tier, without replan"),
        ({"absent_labels": "zero"}, "aggregate = 'bands' averages changes: set aggregate = 'models'"),
    ],
)
def test_settings_that_contradict_each_other_are_one_sentence(method: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence) as error:
        small_config(method={"name": "fedhm", **method})
    assert "\n" not in str(error.value)


def test_a_server_optimizer_has_no_factors_to_step_on(federation: Federation) -> None:
    config = small_config(method={"name": "fedhm", **FACTORS}, server={"optimizer": "momentum"})
    with pytest.raises(FedhmError, match="keeps the clients' mean as factors"):
        assemble(small_model(), federation, config)


HELD = [None, (0, 2), (1, 2)]  # labels of three clients: a full one, and two of a low rank


def merged_classifier(absent: str, tiers: list[str], more: dict[str, object]) -> tuple[list[Tensor], Tensor]:
    """The classifier's rows of each client, and their mean."""
    model = small_model().double()
    method = FedHM(model, FedHMConfig.model_validate({**more, "absent_labels": absent}), Setup(CLASSIFIER))
    state = start(method, model)
    tasks = round_of(method, state, tiers)
    updates = [answer(task, labels=held) for task, held in zip(tasks, HELD, strict=True)]
    mean = method.merge(state, iter(updates), 1).weights[f"{CLASSIFIER}.weight"]
    return [update.tensors[f"{CLASSIFIER}.weight"] for update in updates], mean


@pytest.mark.parametrize(
    ("tiers", "more"),
    [
        (["full", "1/2", "1/4"], {"aggregate": "models"}),
        (["1/4", "1/4", "1/4"], FACTORS),
    ],
    ids=["models", "factors"],
)
def test_rows_of_absent_labels_are_left_out_counted_or_zero(tiers: list[str], more: dict[str, object]) -> None:
    holders = [[0, 1], [0, 2], [0, 1, 2], [0]]  # clients that hold labels 0 to 3
    rows, left_out = merged_classifier("leave-out", tiers, more)
    _, counted = merged_classifier("count", tiers, more)
    _, zero = merged_classifier("zero", tiers, more)
    for label, clients in enumerate(holders):
        held = [rows[client][label] for client in clients]
        torch.testing.assert_close(left_out[label], sum(held) / len(held))
        torch.testing.assert_close(counted[label], sum(row[label] for row in rows) / 3)
        torch.testing.assert_close(zero[label], sum(held) / 3)  # the rows shrink: the published code's rule


def test_a_client_of_the_full_network_never_counts_with_zeros() -> None:
    rows, mean = merged_classifier("zero", ["1/2", "1/2", "full"], {"aggregate": "models"})
    torch.testing.assert_close(mean[0], (rows[0][0] + rows[1][0] + rows[2][0]) / 3)  # the last one lacks label 0
    torch.testing.assert_close(mean[1], (rows[0][1] + rows[2][1]) / 3)
