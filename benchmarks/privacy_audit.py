"""Try to tell from a private model whether one client took part, and compare how well that goes with what is promised.

    python benchmarks/privacy_audit.py --trials 2000

The canary is the worst client there can be: it sends a change far longer than the bound, and all others send none. Who
attacks knows its direction, so the best there is to look at is how far the model has moved along it. Of many runs with
it and without, one half chooses the threshold from which on the attacker says "it was there", the other half counts.
By Clopper's and Pearson's bounds on both rates, differential privacy of at least

    ε ≥ ln((true positives − δ) / false positives),  and likewise of negatives

follows, but for one audit in twenty. It must not be more than the ε that records state. With `--broken noise` or
`--broken clip` the mechanism lacks that part, and the audit has to notice.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor, nn

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.experiment import Experiment
from fedhm.networks.exchange import Tensors
from fedhm.server.filters.privacy import Privacy, epsilon_after
from fedhm.server.record import Record
from fedhm.work.messages import Reply, Task, Update
from measure import arguments, save_json, show

CANARY, CLIENTS, CLIP = 1, 2, 0.5  # the canary's tier is the smaller one
DOUBT = 0.05  # how often an audit may find more than there is
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedhm": {"name": "fedhm", "tiers": [1, "1/4"], "aggregate": "updates"},
}


Pair = tuple[Tensor, Tensor]  # without the canary, and with it


class Unbounded(Privacy):
    """A filter that forgets to bound the clients' changes."""

    def _clipped(self, update: Update, task: Task) -> Tensors:  # noqa: ARG002
        return update.tensors


class Answers:
    """An engine on which the canary sends as long a change as it can, if it takes part, and nobody else any."""

    present = False

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            if task.client == CANARY and not self.present:
                continue
            # of two factors one alone, so that the model moves straight ahead, however far
            moved = {n: t if n.endswith(".u") else t + 100 * CLIP for n, t in task.tensors.items()}
            tensors = moved if task.client == CANARY else dict(task.tensors)
            what = (task.kind, task.round, task.client, task.tier, task.network)
            yield Update(*what, tensors, 4, None, 0.0, position)

    def close(self) -> None:
        return


def small_experiment(method: str, noise: float, participation: float, broken: str) -> tuple[Experiment, Answers]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 2))
        data = [(torch.randn(4, 4), torch.arange(4) % 2) for _ in range(CLIENTS + 1)]
    table = {
        "method": METHODS[method],
        "privacy": {"clip": CLIP, "noise": noise},
        "federation": {"participation": participation, "clients": CLIENTS},
        "train": {"masked_loss": False, "max_change": 0},
        "engine": {"threads": 1, "server_threads": 1},
    }
    answers = Answers()
    experiment = assemble(model, from_arrays(data[:-1], data[-1]), parse(table, "the audit"), answers)
    private = experiment.filters.privacy
    assert private is not None
    if broken == "noise":
        silent = private._config.privacy.model_copy(update={"noise": 0.0})
        private._config = private._config.model_copy(update={"privacy": silent})
    if broken == "clip":
        settings = parse(table, "the audit").resolved()
        unbounded = Unbounded(settings, experiment.method, CLIENTS, frozenset(), private.secret)
        experiment.filters = replace(experiment.filters, privacy=unbounded)
    return experiment, answers


def trial(experiment: Experiment, rounds: int, secret: bytes) -> Tensor:
    """Return how far the model moves in so many rounds, all numbers in a row."""
    assert experiment.filters.privacy is not None
    experiment.filters.privacy.secret.value = secret
    state = start = experiment.method.start(experiment.initial)
    for number in range(1, rounds + 1):
        state = experiment.train_round(state, Record(number))
    return torch.cat([(state.weights[name] - start.weights[name]).double().flatten() for name in sorted(state.weights)])


def scores(method: str, noise: float, participation: float, rounds: int, trials: int, broken: str) -> Pair:
    """Return how far the model moved towards the canary in runs without it and in runs with it."""
    experiment, answers = small_experiment(method, 0.0, 1.0, broken="")  # without noise, this is its direction
    answers.present = True
    towards = trial(experiment, 1, bytes(32))
    towards /= towards.norm()
    experiment, answers = small_experiment(method, noise, participation, broken)
    found: list[Tensor] = []
    for present in (False, True):
        answers.present = present
        secrets = (hashlib.sha256(f"{present} {number}".encode()).digest() for number in range(trials))
        found.append(torch.stack([trial(experiment, rounds, secret) @ towards for secret in secrets]))
    return found[0], found[1]


def epsilon_at_least(without: Tensor, with_it: Tensor, delta: float) -> float:
    """Return an ε that the mechanism surely has at least, but for one audit in twenty."""
    half = len(without) // 2
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    thresholds = torch.quantile(torch.cat([without[:half], with_it[:half]]), levels).tolist()
    best = max(thresholds, key=lambda threshold: _bound(without[:half], with_it[:half], threshold, delta))
    return max(0.0, _bound(without[half:], with_it[half:], best, delta))


def _bound(without: Tensor, with_it: Tensor, threshold: float, delta: float) -> float:
    false, true = (int((each > threshold).sum()) for each in (without, with_it))
    count = len(without)
    positive = _log_ratio(_lowest(true, count) - delta, _highest(false, count))
    negative = _log_ratio(_lowest(count - false, count) - delta, _highest(count - true, count))
    return max(positive, negative)


def _log_ratio(part: float, of: float) -> float:
    return math.log(part / of) if part > 0 else -math.inf


def _lowest(hits: int, count: int) -> float:
    return float(beta.ppf(DOUBT / 4, hits, count - hits + 1)) if hits else 0.0  # of two rates, in two directions


def _highest(hits: int, count: int) -> float:
    return float(beta.ppf(1 - DOUBT / 4, hits + 1, count - hits)) if hits < count else 1.0


def stated(method: str, noise: float, participation: float, rounds: int) -> float:
    """Return the ε that records of such a run state."""
    experiment, _ = small_experiment(method, noise, participation, broken="")
    assert experiment.filters.privacy is not None
    return epsilon_after([Record(number) for number in range(1, rounds + 1)], experiment.config) or math.inf


def main() -> None:
    options = arguments(
        __doc__,
        trials=(2000, "runs with the canary, and as many without"),
        noise=(2.0, "privacy.noise"),
        rounds=(1, "of each run"),
        participation=(1.0, "with which probability a client is asked in a round"),
        broken=("", "noise or clip: leave that out, which the audit has to notice"),
    )
    trials = 200 if options.quick else options.trials
    how = options.noise, options.participation, options.rounds
    rows, found = [], dict[str, dict[str, float]]()
    for method in METHODS:
        promised, least = stated(method, *how), epsilon_at_least(*scores(method, *how, trials, options.broken), 1e-5)
        found[method] = {"stated": promised, "at_least": least}
        rows.append((method, promised, least, "violated" if least > promised else "kept"))
    show(f"{trials} runs with the canary, {trials} without", ["method", "ε stated", "ε at least", "promise"], rows)
    save_json(options.json, {"methods": found})


if __name__ == "__main__":
    main()
