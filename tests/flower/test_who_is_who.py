"""A client's number belongs to one key for the whole run, and its tier does not grow. Nodes are in this process."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from torch import nn

from fedhm.assembly import design
from fedhm.config.loading import parse_flat
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app
from fedhm.flower.clients import UserModel
from fedhm.flower.nodes import Node, fingerprint, tier_objection
from fedhm.flower.processes.secrets import ensure_client_key
from fedhm.flower.processes.superlink import Connection, write_connection
from fedhm.flower.server import run_on_grid
from fedhm.runs.identities import Identities
from fedhm.runs.rounds import read_records
from flower_loopback import Loopback, LoopbackNode
from run_outcome import weights

KEYS = [public_key_to_bytes(generate_key_pairs()[1]) for _ in range(5)]
PRINTS = [fingerprint(key) for key in KEYS]
SETTINGS = {
    "federation.clients": 3,
    "federation.participation": 1.0,
    "train.rounds": 2,
    "train.batch": 8,
    "method.tiers": "[1, 1/2, 1/4]",
    "method.keep": 0,
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}
pytestmark = pytest.mark.usefixtures("without_figures")


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :3].argmax(dim=1)


def federation(sizes: tuple[int, ...], _: str) -> Federation:
    return remote_federation(samples(9), 3, sizes, Preprocessing())


def node(client: int, key: int | None = None, **config: str | int) -> LoopbackNode:
    """Return a node with the key of its client's number, or with another one."""
    app = client_app(build_model, lambda context: samples(int(context.node_config["partition-id"])))
    return LoopbackNode(app, {"partition-id": client, **config}, KEYS[client if key is None else key])


class Changing:
    """A watcher that connects other nodes after the first round."""

    def __init__(self, grid: Loopback, nodes: dict[int, LoopbackNode]) -> None:
        self._grid, self._nodes = grid, nodes

    def started(self, *_: object) -> None: ...
    def task_done(self, *_: object) -> None: ...

    def round_done(self, _: object) -> None:
        self._grid.nodes = self._nodes


def run(grid: Loopback, out: Path, then: dict[int, LoopbackNode] | None = None, **changes: object) -> list[str]:
    """Run on the nodes of a grid, or on others after the first round, and return the printed sentences."""
    config = parse_flat({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}, "test")
    said: list[str] = []
    watchers = [Changing(grid, then)] if then else []
    run_on_grid(grid, config, UserModel(build_model, 0), federation, out, watchers, said.append)
    return said


def interrupted(out: Path, grid: Loopback, **changes: object) -> None:
    """Leave a run with one round done, because no client is connected for the next."""
    with pytest.raises(FedhmError, match="in round 2"):
        run(grid, out, {99: LoopbackNode(grid.nodes[1].app, {}, KEYS[4])}, federation__attempts=1, **changes)


def dropped(out: Path) -> list[dict[int, str]]:
    return [{d["client"]: d["reason"] for d in record.dropped} for record in read_records(out / "records.jsonl")]


def three(**config: str | int) -> Loopback:
    return Loopback({number + 1: node(number, **config) for number in range(3)})


def test_a_fingerprint_equals_that_of_ssh_keygen(tmp_path: Path) -> None:
    ensure_client_key(tmp_path / "key")
    public = tmp_path / "key.pub"
    shown = subprocess.run(["ssh-keygen", "-l", "-f", str(public)], capture_output=True, text=True, check=True).stdout
    pem = public_key_to_bytes(load_ssh_public_key(public.read_bytes()))  # type: ignore[arg-type]
    assert shown.split()[1] == fingerprint(pem)


@pytest.mark.parametrize("no_key", [b"", b"\x00" * 32, b"-----BEGIN PUBLIC KEY-----", KEYS[0][:80]], ids=range(4))
def test_bytes_that_are_no_key_have_no_fingerprint(no_key: bytes) -> None:
    assert fingerprint(no_key) == ""


def test_numbers_belong_to_the_keys_that_claimed_them_first(tmp_path: Path) -> None:
    said = run(three(), tmp_path / "run")
    assert said == []
    assert json.loads((tmp_path / "run" / "nodes.json").read_text()) == {str(n): PRINTS[n] for n in range(3)}
    run(Loopback({n + 1: LoopbackNode(node(n).app, {"partition-id": n}) for n in range(3)}), tmp_path / "keyless")
    assert not (tmp_path / "keyless" / "nodes.json").exists()
    for path in (tmp_path / "run" / "models").iterdir():
        assert weights(path) == weights(tmp_path / "keyless" / "models" / path.name)


def test_a_second_key_that_claims_a_number_is_refused_once_and_the_run_goes_on(tmp_path: Path) -> None:
    impostor, honest = node(1, key=4), three()
    after = {1: honest.nodes[1], 13: impostor, 3: honest.nodes[3]}  # client 1 itself is gone
    said = run(honest, tmp_path / "run", after)
    refusal = f"it calls itself client 1, which is the one with the key {PRINTS[1]}; its own is {PRINTS[4]}"
    assert said == [f"node 13 is not used: {refusal}"]
    assert dropped(tmp_path / "run") == [{}, {1: "it is not connected"}]
    assert json.loads((tmp_path / "run" / "nodes.json").read_text())["1"] == PRINTS[1]


def test_a_key_cannot_have_two_numbers(tmp_path: Path) -> None:
    """Otherwise one client could claim the numbers of all clients that are late."""
    with pytest.raises(FedhmError, match=r"partition-id 2; node 9 is not used: it calls itself client 2, but its key "):
        run(Loopback({1: node(0), 2: node(1), 9: node(2, key=0)}), tmp_path / "run", federation__min_clients=3)


def test_a_restarted_node_keeps_its_number(tmp_path: Path) -> None:
    honest = three()
    assert run(honest, tmp_path / "run", {1: honest.nodes[1], 8: node(1), 3: honest.nodes[3]}) == []
    assert dropped(tmp_path / "run") == [{}, {}]


def test_a_resumed_run_keeps_the_keys(tmp_path: Path) -> None:
    out = tmp_path / "run"
    interrupted(out, three())
    said = run(Loopback({7: node(0), 8: node(1, key=3), 9: node(2)}), out, federation__attempts=1)
    assert said[0].startswith("node 8 is not used: it calls itself client 1, which is the one with the key ")
    assert dropped(out)[1] == {1: "it is not connected"}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"0": 3}', '{"x": "SHA256:"}', '{"0": "SHA256:abc"}', '{"-1": "%s"}', '{"0": "%s", "1": "%s"}'],
    ids=range(8),
)
def test_a_damaged_file_is_one_sentence(content: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "run", three())
    (tmp_path / "run" / "nodes.json").write_text(content.replace("%s", PRINTS[0]))
    with pytest.raises(FedhmError, match=r"^cannot read .*nodes\.json: [^\n]{1,200}; put it back, or remove it if"):
        run(three(), tmp_path / "run", federation__attempts=1)


def test_a_run_that_failed_at_once_leaves_no_keys_behind(tmp_path: Path) -> None:
    grid = three(tier="9/10")
    with pytest.raises(FedhmError, match="in round 1"):
        run(grid, tmp_path / "run", federation__attempts=1)
    assert not (tmp_path / "run").exists()


def test_without_node_keys_a_replacement_is_accepted(tmp_path: Path) -> None:
    config = parse_flat(SETTINGS, "test")
    honest, said = three(), list[str]()
    after = {1: honest.nodes[1], 8: node(1, key=4), 3: honest.nodes[3]}
    own = UserModel(build_model, 0)
    out = tmp_path / "run"
    run_on_grid(honest, config, own, federation, out, [Changing(honest, after)], said.append, node_keys=False)
    assert said == []
    assert dropped(out) == [{}, {}]
    assert not (out / "nodes.json").exists()


def test_plain_connections_have_no_lasting_keys(tmp_path: Path) -> None:
    connection = Connection(tmp_path, "ours")
    write_connection(connection, 9, None)
    assert not connection.encrypted
    write_connection(connection, 9, tmp_path / "ca.crt")
    assert connection.encrypted


ABOVE = "it asks for tier full, but was given 1/4, which is smaller"


def test_a_client_that_claims_more_than_its_assignment_takes_no_part(tmp_path: Path) -> None:
    grid = Loopback({1: node(0, tier="full"), 2: node(1, tier="full"), 3: node(2, tier="1/4")})
    said = run(grid, tmp_path / "run", federation__assignment='["full", "1/4", "1/2"]')
    assert said == [f"client 1 takes no part: {ABOVE}"]
    assert dropped(tmp_path / "run") == [{1: ABOVE}] * 2
    tiers = [p.tier for p in read_records(tmp_path / "run" / "records.jsonl")[0].participants]
    assert tiers == ["full", "1/4", "1/2"]  # a smaller claim is no reason for another tier: the server's word counts


@pytest.mark.parametrize("first", ["1/4", ""], ids=["by its own claim", "by its number"])
def test_a_later_claim_may_not_rise_above_what_was_given_at_the_start(first: str, tmp_path: Path) -> None:
    grid, later = three(), {number + 1: node(number, tier="full") for number in (0, 2)}
    grid.nodes[3] = node(2, tier=first)
    interrupted(tmp_path / "run", grid)
    said = run(Loopback({**later, 2: node(1)}), tmp_path / "run", federation__attempts=1)
    assert said == [f"client 2 takes no part: {ABOVE}"]
    assert dropped(tmp_path / "run") == [{}, {2: ABOVE}]


def test_only_tiers_larger_than_the_given_one_are_refused() -> None:
    config, own = parse_flat(SETTINGS, "test"), UserModel(build_model, 0)
    method = design(config, own.build(), torch.zeros(1, 6), 3).method
    sizes = {"full": 1, "1/2": 2, "1/4": 3}
    assert tuple(sizes) == method.tiers
    given = config.federation.model_copy(update={"assignment": ("full", "1/2", "1/4")})
    held = config.model_copy(update={"federation": given})
    for client, mine in enumerate(sizes):
        for claimed in sizes:
            objection = tier_objection(held, method, Node(client, 8, claimed))
            assert bool(objection) == (sizes[claimed] < sizes[mine]), (mine, claimed)
        assert not tier_objection(held, method, Node(client, 8, memory=2**40))  # which names no tier, and changes none


def test_a_later_claim_may_be_smaller_or_missing(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", three(tier="1/2"))
    grid = Loopback({1: node(0, tier="1/4"), 2: node(1), 3: node(2, tier="1/2")})
    assert run(grid, tmp_path / "run", federation__attempts=1) == []
    assert dropped(tmp_path / "run") == [{}, {}]


def test_claims_are_ignored_where_tiers_are_drawn(tmp_path: Path) -> None:
    assert run(three(tier="full"), tmp_path / "run", federation__heterogeneity="dynamic") == []


def test_a_wrong_assignment_is_an_error_before_clients_connect(tmp_path: Path) -> None:
    for assignment, sentence in (('["full"]', "names 1 tiers for 3 clients"), ('["full", "x", "y"]', "no tier 'x'")):
        with pytest.raises(FedhmError, match=sentence):
            run(Loopback(), tmp_path / "run", federation__assignment=assignment)


def test_a_first_claim_is_written_at_once(tmp_path: Path) -> None:
    """A client that was missing when a run was resumed owns its number from its first introduction on."""
    known = Identities()
    known.keep_in(tmp_path)
    assert known.claim(0, PRINTS[0]) == ""
    again = Identities.read(tmp_path)
    assert again.claim(0, PRINTS[0]) == ""
    assert "which is the one with the key" in again.claim(0, PRINTS[1])
    assert "is that of client 0" in again.claim(1, PRINTS[0])
    assert json.loads((tmp_path / "nodes.json").read_text()) == {"0": PRINTS[0]}
