"""Tasks on Flower: a map over its nodes, simulated by Ray or on real hosts. Only here is flwr imported."""
