"""Thousands of damaged, hostile and stale replies: none is merged, nothing raises, and honest ones pass."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.experiment import Experiment
from fedhm.server.collect import in_task_order
from fedhm.server.filters.admission import reason_to_refuse
from fedhm.work.messages import Failure, Participant, Reply, Task, TaskOptions, Update

Damage = Callable[[Update, random.Random], dict[str, Any]]
NOT_NUMBERS = (float("nan"), float("inf"), float("-inf"))
ODD = (None, "", "full", -1, 0, 1.5, True, float("nan"), 10**30, b"\0", (), [[]], {}, {"a": 1}, torch.ones(2))


def on_a_tensor(change: Callable[[Tensor, random.Random], Any]) -> Damage:
    """Damages one of the update's tensors, or one of those that the client keeps."""

    def damage(update: Update, rng: random.Random) -> dict[str, Any]:
        part = rng.choice(["tensors", "kept"] if update.kept else ["tensors"])
        tensors = getattr(update, part)
        name = rng.choice(sorted(tensors))
        return {part: {**tensors, name: change(tensors[name].clone(), rng)}}

    return damage


def one_bad_number(tensor: Tensor, rng: random.Random) -> Tensor:
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(NOT_NUMBERS)
    return tensor


def huge(tensor: Tensor, rng: random.Random) -> Tensor:
    """Finite all the same, and often but a single number."""
    where = slice(None) if rng.random() < 0.3 else rng.randrange(tensor.numel())
    tensor.view(-1)[where] = rng.choice((-1, 1)) * 10.0 ** rng.uniform(22, 38)
    return tensor


def another_shape(tensor: Tensor, rng: random.Random) -> Tensor:
    """Among others those that would broadcast: of rank one, of a single row, with an axis more."""
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (1, *tensor.shape), (tensor.numel() + 1,)]
    shapes += [(*tensor.shape[:-1], 1), tuple(tensor.shape[1:]), (*tensor.shape, 1), (tensor.numel(), 1)]
    return torch.zeros(rng.choice([shape for shape in shapes if shape != tuple(tensor.shape)]), dtype=tensor.dtype)


def another_type(tensor: Tensor, rng: random.Random) -> Tensor:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    return tensor.to(rng.choice([dtype for dtype in types if dtype != tensor.dtype]))


def not_plain(tensor: Tensor, rng: random.Random) -> Any:
    makers: list[Callable[[], Any]] = [
        tensor.to_sparse,
        lambda: tensor.to("meta"),
        tensor.requires_grad_,
        lambda: torch.nn.Parameter(tensor),
        lambda: torch.stack([tensor, tensor], -1)[..., 0] if tensor.numel() > 1 else tensor.numpy(),
        lambda: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if tensor.numel() > 1 else tensor.tolist(),
        tensor.numpy,
        tensor.tolist,
        lambda: rng.choice(ODD[:-1]),
    ]
    return rng.choice(makers)()


def other_tensors(update: Update, rng: random.Random) -> dict[str, Any]:
    left = dict(update.tensors)
    if rng.random() < 0.6:
        taken = left.pop(rng.choice(sorted(left)))
        if rng.random() < 0.5:
            left[rng.choice(["other", "", "0", "running_mean"])] = taken
    else:
        left[rng.choice(["other", "", 7, None, ("a", "b")])] = torch.zeros(3)  # type: ignore[index]
    return {"tensors": rng.choice([left, left, left, {}, None, [], list(left.items())])}


def another_value(update: Update, rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["kind", "round", "client", "tier", "network", "samples", "loss", "labels", "kept", "measured"])
    fine = getattr(update, name)
    wrong = [odd for odd in ODD if type(odd) is not type(fine) or (name != "loss" and odd != fine)]
    return {name: rng.choice(wrong + [float("nan")] * (name == "loss"))}


def stale(update: Update, rng: random.Random) -> dict[str, Any]:
    return {"round": update.round + rng.choice([-2, -1, 1, 1000])}


def anothers(update: Update, rng: random.Random) -> dict[str, Any]:
    return {"client": update.client + rng.choice([-1, 1, 4])}


def inflated(update: Update, rng: random.Random) -> dict[str, Any]:
    return {"samples": update.samples + rng.choice([-1, 1, 10**9])}


def wrong_labels(update: Update, rng: random.Random) -> dict[str, Any]:  # noqa: ARG001
    return {"labels": rng.choice([(), (0, 0), (4,), (-1, 0), ("0",), ((0,),), (0.0,), "0", 0, [None]])}


DAMAGES: list[Damage] = [
    *map(on_a_tensor, (one_bad_number, huge, another_shape, another_type, not_plain)),
    *(other_tensors, another_value, stale, anothers, inflated, wrong_labels),
]


@pytest.mark.parametrize("method", ["fedhm", "fedmd", "feddlr"])
def test_none_of_thousands_is_let_in(federation: Federation, method: str) -> None:
    sections: dict[str, dict[str, object]] = {"evaluation": {"static_from": 1}, "method": {"name": method}}
    data = replace(federation, public=federation.clients[5])
    experiment = assemble(small_model(), data, small_config(**sections))
    state = experiment.method.start(experiment.initial)
    levels = experiment.method.levels
    everybody = [Participant(client, levels[client % len(levels)]) for client in range(8)]
    weights = {tier: experiment.method.weights(state, tier) for tier in experiment.method.tiers}
    tasks = [
        *(
            replace(task, options=replace(task.options, measure=method == "fedhm"))
            for task in experiment.method.tasks(state, everybody, 1)
        ),
        *(
            Task(
                "gradient",
                2,
                p.client,
                p.tier,
                experiment.method.spec(p.tier),
                weights[p.tier],
                options=TaskOptions(batch=16),
            )
            for p in everybody
            if method == "fedhm"
        ),
        *(Task("statistics", 2, p.client, p.tier, experiment.method.spec(p.tier), weights[p.tier]) for p in everybody),
    ]
    replies = list(experiment.engine.run(tasks))
    rng = random.Random(0)
    refused = dict.fromkeys(range(len(DAMAGES)), 0)
    for _ in range(4000):
        place = rng.randrange(len(tasks))
        task, honest, kind = tasks[place], replies[place], rng.randrange(len(DAMAGES))
        assert isinstance(honest, Update)
        expected = experiment.filters.admission.expected(task)
        assert reason_to_refuse(honest, task, expected) is None
        damaged = replace(honest, **DAMAGES[kind](honest, rng))
        reason = reason_to_refuse(damaged, task, expected)
        assert reason, damaged
        assert len(reason) < 400
        refused[kind] += 1
    assert min(refused.values()) > 250


class Damaging:
    """The local engine; of some clients every reply is damaged, sent twice, or goes to no task at all."""

    def __init__(self, experiment: Experiment, damage: Callable[[Update], Iterable[Reply]]) -> None:
        self._engine, self._damage = experiment.engine, damage

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for reply in self._engine.run(tasks):
            if isinstance(reply, Update) and reply.client % 3 == 1:
                yield from self._damage(reply)
            else:
                yield reply

    def close(self) -> None:
        self._engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("static_from", [0, "never"])
def test_damaged_replies_leave_the_weights_as_if_their_clients_had_failed(
    federation: Federation, static_from: object
) -> None:
    rng = random.Random(1)

    def damaged(update: Update) -> Iterator[Reply]:
        for damage in rng.sample(DAMAGES, 3):
            yield replace(update, **damage(update, rng))
        yield update  # the right one at last: the place is taken
        yield replace(update, position=rng.choice([-1, 10**9]))
        yield replace(update, position=rng.choice([None, "0", 1.0]))  # type: ignore[arg-type]

    def failed(update: Update) -> Iterator[Reply]:
        yield Failure(update.client, "it failed", update.position)

    results = []
    for damage in (damaged, failed):
        sections: dict[str, dict[str, object]] = {
            "train": {"on_bad_update": "drop", "rounds": 3},
            "federation": {"participation": 1.0},
            "evaluation": {"static_from": static_from},
        }
        experiment = assemble(small_model(), federation, small_config(**sections))
        experiment.engine = Damaging(experiment, damage)
        results.append(experiment.run())
    first, second = results
    for tier, network in first.networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, second.networks[tier].state_dict()[name])
    dropped = [[(d["client"], d["tier"], d["kind"]) for r in result.records for d in r.dropped] for result in results]
    assert dropped[0] == dropped[1]
    assert {client for client, _, _ in dropped[0]} == {1, 4, 7}
    assert [record.metrics for record in first.records] == [record.metrics for record in second.records]


def test_the_first_reply_to_a_task_counts() -> None:
    rng = random.Random(2)
    for _ in range(300):
        count = rng.randrange(1, 12)
        positions = [rng.choice([*range(count), -1, count, None, "1", 0.0]) for _ in range(40)]
        replies = [Failure(number, "", position) for number, position in enumerate(positions)]
        passed = list(in_task_order(replies, count))
        answered = sorted({position for position in positions if type(position) is int and 0 <= position < count})
        assert [reply.position for reply in passed] == answered
        assert all(positions.index(reply.position) <= reply.client for reply in passed)
        assert all(type(reply.position) is int for reply in passed)
