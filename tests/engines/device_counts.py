"""Print the copies and synchronisations of one round on the pretended device, by the way in which samples get there.

    PYTHONPATH=src:tests python tests/engines/device_counts.py

Twenty samples in batches of eight are three steps an epoch. "Before" is a plain loop: each tensor of the network and
each batch is copied by itself, and every step waits for its loss, as in many simulators.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

import pretended_device
from fedhm.assembly import assemble
from pretended_device import Counts, counted
from small import small_config, small_federation, small_model

DEVICE = "pretend:0"
EPOCHS = 4


def plain_loop() -> Counts:
    """A client's task in a loop that keeps nothing on the device."""
    samples = small_federation().clients[0]
    with counted() as counts:
        network = small_model().to(DEVICE)
        optimizer = torch.optim.SGD(network.parameters(), 0.05)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(samples)).split(8):
                inputs, targets = samples.tensor[rows].float().to(DEVICE), samples.labels[rows].to(DEVICE)
                optimizer.zero_grad()
                loss = cross_entropy(network(inputs), targets)
                loss.backward()
                optimizer.step()
                loss.item()
        network.to("cpu")
    return counts


def task(on_device: bool, epochs: int) -> Counts:
    """A client's task in a run, after the samples were brought to the device, if they stay there."""
    engine = {"threads": 1, "workers": 1, "device": DEVICE, "data_on_device": on_device}
    train = {"epochs": epochs, "masked_loss": False}
    config = small_config(engine=engine, method={"name": "fedavg"}, train=train)
    experiment = assemble(small_model(), small_federation(), config)
    state = experiment.method.start(experiment.initial)
    tasks = list(experiment.method.tasks(state, next(experiment._sample(1))[:1], 1))
    for _ in range(2):
        with counted() as counts:
            list(experiment.engine.run(tasks))
    return counts


CASES: dict[str, Callable[[], Counts]] = {
    f"a plain loop, {EPOCHS} epochs": plain_loop,
    f"a task, samples are copied, {EPOCHS} epochs": lambda: task(False, EPOCHS),
    f"a task, samples stay, {EPOCHS} epochs": lambda: task(True, EPOCHS),
    "a task, samples stay, 1 epoch": lambda: task(True, 1),
}


def main() -> None:
    pretended_device.register()
    print("| | copies to the device | copies back | synchronisations |\n|---|--:|--:|--:|")
    for name, measure in CASES.items():
        found = measure()
        print(f"| {name} | {found.to_device} | {found.to_host} | {found.synchronisations} |")


if __name__ == "__main__":
    main()
