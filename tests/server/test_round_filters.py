"""The filters of a round run in one order, and a user's own filters may change what comes of it."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.data.samples import Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.methods.fedhm import FedHMState
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record
from fedhm.server.round import RoundFilters
from fedhm.server.state import flatten
from fedhm.work.messages import Participant, Task, Update

ORDER = ["fleet", "admission", "defence", "weights", "privacy", "late", "optimizer", "own 1", "own 2", "theory"]


class Recorder(RoundFilter):
    """Records every call of a filter's hooks in a round, and passes it on to the filter."""

    def __init__(self, name: str, calls: list[tuple[str, str]], inner: RoundFilter | None = None) -> None:
        self._name, self._calls, self._inner = name, calls, inner or RoundFilter()

    def sampling(self, attempts: Iterator[list[Participant]], round_number: int) -> Iterator[list[Participant]]:
        self._calls.append(("sampling", self._name))
        return self._inner.sampling(attempts, round_number)

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        self._calls.append(("tasks", self._name))
        return self._inner.tasks(tasks, record)

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        self._calls.append(("updates", self._name))
        return self._passing(self._inner.updates(arrivals, record))

    def _passing(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            self._calls.append(("update", self._name))
            yield arrival

    def merged(self, before: Any, merged: Any, record: Record) -> Any:
        self._calls.append(("merged", self._name))
        return self._inner.merged(before, merged, record)


def recording(filters: RoundFilters, calls: list[tuple[str, str]]) -> RoundFilters:
    """Return the filters of a run, each recording its calls, and two of a user."""
    single = [each.name for each in fields(RoundFilters) if each.name != "own"]
    recorders: Any = {name: Recorder(name, calls, getattr(filters, name)) for name in single}
    return replace(filters, **recorders, own=[Recorder("own 1", calls), Recorder("own 2", calls)])


def called(hook: str, calls: list[tuple[str, str]]) -> list[str]:
    return [name for which, name in calls if which == hook]


def as_floats(federation: Federation) -> Federation:
    """Return the samples as floating-point numbers: private runs take inputs that are normalised already."""
    scaled = federation.map_samples(lambda samples, _: Samples(samples.inputs / 255, samples.labels))
    return replace(scaled, preprocessing=Preprocessing())


def test_the_filters_of_a_round_have_one_order(federation: Federation) -> None:
    devices: list[dict[str, object]] = [{"name": "phone", "clients": list(range(8))}]
    config = small_config(
        federation={"devices": devices},
        method={"name": "fedhm", "aggregate": "updates"},
        privacy={"clip": 0.5, "noise": 0.0},
        server={"robust": "none"},
        train={"masked_loss": False, "on_bad_update": "drop"},
        evaluation={"static_from": "never"},
    )
    filters = assemble(small_model(), as_floats(federation), config).filters
    assert filters.fleet
    assert filters.privacy
    own = [RoundFilter(), RoundFilter()]
    ordered = [filters.fleet, filters.admission, filters.defence, filters.privacy, filters.optimizer, *own]
    assert list(replace(filters, own=own)) == ordered
    assert list(replace(filters, fleet=None, privacy=None)) == [filters.admission, filters.defence, filters.optimizer]
    theory = assemble(small_model(), federation, small_config(evaluation={"diagnostics": "theory"})).filters.theory
    assert theory
    assert list(replace(filters, own=own, theory=theory)) == [*ordered, theory]


def test_a_round_calls_the_hooks_of_all_filters_in_their_order(federation: Federation) -> None:
    experiment, calls = (
        assemble(small_model(), federation, small_config(server={"robust": "none"})),
        list[tuple[str, str]](),
    )
    experiment.filters = recording(experiment.filters, calls)
    experiment.train_round(experiment.method.start(experiment.initial), record := Record(1))
    for hook in ("sampling", "tasks", "updates", "merged"):
        assert called(hook, calls) == ORDER
    # one update passes all filters before the next one comes, so that memory does not grow with their number
    assert called("update", calls) == ORDER * len(record.participants)
    hooks = [which for which, _ in calls]
    assert hooks == sorted(hooks, key=["sampling", "tasks", "updates", "update", "merged"].index)


class DropClient(RoundFilter):
    """Drops the updates of one client."""

    def __init__(self, client: int) -> None:
        self._client = client

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:  # noqa: ARG002
        return (arrival for arrival in arrivals if arrival.update.client != self._client)


class Keep(RoundFilter):
    """Keeps the updates that pass."""

    def __init__(self) -> None:
        self.kept: list[Update] = []

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:  # noqa: ARG002
        for arrival in arrivals:
            self.kept.append(arrival.update)
            yield arrival


def same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal to the last bit."""
    (tensors, outline), (others, other_outline) = flatten(one), flatten(other)
    equal = all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    return outline == other_outline and tensors.keys() == others.keys() and equal


def test_a_users_filter_can_drop_an_update(federation: Federation) -> None:
    experiment = assemble(small_model(), federation, small_config())
    state = experiment.method.start(experiment.initial)
    whole = experiment.train_round(state, record := Record(1))
    dropped = record.participants[1].client
    keep = Keep()
    experiment.filters = replace(experiment.filters, own=[DropClient(dropped), keep])
    without = experiment.train_round(state, Record(1))
    assert [update.client for update in keep.kept] == [p.client for p in record.participants if p.client != dropped]
    assert same(without, experiment.method.merge(state, keep.kept, 1))
    assert not same(without, whole)


class Halfway(RoundFilter):
    """Goes only half of the way from the model before the round to the merged one."""

    def merged(self, before: Any, merged: Any, record: Record) -> Any:  # noqa: ARG002
        halves = {
            n: torch.lerp(before.weights[n], t, 0.5) if t.is_floating_point() else t for n, t in merged.weights.items()
        }
        return replace(merged, weights=halves)


def test_a_users_filter_can_change_the_merged_state(federation: Federation) -> None:
    experiment = assemble(small_model(), federation, small_config())
    state: FedHMState = experiment.method.start(experiment.initial)
    whole: FedHMState = experiment.train_round(state, Record(1))
    experiment.filters = replace(experiment.filters, own=[Halfway()])
    half: FedHMState = experiment.train_round(state, Record(1))
    expected = Halfway().merged(state, whole, Record(1))
    assert same(half.weights, expected.weights)
    assert not same(half.weights, whole.weights)
    # what follows from the weights follows from the changed ones
    for layer, factors in half.factors.items():
        rank = factors.left.shape[1]
        matrix = factors.left @ factors.right
        assert rank == whole.factors[layer].left.shape[1]
        assert not torch.allclose(matrix, whole.factors[layer].left @ whole.factors[layer].right)
    tensors = experiment.method.weights(half, "full")
    assert all(torch.equal(tensor, half.weights[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("robust", ["none", "clip"])
def test_a_second_run_forgets_the_first(federation: Federation, robust: str) -> None:
    server = {"optimizer": "momentum", "robust": robust}
    experiment = assemble(small_model(), federation, small_config(train={"rounds": 2}, server=server))
    first, second = experiment.run(), experiment.run()
    assert second.metrics == first.metrics
    for tier, network in first.networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, second.networks[tier].state_dict()[name])


def test_privacy_refuses_a_users_filter_behind_it(federation: Federation) -> None:
    config = small_config(
        method={"name": "fedavg"},
        privacy={"clip": 0.5, "noise": 0.0},
        train={"rounds": 1, "masked_loss": False},
        evaluation={"static_from": "never"},
    )
    experiment = assemble(small_model(), as_floats(federation), config)
    experiment.filters = replace(experiment.filters, own=[RoundFilter()])
    with pytest.raises(FedhmError, match=r"^\[privacy\] holds for the library's own filters only"):
        experiment.run()
