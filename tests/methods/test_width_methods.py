"""The methods of widths: their published rules on small cases, and what each becomes in its limits."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import Config
from fedhm.config.section import width_name
from fedhm.data.federation import Federation
from fedhm.engines.engine import Engine
from fedhm.measure.cost import measure, training_memory
from fedhm.methods.fedrolex import FedRolex, FedRolexConfig
from fedhm.methods.fjord import FjORD, FjORDConfig
from fedhm.methods.heterofl import HeteroFL, HeteroFLConfig
from fedhm.methods.method import Setup
from fedhm.methods.slimmed import Slimmed, SlimmedConfig
from fedhm.methods.splitmix import SplitMix, SplitMixConfig
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.runs.models import load_tier, save_tier
from fedhm.work.messages import Participant, Reply, Task, Update

SETUP = Setup("9", torch.zeros(1, 1, 6, 6), seed=3)


def run(fed: Federation, method: dict[str, object], **sections: dict[str, object]) -> Result:
    train = {"rounds": 3, "epochs": 1, **sections.pop("train", {})}
    return assemble(small_model(), fed, small_config(method=method, train=train, **sections)).run()


def answer(task: Task, tensors: Tensors, labels: tuple[int, ...] | None = None, samples: int = 1) -> Update:
    return Update("train", task.round, task.client, task.tier, task.network, tensors, samples, labels, 0.5)


def assert_same(one: Tensors, other: Tensors, *, exactly: bool = True) -> None:
    assert set(one) == set(other)
    for name in one:
        if exactly:
            assert torch.equal(one[name], other[name]), name
        else:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


class Renaming:
    """A task's network seeds its batches: called as in another method, the same network learns the same."""

    def __init__(self, inner: Engine, old: str, new: str) -> None:
        self._inner, self._old, self._new = inner, old, new

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        sent = list(tasks)
        renamed = [
            replace(t, network=replace(t.network, label=self._new)) if str(t.network) == self._old else t for t in sent
        ]
        for reply in self._inner.run(renamed):
            yield replace(reply, network=sent[reply.position].network) if isinstance(reply, Update) else reply

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_heterofl_at_width_one_is_fedavg(federation: Federation, weighting: str) -> None:
    fedavg = run(federation, {"name": "fedavg", "weighting": weighting})
    method = {"name": "heterofl", "tiers": [1], "weighting": weighting}
    heterofl = run(federation, method, train={"clip_norm": 0.0})  # by default, only HeteroFL clips gradients
    one, other = exchanged_tensors(heterofl.networks["full"]), exchanged_tensors(fedavg.networks["full"])
    assert_same(one, other, exactly=weighting == "uniform")  # αₚ = 20 samples is multiplied and divided out


@pytest.mark.parametrize("base", [1.0, 0.5])
def test_splitmix_with_one_base_is_fedavg_on_that_width(federation: Federation, base: float) -> None:
    slimmed = run(federation, {"name": "slimmed", "width": base})
    method = {"name": "splitmix", "base": base, "tiers": [1], "rescaled_init": False, "scaler": False}
    experiment = assemble(small_model(), federation, small_config(method=method, train={"rounds": 3, "epochs": 1}))
    experiment.engine = Renaming(experiment.engine, "base 0", width_name(base))
    splitmix = experiment.run()
    ours = {n.removeprefix("members.0."): t for n, t in exchanged_tensors(splitmix.networks[f"1x{base:g}"]).items()}
    assert_same(ours, exchanged_tensors(slimmed.networks[width_name(base)]))


@pytest.mark.parametrize("scaler", [True, False])
def test_fedrolex_that_never_rolls_is_heterofl(federation: Federation, scaler: bool) -> None:
    widths = [1, 0.5, 0.25]
    still = run(federation, {"name": "fedrolex", "tiers": widths, "roll": 0, "scaler": scaler})
    heterofl = run(federation, {"name": "heterofl", "tiers": widths, "scaler": scaler})
    for tier, network in heterofl.networks.items():
        assert_same(exchanged_tensors(still.networks[tier]), exchanged_tensors(network))
    rolling = run(federation, {"name": "fedrolex", "tiers": widths, "scaler": scaler})
    name = "3.weight"
    assert not torch.equal(
        exchanged_tensors(rolling.networks["full"])[name], exchanged_tensors(still.networks["full"])[name]
    )


def test_fjord_with_one_width_is_heterofl_of_that_width(federation: Federation) -> None:
    fjord = run(federation, {"name": "fjord", "tiers": [0.5]})
    method = {"name": "heterofl", "tiers": [0.5], "scaler": False}
    train = {"rounds": 3, "epochs": 1, "clip_norm": 0.0}  # by default, only HeteroFL clips gradients
    experiment = assemble(small_model(), federation, small_config(method=method, train=train))
    experiment.engine = Renaming(experiment.engine, "w0.5", "ordered w0.5")
    heterofl = experiment.run()
    # drawing the width of a batch uses the network's generator, which nothing else here does
    assert_same(exchanged_tensors(fjord.networks["w0.5"]), exchanged_tensors(heterofl.networks["w0.5"]))


def test_fjord_has_nothing_to_distil_at_one_width(federation: Federation) -> None:
    plain, distilling = (
        run(federation, {"name": "fjord", "tiers": [0.5], "distil": distil}) for distil in (False, True)
    )
    assert_same(exchanged_tensors(plain.networks["w0.5"]), exchanged_tensors(distilling.networks["w0.5"]))


def test_heterofl_averages_each_number_over_those_who_hold_it() -> None:
    """Against the rule written out: two clients of half the width, one of all of it; labels are missing."""
    model = small_model()
    method = HeteroFL(model, HeteroFLConfig(tiers=(1.0, 0.5)), SETUP)
    state = method.start(exchanged_tensors(model))
    people = [Participant(0, "full"), Participant(1, "w0.5"), Participant(2, "w0.5")]
    tasks = list(method.tasks(state, people, 1))
    assert tasks[1].tensors["3.weight"].shape == (8, 4, 3, 3)
    assert torch.equal(tasks[1].tensors["3.weight"], state.weights["3.weight"][:8, :4])
    values = {0: 1.0, 1: 2.0, 2: 4.0}
    labels = {0: (0, 1), 1: (1, 2), 2: None}
    updates = [
        answer(t, {n: torch.full_like(x, values[t.client]) for n, x in t.tensors.items()}, labels[t.client])
        for t in tasks
    ]
    merged = method.merge(state, updates, 1).weights
    inner = torch.full((16, 8, 3, 3), 1.0)
    inner[:8, :4] = 7 / 3
    torch.testing.assert_close(merged["3.weight"], inner)
    rows = [(1 + 4) / 2, (1 + 2 + 4) / 3, (2 + 4) / 2, 4.0]  # who holds the label
    torch.testing.assert_close(merged["9.weight"][:, :12], torch.tensor(rows)[:, None].expand(4, 12))
    beyond = merged["9.weight"][:, 12:]
    assert torch.equal(beyond[:2], torch.ones(2, 12))  # only the full client has these columns
    assert torch.equal(beyond[2:], state.weights["9.weight"][2:, 12:])  # nobody trained them
    torch.testing.assert_close(merged["9.bias"], torch.tensor(rows))


def test_fedrolex_trains_every_channel_in_turn() -> None:
    model = small_model()
    method = FedRolex(model, FedRolexConfig(tiers=(0.5,)), SETUP)
    state = method.start(exchanged_tensors(model))
    for round_number in range(1, 17):
        tasks = list(method.tasks(state, [Participant(0, "w0.5")], round_number))
        window = [(round_number - 1 + i) % 16 for i in range(8)]
        assert torch.equal(tasks[0].tensors["4.weight"], state.weights["4.weight"][window])
        state = method.merge(state, [answer(t, {n: x + 1 for n, x in t.tensors.items()}) for t in tasks], round_number)
        assert torch.equal(method.weights(state, "w0.5")["4.weight"], state.weights["4.weight"][window])
    torch.testing.assert_close(
        state.weights["4.weight"], exchanged_tensors(model)["4.weight"] + 8
    )  # each in half the rounds


def test_ordered_dropout_trains_the_leading_channels_of_every_width_up_to_its_own() -> None:
    model = small_model()
    method = FjORD(model, FjORDConfig(tiers=(1.0, 0.5, 0.25)), SETUP)
    tasks = method.tasks(method.start(exchanged_tensors(model)), [Participant(0, "w0.5")], 1)
    network = load(method.network(NetworkSpec("w0.5", variant="ordered")), next(tasks).tensors).train()
    narrow = method.slices
    x = torch.randn(8, 1, 6, 6)
    own = {n.removeprefix("network."): t for n, t in exchanged_tensors(network).items()}
    expected = {}
    for tier in ("w0.5", "w0.25"):
        smaller = narrow.network(NetworkSpec(tier)).train()
        shapes = {n: t.shape for n, t in exchanged_tensors(smaller).items()}
        load(smaller, {n: own[n][tuple(slice(s) for s in shape)] for n, shape in shapes.items()})
        expected[tier] = smaller(x).detach()
    seen = Counter[str]()
    torch.manual_seed(0)
    for _ in range(40):
        network.zero_grad()
        scores = network(x)
        scores.square().sum().backward()
        tier = next(t for t, want in expected.items() if torch.allclose(scores, want, atol=1e-6))
        seen[tier] += 1
        gradient = network.network[3].weight.grad  # type: ignore[index,union-attr]
        beyond = gradient[4:].abs().sum() + gradient[:, 2:].abs().sum()
        assert (beyond == 0) == (tier == "w0.25")
    assert min(seen["w0.5"], seen["w0.25"]) > 10
    assert torch.allclose(network.eval()(x), network(x))  # in evaluation always its own width


def test_a_client_of_the_smallest_tier_trains_only_its_width() -> None:
    method = FjORD(small_model(), FjORDConfig(tiers=(1.0, 0.25)), SETUP)
    assert len(method.network(NetworkSpec("w0.25", variant="ordered"))._narrower) == 0  # type: ignore[arg-type]
    assert len(method.network(NetworkSpec("full", variant="ordered"))._narrower) == 1  # type: ignore[arg-type]


def test_splitmix_trains_all_bases_equally_often() -> None:
    method = SplitMix(small_model(), SplitMixConfig(base=0.25, tiers=(4, 2, 1)), SETUP)
    state = method.start(exchanged_tensors(small_model()))
    smallest = [Participant(client, "1x0.25") for client in range(3)]
    counts = Counter(t.network for r in range(1, 9) for t in method.tasks(state, smallest, r))
    assert set(counts.values()) == {6}  # 8 rounds × 3 participants over 4 bases
    for r in range(1, 5):
        for tier, budget in (("4x0.25", 4), ("2x0.25", 2)):
            bases = [t.network for t in method.tasks(state, [Participant(5, tier)], r)]
            assert len(bases) == len(set(bases)) == budget


def test_splitmix_ensembles_logits_of_the_first_bases() -> None:
    model = small_model()
    method = SplitMix(model, SplitMixConfig(base=0.5, tiers=(3, 2, 1)), SETUP)
    state = method.start(exchanged_tensors(model))
    x = torch.randn(5, 1, 6, 6)
    singles = [load(method.network(NetworkSpec("w0.5", variant="base")), base).eval()(x) for base in state.bases]
    for tier, count in (("3x0.5", 3), ("2x0.5", 2), ("1x0.5", 1)):
        mixed = load(method.network(method.spec(tier)), method.weights(state, tier)).eval()(x)
        torch.testing.assert_close(mixed, sum(singles[:count]) / count)
    assert not torch.allclose(singles[0], singles[1])  # bases start apart


def test_splitmix_averages_each_base_over_those_who_trained_it() -> None:
    model = small_model()
    method = SplitMix(model, SplitMixConfig(base=0.5, tiers=(2, 1)), SETUP)
    state = method.start(exchanged_tensors(model))
    tasks = list(method.tasks(state, [Participant(0, "2x0.5"), Participant(1, "1x0.5")], 1))
    assert len(tasks) == 3
    updates = [answer(t, {n: torch.full_like(x, float(i)) for n, x in t.tensors.items()}) for i, t in enumerate(tasks)]
    merged = method.merge(state, updates, 1).bases
    for base in range(2):
        values = [float(i) for i, t in enumerate(tasks) if t.network.number == base]
        torch.testing.assert_close(merged[base]["3.weight"], torch.full((8, 4, 3, 3), sum(values) / len(values)))


def test_initial_scales() -> None:
    """Split-Mix starts as small as the full width; a slimmed network as torch would initialise it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    setup = Setup("4", torch.zeros(1, 50))
    full = exchanged_tensors(model)
    slimmed = Slimmed(model, SlimmedConfig(width=0.25), setup).start(full).weights
    bases = SplitMix(model, SplitMixConfig(base=0.25, tiers=(2, 1)), setup).start(full).bases
    fresh = nn.Linear(100, 100).weight.std().item()
    assert slimmed["2.weight"].std().item() == pytest.approx(fresh, rel=0.05)
    for base in range(2):
        assert bases[base]["2.weight"].std().item() == pytest.approx(fresh * 0.25**0.5, rel=0.05)
    assert torch.equal(bases[0]["0.weight"], full["0.weight"][:100])
    assert torch.equal(slimmed["0.weight"], full["0.weight"][:100])  # the stem has all its inputs


def test_fjord_is_charged_for_the_widths_that_it_draws() -> None:
    method = FjORD(small_model(), FjORDConfig(tiers=(1.0, 0.5, 0.25)), SETUP)
    macs = [measure(method.network(method.spec(tier)), (1, 6, 6)).macs for tier in method.tiers]
    assert measure(method.network(NetworkSpec("full", variant="ordered")), (1, 6, 6)).macs == sum(macs) // 3
    assert measure(method.network(NetworkSpec("w0.25", variant="ordered")), (1, 6, 6)).macs == macs[-1]
    # the convolutions of narrower widths have code of their own in memory; no more than that is there at a time
    ordered = {training_memory(method.network(NetworkSpec("full", variant="ordered")), (1, 6, 6), 8) for _ in range(4)}
    assert len(ordered) == 1
    expected = ordered.pop()
    assert expected > training_memory(method.network(method.spec("full")), (1, 6, 6), 8)
    distilling = FjORD(small_model(), FjORDConfig(tiers=(1.0, 0.5, 0.25), distil=True), SETUP)
    assert (
        measure(distilling.network(NetworkSpec("full", variant="ordered")), (1, 6, 6)).macs
        == macs[0] + (macs[1] + macs[2]) // 3
    )
    assert measure(distilling.network(NetworkSpec("w0.25", variant="ordered")), (1, 6, 6)).macs == macs[-1]
    taken = {
        training_memory(distilling.network(NetworkSpec("full", variant="ordered")), (1, 6, 6), 8) for _ in range(4)
    }
    assert len(taken) == 1
    assert taken.pop() > expected


METHODS = [
    {"name": "slimmed", "width": 0.5},
    {"name": "heterofl", "tiers": [1, 0.5, 0.25]},
    {"name": "fedrolex", "tiers": [1, 0.5, 0.25]},
    {"name": "fjord", "tiers": [1, 0.5, 0.25]},
    {"name": "fjord", "tiers": [1, 0.5, 0.25], "distil": True},
    {"name": "splitmix", "base": 0.25, "tiers": [4, 2, 1]},
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
@pytest.mark.parametrize("heterogeneity", ["fixed", "dynamic"])
def test_they_learn(federation: Federation, method: dict[str, object], heterogeneity: str) -> None:
    sections: dict[str, dict[str, object]] = {
        "federation": {"heterogeneity": heterogeneity},
        "evaluation": {"every": 8},
    }
    result = run(federation, method, train={"rounds": 8, "epochs": 2}, **sections)
    largest = next(iter(result.metrics))
    assert result.metrics[largest].accuracy > 0.9
    sizes = [cost.parameters for cost in result.costs.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_a_tier_listed_twice_has_two_shares_of_the_clients(federation: Federation) -> None:
    config: Config = small_config(
        method={"name": "heterofl", "tiers": [0.5, 0.5, 0.25]}, federation={"participation": 1.0}, train={"rounds": 1}
    )
    result = assemble(small_model(), federation, config).run()
    assert list(result.metrics) == ["w0.5", "w0.25"]
    shares = Counter(p.tier for p in result.records[0].participants)
    assert shares == {"w0.5": 6, "w0.25": 2}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_a_saved_tier_is_loaded_back(federation: Federation, method: dict[str, object], tmp_path: Path) -> None:
    result = run(federation, method)
    x = torch.randn(5, 1, 6, 6)
    for tier, network in result.networks.items():
        save_tier(tmp_path / "tier.safetensors", network, tier)
        assert torch.equal(load_tier(tmp_path / "tier.safetensors", small_model(1))(x), network.eval()(x))
