"""Rounds of the workload in Flower's simulation: two Ray actors with a core each, which share a GPU if it is used."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers.flower_client import app as client_app
from peers.turns import Turns
from peers.workload import CLIENTS, ROUNDS, cnn, device

server_app = ServerApp()
turns = Turns()


class Over(Exception):  # noqa: N818
    """Raised when no more rounds are asked for."""


def paced(_: int, __: ArrayRecord) -> None:
    """Wait until the next round is asked for; Flower calls this before the first round and after each."""
    if not turns.wait():
        raise Over


@server_app.main()
def serve(grid: Grid, _: Context) -> None:
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    try:
        strategy.start(grid, ArrayRecord(cnn().state_dict()), num_rounds=ROUNDS, evaluate_fn=paced)
    except Over:
        return


def main() -> None:
    share = 0.5 if device().type == "cuda" else 0.0  # both actors share one GPU
    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": share}}
    # Deprecated in favour of `flwr run`, which starts the same runtime in a process that has no stdin
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)


if __name__ == "__main__":
    main()
