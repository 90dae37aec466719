"""ε of a private run after so many rounds, by the Rényi accountant of Google's dp-accounting.

server   every client takes part with probability q, and the sum of changes of norm C at most has noise of z · C: the
         Gaussian mechanism with Poisson sampling. Two runs are neighbours if one has a client more.
client   the server sees who sent what. Two changes of norm C at most may be 2 C apart, so the noise of z · C is z / 2
         in units of that: the Gaussian mechanism, once for every round in which a client takes part. Two runs are
         neighbours if one client has as many other samples, whichever they are.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache

from fedhm.config.sections.privacy import PrivacyConfig
from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.server.record import Record

# of Rényi divergence: whole numbers, since sums for others do not converge at a large q
ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 512, 1024)


def check_accountant() -> None:
    """Refuse to promise what nobody can count."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError:
        raise FedhmError("privacy.noise needs an accountant: install it with pip install 'fedhm[privacy]'") from None


@cache
def epsilon(privacy: PrivacyConfig, participation: float, times: int) -> float:
    """Return ε after so many rounds, at a client so many in which it took part."""
    import dp_accounting as dp  # takes seconds, and is needed by private runs only
    from dp_accounting.rdp import RdpAccountant

    if privacy.where == "server":
        step: dp.DpEvent = dp.PoissonSampledDpEvent(participation, dp.GaussianDpEvent(privacy.noise))
    else:
        step = dp.GaussianDpEvent(privacy.noise / 2)
    accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(step, times).get_epsilon(privacy.delta)) if times else 0.0


def epsilon_after(records: Sequence[Record], config: Config) -> float | None:
    """Return ε of the rounds so far, of the client that took part most often if noise is the clients'; None: no bound.

    When a run ends early, its outputs have decided that. What holds for any such end is ε of all its rounds.
    """
    privacy = config.privacy
    if not privacy.active or not privacy.noise:
        return None
    if config.stop.active:
        times = config.train.rounds
    elif privacy.at_server:
        times = len(records)
    else:
        turns = Counter(participant.client for record in records for participant in record.participants)
        times = max(turns.values(), default=0)
    return epsilon(privacy, config.federation.participation, times)
