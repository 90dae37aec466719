"""Time the server's round for all adapters of MiniLM, on one core: python benchmarks/lora_server.py --clients 20

Twelve weights of 384 × 384 (query and value of six layers), clients of ranks 16, 8, 4 and 2.
"""

import argparse
import statistics
import time

import torch

from fedhm.lowrank.changes.average import Added, Aggregate, fresh, merged

SIDE, LAYERS, RANKS = 384, 12, (16, 8, 4, 2)


def seconds(clients: int, aggregate: Aggregate) -> float:
    generator = torch.Generator().manual_seed(0)
    old = fresh((SIDE, SIDE), max(RANKS), generator)
    ranks = [RANKS[client % len(RANKS)] for client in range(clients)]
    sent = [(r, torch.randn(SIDE, r, generator=generator), torch.randn(r, SIDE, generator=generator)) for r in ranks]
    start = time.process_time()
    for _ in range(LAYERS):
        levels = {rank: Added(rank, (SIDE, SIDE), rank) for rank in RANKS}
        for rank, left, right in sent:
            levels[rank].add(left, right, 1.0)
        merged(list(levels.values()), old, aggregate)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hows: tuple[Aggregate, ...] = ("models", "updates", "bands")  # by partitions takes as long as by models
    for aggregate in hows:
        found = [seconds(options.clients, aggregate) for _ in range(7)]
        print(f"{aggregate:8} {options.clients} clients: {1000 * statistics.median(found):.0f} ms of one core")


if __name__ == "__main__":
    main()
