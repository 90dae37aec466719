"""Which settings keep what [privacy] promises: all others are refused before a run starts, with what to set instead."""

from collections.abc import Iterator

from fedhm.config.settings import ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.server.privacy.accountant import check_accountant


def check_privacy(config: ResolvedConfig, federation: Federation, *, normalised: bool, tests: bool) -> None:
    """Refuse settings under which a client's data goes a way around the noise.

    normalised  some network stores BatchNorm statistics that follow the data
    tests       there are clients that evaluate models on samples of theirs
    """
    if problems := [*_of_all(config, federation, normalised), *_of_clients(config, tests)]:
        raise FedhmError("\n".join(f"[privacy]: {problem}" for problem in problems))
    if config.privacy.noise:
        check_accountant()


def _of_all(config: ResolvedConfig, federation: Federation, normalised: bool) -> Iterator[str]:
    train, stop = config.train, config.stop
    if config.privacy.at_server and config.method.unbounded:
        yield config.method.unbounded
    robust = config.server.robust
    if config.privacy.at_server and robust != "none":  # so one client could change what becomes of all
        yield f"server.robust = '{robust}' judges an update by those of other clients: set it to 'none'"
    if train.masked_loss and config.objective.has_labels:
        yield "train.masked_loss = true averages a label's row over the clients that hold the label: set it to false"
    if normalised and config.evaluation.static_from != "never":
        yield (
            "BatchNorm statistics are gathered at clients without noise: set evaluation.static_from = 'never', so that "
            "running averages are part of the bounded change, or train.frozen_statistics = true"
        )
    if train.on_bad_update == "stop":
        yield "train.on_bad_update = 'stop' lets one client's update decide whether the run goes on: set it to 'drop'"
    if config.federation.deadline and config.federation.late == "drop":
        yield "federation.deadline drops clients by how many samples they have: set federation.late to 'wait'"
    if config.federation.min_updates > 1:
        yield "a private round is never tried again, as federation.min_updates > 1 may want it: set it to 1"
    if stop.active and (federation.test is None or config.evaluated_on == "validation"):
        yield "[stop] would end the run by metrics of the clients' own samples, without noise: leave it out"
    if config.data is None and not federation.remote and federation.preprocessing.mean:
        yield (
            "images in uint8 are normalised by the mean of all clients' pixels, without noise: give floating-point "
            "inputs that you have normalised yourself"
        )


def _of_clients(config: ResolvedConfig, tests: bool) -> Iterator[str]:
    if not config.privacy.at_clients:
        return
    if tests:
        yield "evaluation at clients sends metrics without noise: do without data.client_test, or set where = 'server'"
    if getattr(config.method, "weighting", "uniform") == "samples":
        yield "method.weighting = 'samples' counts a client by its number of samples, which has no noise: set 'uniform'"
    if config.data is not None and config.data.validation:
        yield "data.validation shows clients' samples to the server: set it to 0, or set where = 'server'"
    if config.train.max_change:
        yield "train.max_change would refuse updates for the noise that their clients added: set it to 0"
