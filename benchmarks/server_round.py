"""What the server does in a round of FedHM, against the paper's procedure written plainly.

A real run (a ResNet on handwritten digits, ten clients in four tiers) gives real updates and real drift. Its server
rounds are done twice, side by side: by the library (fold the updates in factor form, decompose once from the last
round's basis, check the bound), and plainly (recover every client to a dense model, take the mean over the list, and a
full SVD for every tier and layer). Then: how far the library's truncation is from the optimum, and how much memory ten
and a hundred clients take.

    python benchmarks/server_round.py --model resnet34
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from fedhm.assembly import read_federation
from fedhm.config.loading import parse
from fedhm.lowrank.svd import decompose, roll, to_layer_factors, to_matrix_factors, unroll
from fedhm.machine.device import parallel_map
from fedhm.methods.fedhm import FedHM, FedHMState
from fedhm.methods.means import largest_ranks
from fedhm.models.build import build_model
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.run import prepare
from fedhm.server.sampling import sample_participants
from fedhm.work.messages import Update
from measure import Ratio, arguments, interleaved, machine, median, peak_memory, ratio, save_json, show

KEEP = {"resnet18": 3, "resnet34": 15}  # the layers that the paper keeps dense


class Run:
    """A run of FedHM whose rounds are stepped through by hand."""

    def __init__(self, options: Namespace) -> None:
        quick = options.quick
        config = parse(
            {
                "data": {"source": options.data, "train_samples": 80 if quick else options.samples},
                "model": {"name": options.model, "width": 0.25 if quick else 1.0},
                "federation": {"clients": 10, "participation": 1.0},
                "train": {"lr": options.lr, "batch": 32, "masked_loss": False, "nested": 0},  # as the plain mean has it
                "method": {
                    "name": "fedhm",
                    "tiers": [1, "1/2", "1/4", "1/8"],
                    "keep": KEEP[options.model],
                    "aggregate": options.aggregate,
                    "start": "whole",
                },
                "engine": {"threads": 1},
            },
            "the benchmark",
        )
        experiment = prepare(config)
        assert isinstance(experiment.method, FedHM)
        self.config, self.method, self.engine = config, experiment.method, experiment.engine
        federation = read_federation(config)
        model = build_model(config, federation.input_shape, federation.classes)
        # the same method by the paper's rule, to tell what another rule costs
        self.averaging_models = FedHM(
            model, self.method.config.model_copy(update={"aggregate": "models"}), self.method._setup
        )
        self.state = self.method.start(exchanged_tensors(model))
        self.round = 0

    def train(self) -> list[Update]:
        """Do the local training of the next round and return its updates."""
        self.round += 1
        chosen = next(sample_participants(self.config.federation, 10, self.method.levels, 0, self.round))
        tasks = self.method.tasks(self.state, chosen, self.round)
        return [reply for reply in self.engine.run(tasks) if isinstance(reply, Update)]


def ranks_of(method: FedHM) -> list[dict[str, int]]:
    """Return the ranks of every tier."""
    return [plan.ranks for plan in method.planner.first.values()]


def ours(method: FedHM, state: FedHMState, updates: Sequence[Update]) -> FedHMState:
    merged = method.merge(state, updates, 1)
    for tier in method.tiers[1:]:
        method.weights(merged, tier)
    return merged


def plain(method: FedHM, state: FedHMState, updates: Sequence[Update]) -> dict[str, Tensors]:
    """Return every tier's weights by the paper's algorithm line by line; the full model under "full"."""
    merged = plain_mean(method, state, updates)
    return {"full": merged} | {tier: plain_factors(method, merged, tier) for tier in method.tiers[1:]}


def plain_mean(method: FedHM, state: FedHMState, updates: Sequence[Update]) -> Tensors:
    recovered: list[Tensors] = []
    for update in updates:
        model = {name: t for name, t in update.tensors.items() if name in state.weights}
        for layer in method.planner.first[update.network.tier].ranks:
            left, right = to_matrix_factors(update.tensors[f"{layer}.u"], update.tensors[f"{layer}.v"])
            model[f"{layer}.weight"] = roll(left @ right, state.weights[f"{layer}.weight"].shape)
        recovered.append(model)
    return {name: torch.stack([model[name] for model in recovered]).mean(0) for name in state.weights}


def plain_factors(method: FedHM, weights: Tensors, tier: str) -> Tensors:
    factors: Tensors = {}
    for layer, rank in method.planner.first[tier].ranks.items():
        weight = weights[f"{layer}.weight"]
        U, S, Vt = torch.linalg.svd(unroll(weight), full_matrices=False)
        root = S[:rank].sqrt()
        factors[f"{layer}.u"], factors[f"{layer}.v"] = to_layer_factors(
            U[:, :rank] * root, root[:, None] * Vt[:rank], weight.shape
        )
    return factors


def factorized_warm(method: FedHM, before: FedHMState, weights: Tensors) -> None:
    def decomposed(layer: str) -> None:
        decompose(unroll(weights[f"{layer}.weight"]), largest_ranks(ranks_of(method))[layer], before.factors[layer])

    parallel_map(decomposed, list(largest_ranks(ranks_of(method))))


def truncation_ratios(method: FedHM, state: FedHMState) -> dict[str, float]:
    """Return, by tier, the largest ratio of a layer's truncation error to the smallest possible one."""
    worst = dict.fromkeys(method.tiers[1:], 0.0)
    for layer in largest_ranks(ranks_of(method)):
        matrix = unroll(state.weights[f"{layer}.weight"]).double()
        spectrum = torch.linalg.svdvals(matrix)
        factors = state.factors[layer]
        for tier in worst:
            if layer in method.planner.first[tier].ranks:
                left, right = factors.prefix(method.planner.first[tier].ranks[layer])
                error = (matrix - left.double() @ right.double()).norm()
                worst[tier] = max(worst[tier], float(error / spectrum[left.shape[1] :].norm()))
    return worst


def merged_memory(run: Run, updates: Sequence[Update], clients: int) -> float:
    """Return the peak memory in MiB of merging so many updates, each made in its turn, as they come from an engine."""

    def arriving() -> Iterator[Update]:
        for number in range(clients):
            update = updates[number % len(updates)]
            yield replace(update, tensors={name: t.clone() for name, t in update.tensors.items()})

    return peak_memory(lambda: run.method.merge(run.state, arriving(), 1))


def main() -> None:
    options = arguments(
        __doc__.partition("\n")[0],
        model=("resnet18", "resnet18 or resnet34"),
        data=("digits", "a data source"),
        aggregate=("models", "models, updates or bands"),
        samples=(1400, "training samples of all clients together"),
        lr=(0.05, "learning rate of local training"),
        rounds=(8, "rounds of the run"),
        measured=(4, "of these, how many at the end are measured"),
        threads=(2, "of the server"),
    )
    if options.quick:
        options.rounds, options.measured = 2, 1
    torch.set_num_threads(options.threads)
    run = Run(options)
    times: dict[str, list[float]] = {}
    errors: list[dict[str, float]] = []
    exact = 0.0
    for number in range(1, options.rounds + 1):
        updates = run.train()
        merged = run.method.merge(run.state, updates, 1)
        if number > options.rounds - options.measured:
            measured = cases(run.method, run.state, updates, merged.weights)
            if options.aggregate != "models":
                measured["averaging models"] = partial(ours, run.averaging_models, run.state, updates)
            # of one thread its own seconds, which do not count how long it waits for a core that others use
            clock = time.process_time if options.threads == 1 else time.perf_counter
            for name, seconds in interleaved(measured, 1, warmup=0, clock=clock).items():
                times.setdefault(name, []).extend(seconds)
            errors.append(truncation_ratios(run.method, merged))
            exact += merged.diagnostics["exact_decompositions"]
            if options.aggregate == "models":
                check_equal(merged.weights, plain_mean(run.method, run.state, updates))
        run.state = merged
    report(options, run, updates, times, errors, exact)


def cases(
    method: FedHM, state: FedHMState, updates: Sequence[Update], merged: Tensors
) -> dict[str, Callable[[], object]]:
    return {
        "fedhm": lambda: ours(method, state, updates),
        "plain": lambda: plain(method, state, updates),
        "fedhm, factorization alone": lambda: factorized_warm(method, state, merged),
        "plain, factorization alone": lambda: [plain_factors(method, merged, tier) for tier in method.tiers[1:]],
    }


def check_equal(merged: Tensors, reference: Tensors) -> None:
    for name, tensor in reference.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-4, atol=1e-5)


def report(
    options: Namespace,
    run: Run,
    updates: Sequence[Update],
    times: dict[str, list[float]],
    errors: list[dict[str, float]],
    exact: float,
) -> None:
    total = ratio(times["fedhm"], times["plain"])
    alone = ratio(times["fedhm, factorization alone"], times["plain, factorization alone"])
    base, ten, hundred = peak_memory(lambda: None), *(merged_memory(run, updates, n) for n in (10, 100))
    worst = {tier: max(ratios[tier] for ratios in errors) for tier in errors[0]}
    print(machine())
    rows: list[tuple[object, ...]] = [
        ("whole server round", median(times["fedhm"]), median(times["plain"]), total),
        (
            "factorization alone",
            median(times["fedhm, factorization alone"]),
            median(times["plain, factorization alone"]),
            alone,
        ),
    ]
    ratios = {"server round": total, "factorization": alone}
    title = f"{options.model}, {options.data}, {options.aggregate}: rounds {run.round - len(errors) + 1}–{run.round}"
    title += ", seconds of CPU" if options.threads == 1 else ""
    show(title, ["", "fedhm, s", "plain, s", "times faster"], rows)
    if "averaging models" in times:
        ratios["times as long as averaging models"] = longer = ratio(times["averaging models"], times["fedhm"])
        both = median(times["fedhm"]), median(times["averaging models"])
        show("one server round", [f"{options.aggregate}, s", "models, s", "times as long"], [(*both, longer)])
    show("truncation error / optimum, worst layer and round", list(worst), [[f"{x:.5f}" for x in worst.values()]])
    layers = len(largest_ranks(ranks_of(run.method))) * len(errors)
    print(f"decomposed the exact way: {exact:.0f} of {layers} (layers too small to gain by a warm start are always)")
    show(
        "peak memory of merging, MiB",
        ["before", "10 clients", "100 clients", "100 / 10"],
        [(f"{base:.0f}", f"{ten:.0f}", f"{hundred:.0f}", f"{hundred / ten:.3f}")],
    )
    save_json(
        options.json,
        {
            "ratios": {**ratios, "memory 100 / 10": Ratio(*[hundred / ten] * 3)},
            "truncation": worst,
            "exact": exact / layers,
        },
    )


if __name__ == "__main__":
    main()
