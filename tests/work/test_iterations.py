"""`train.iterations` counts local steps in place of epochs, on the same stream of batches."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import small_config, small_federation, small_model
from fedhm.assembly import assemble
from fedhm.cli.probe import with_mode
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.measure.fit import TrainingMode
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.saving import count_batches, split_batches
from fedhm.networks.spec import NetworkSpec
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update
from fedhm.work.work import steps_in_round, work_of

IMAGES = Preprocessing((0.5,), (0.25,), crop=1, flip=True)  # augmentation draws from the stream of batches, too


def images(count: int) -> Samples:
    pixels = torch.randint(0, 256, (count, 1, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Samples(pixels, torch.arange(count) % 4)


def trained(count: int, model: nn.Module | None = None, **train: object) -> Update:
    network = model or small_model()
    config = TrainConfig.model_validate({"batch": 5, "lr": 0.05, **train})
    client = Client(images(count), IMAGES, NetworkPool(lambda _: copy.deepcopy(network)), config, seed=3)
    return client.run(Task("train", 2, 1, "full", NetworkSpec("full"), exchanged_tensors(network)))


def same(first: Update, second: Update) -> bool:
    return first.loss == second.loss and all(torch.equal(t, second.tensors[n]) for n, t in first.tensors.items())


@given(st.integers(1, 60), st.integers(1, 9))
def test_batches_are_counted_as_they_are_split(samples: int, size: int) -> None:
    assert count_batches(samples, size) == len(split_batches(torch.arange(samples), size))


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 21), st.integers(1, 3))
def test_whole_epochs_of_iterations_are_epochs_to_the_last_bit(samples: int, epochs: int) -> None:
    """Whether the batch divides the samples evenly or not: a smaller last batch is a batch."""
    steps = epochs * count_batches(samples, 5)
    assert same(trained(samples, epochs=epochs), trained(samples, iterations=steps))


def test_epochs_are_ignored_if_iterations_are_set() -> None:
    assert same(trained(20, iterations=3, epochs=9), trained(20, iterations=3))
    assert not same(trained(20, iterations=3), trained(20, iterations=4))


@pytest.mark.parametrize("iterations", [1, 2, 4, 7, 11])
def test_steps_equal_a_plain_loop(iterations: int) -> None:
    """13 samples in batches of 5: of 5, 5 and 3. A new permutation begins after the third batch."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).double()
    twin, losses = copy.deepcopy(network), []
    feed = Feed(Samples(images(13).tensor.double() / 255, images(13).labels), Preprocessing())
    generator = torch_generator(3, "batches", 2, 1, "full")
    batches = [batch for _ in range(iterations) for batch in feed.shuffled(5, generator)]
    optimizer = torch.optim.SGD(twin.parameters(), 0.05)
    for inputs, targets in batches[:iterations]:
        loss = nn.functional.cross_entropy(twin(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), len(targets)))
    config = TrainConfig(batch=5, lr=0.05, iterations=iterations, momentum=0, weight_decay=0, masked_loss=False)
    client = Client(feed.samples, Preprocessing(), NetworkPool(lambda _: copy.deepcopy(network)), config, seed=3)
    update = client.run(Task("train", 2, 1, "full", NetworkSpec("full"), exchanged_tensors(network)))
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(update.tensors[name], parameter.detach(), rtol=1e-12, atol=1e-14)
    last = losses[-3:]  # an epoch's worth of steps, or all
    expected = sum(loss * count for loss, count in last) / sum(count for _, count in last)
    assert update.loss == pytest.approx(expected, rel=1e-5)  # the library sums losses in float32


@pytest.mark.parametrize("kind", ["train", "nested", "adapt", "prune", "distil"])
def test_costs_count_the_samples_of_the_steps(kind: str) -> None:
    task = Task(kind, 1, 0, "full", NetworkSpec("full"), {})
    public = 40 if kind == "distil" else 0  # whose logits are computed once

    def seen(samples: int, **train: int) -> int:
        return work_of(kind).samples_seen(task, samples, 40, TrainConfig(batch=8, **train)) - public

    assert seen(20, epochs=3) == 60
    assert seen(20, iterations=9, epochs=7) == 60
    assert [seen(20, iterations=n) for n in (1, 2, 3, 4, 5)] == [8, 16, 20, 28, 36]
    assert [seen(17, iterations=n) for n in (1, 2, 3)] == [8, 17, 25]  # batches of 8 and 9
    assert steps_in_round(TrainConfig(batch=8, epochs=3), 17) == 6


def test_records_and_simulated_time_follow() -> None:
    devices = [{"name": "phone", "clients": list(range(8)), "speed": 1}]
    found = {}
    for train in ({"epochs": 2}, {"iterations": 6}, {"iterations": 3, "epochs": 2}):  # 20 samples: 3 batches of up to 8
        config = small_config(train={"rounds": 1, **train}, federation={"devices": devices})
        (record,) = assemble(small_model(), small_federation(), config).run().records
        assert record.simulated
        computed = sum(client.computation for client in record.simulated.clients.values())
        found[str(train)] = (sum(t.macs for t in record.traffic.values()), computed)
    (macs, seconds), same_macs, (half, half_seconds) = found.values()
    assert same_macs == (macs, seconds)
    assert 2 * half == macs
    assert 2 * half_seconds == pytest.approx(seconds)


def test_a_probe_measures_one_epoch() -> None:
    config = small_config(train={"iterations": 7}).resolved()
    assert steps_in_round(with_mode(config, TrainingMode()).train, 4 * config.train.batch) == 4
