"""A run begins with the clients that are connected. The others join a later round, at the tier that they introduce."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import test_device_plans
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from test_introductions import profile
from test_nodes_evaluate import SETTINGS as EVALUATED
from test_nodes_evaluate import build_model as build_evaluated
from test_nodes_evaluate import grid_of, own
from test_who_is_who import SETTINGS, Changing, build_model, dropped, federation, node, run, three

import fedhm.flower.nodes
from fedhm.config.loading import parse, parse_flat
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower import client_app, server_app
from fedhm.flower.clients import UserModel
from fedhm.flower.engine import FlowerEngine
from fedhm.flower.nodes import NodeRegistry
from fedhm.flower.server import run_on_grid
from fedhm.flower.wire import RunInfo, introduction_request
from fedhm.networks.spec import NetworkSpec
from fedhm.runs.folder import read_config
from fedhm.runs.rounds import read_records
from fedhm.work.messages import Task
from flower_loopback import Loopback
from run_outcome import weights

pytestmark = pytest.mark.usefixtures("without_figures")
ABSENT = "it is not connected"
BEGINS = "the run begins without 1 of 3 clients, which may join later: no SuperNode has partition-id 1"


def tiers(out: Path, client: int) -> list[str]:
    """Return the tiers of a client in all rounds."""
    records = read_records(out / "records.jsonl")
    return [p.tier for record in records for p in record.participants if p.client == client]


def two() -> dict[int, Any]:
    """Return the nodes of clients 0 and 2."""
    return {1: node(0), 3: node(2)}


def test_a_run_begins_without_a_client_that_does_not_connect(tmp_path: Path) -> None:
    assert run(Loopback(two()), tmp_path / "run") == [BEGINS]
    assert dropped(tmp_path / "run") == [{1: ABSENT}] * 2
    assert read_config(tmp_path / "run").federation.missing == (1,)


@pytest.mark.parametrize(("least", "connected"), [(3, 2), (2, 1), (0, 1)])
def test_too_few_clients_are_one_sentence(least: int, connected: int, tmp_path: Path) -> None:
    grid = Loopback(dict(list(three().nodes.items())[:connected]))
    needed = f"a run begins with at least {least or 2} \\(federation.min_clients\\): no SuperNode has partition-id "
    with pytest.raises(FedhmError, match=rf"^{3 - connected} of 3 clients did not connect within 0 s .*, and {needed}"):
        run(grid, tmp_path / "run", federation__min_clients=least)
    assert not (tmp_path / "run").exists()


def test_more_clients_than_there_are_cannot_be_needed() -> None:
    with pytest.raises(FedhmError, match="min_clients = 4, but there are 3 clients"):
        parse({"federation": {"clients": 3, "min_clients": 4}}, "test")


def test_with_all_clients_the_setting_changes_nothing(tmp_path: Path) -> None:
    names = []
    for least in (0, 1, 3):
        out = tmp_path / str(least)
        grid = three()
        assert run(grid, out, federation__min_clients=least) == []
        names.append(sorted(path.name for path in (out / "models").iterdir()))
        for name in names[0]:
            assert weights(out / "models" / name) == weights(tmp_path / "0" / "models" / name)
        told = {str(message.content.config_records["fedhm"]["terms"]) for message in grid.pushed}
        assert not any("min_clients" in text for text in told)  # messages are as long as ever
    assert run(three(), tmp_path / "0", federation__min_clients=2) == []  # a finished run, which is the same run


def late(out: Path, **config: str | int) -> list[str]:
    """Run two rounds, of which client 1 joins the second with this node config; return the printed sentences."""
    grid = Loopback(two())
    return run(grid, out, {**grid.nodes, 9: node(1, **config)})


@pytest.mark.parametrize(
    ("config", "tier"),
    [({}, "1/2"), ({"tier": "1/4"}, "1/4"), ({"tier": "full"}, "full"), ({"memory": "1GB"}, "full")],
    ids=["by its number", "smaller", "larger", "by its memory"],
)
def test_a_late_client_gets_the_tier_that_it_would_have_got_at_the_start(
    config: dict[str, str | int], tier: str, tmp_path: Path
) -> None:
    assert late(tmp_path / "run", **config) == [BEGINS]
    assert tiers(tmp_path / "run", 1) == ["1/2", tier]
    assert dropped(tmp_path / "run") == [{1: ABSENT}, {}]
    others = [tiers(tmp_path / "run", client) for client in (0, 2)]
    assert others == [["full"] * 2, ["1/4"] * 2]


def test_a_late_client_gets_the_tier_that_fits_its_device(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    for number, memory in enumerate((9_000, 8_999)):  # of each network, 9,000 bytes were measured
        file.write_text(profile(memory=memory).model_dump_json())
        said = late(tmp_path / str(number), **{"device-file": str(file)})
        assert len(said) == 1 + number
    assert tiers(tmp_path / "0", 1) == ["1/2", "full"]
    assert "it can spare 0 MiB, but training even tier" in dropped(tmp_path / "1")[1][1]


def test_a_late_client_without_a_possible_tier_takes_no_part(tmp_path: Path) -> None:
    for number, config in enumerate(({"tier": "1/3"}, {"memory": "1kB"})):
        out = tmp_path / str(number)
        begins, refusal = late(out, **config)
        assert begins == BEGINS
        assert refusal.startswith("client 1 takes no part: it ")
        assert dropped(out)[1] == {1: refusal.removeprefix("client 1 takes no part: ")}


def test_settings_decide_about_late_clients_too(tmp_path: Path) -> None:
    grid = Loopback(two())
    after = {**grid.nodes, 9: node(1, tier="full")}
    said = run(grid, tmp_path / "run", after, federation__assignment='["full", "1/4", "1/2"]')
    assert said[1:] == ["client 1 takes no part: it asks for tier full, but was given 1/4, which is smaller"]


def test_a_late_client_cannot_rise_when_it_comes_back(tmp_path: Path) -> None:
    grid, said = Loopback(two()), list[str]()
    stages = [{**grid.nodes, 9: node(1, tier="1/4")}, {**grid.nodes, 10: node(1, tier="full")}]

    class Stages(Changing):
        def round_done(self, _: object) -> None:
            self._grid.nodes = stages.pop(0) if stages else self._grid.nodes

    config = parse_flat({**SETTINGS, "train.rounds": 3}, "test")
    out = tmp_path / "run"
    run_on_grid(grid, config, UserModel(build_model, 0), federation, out, [Stages(grid, {})], said.append)
    assert tiers(out, 1) == ["1/2", "1/4", "1/4"]
    assert said[1:] == ["client 1 takes no part: it asks for tier full, but was given 1/4, which is smaller"]


def test_a_resumed_run_still_waits_for_nobody_and_lets_late_clients_in(tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = Loopback(two())
    run(whole, tmp_path / "whole", {**whole.nodes, 9: node(1, tier="1/4")})
    grid = Loopback(two())
    with pytest.raises(FedhmError, match="in round 2"):  # nobody is connected for the second round
        run(grid, out, {99: node(0, key=4)}, federation__attempts=3)
    assert run(Loopback({**two(), 9: node(1, tier="1/4")}), out, federation__min_clients=3) == []
    assert tiers(out, 1) == ["1/2", "1/4"]
    for path in (tmp_path / "whole" / "models").iterdir():
        assert weights(path) == weights(out / "models" / path.name)


def test_rounds_do_not_fail_because_missing_clients_were_drawn(tmp_path: Path) -> None:
    """Each round has one client and one attempt. Without looking who is connected, the run would end."""
    changes = {"federation__participation": 0.34, "federation__attempts": 1, "train__rounds": 8}
    run(Loopback(two()), tmp_path / "run", None, **changes)
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert len(records) == 8
    assert {p.client for record in records for p in record.participants} == {0, 2}
    assert not any(record.dropped for record in records)


@pytest.mark.slow
def test_a_server_that_asks_for_everything_begins_with_the_clients_that_are_there(tmp_path: Path) -> None:
    """The form of inputs, samples and test samples are those of two clients. One client evaluates at a time."""
    grid = grid_of(*[client_app(build_evaluated, own)] * 3)
    del grid.nodes[2]
    settings = {**EVALUATED, "evaluation.participation": 0.3, "train.rounds": 4, "out": str(tmp_path / "run")}
    server_app(build_evaluated)(grid, Context(1, 1, {}, RecordDict(), settings))  # type: ignore[arg-type]
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert len(records) == 4
    assert {one.client for record in records for one in record.clients["full"].each} <= {0, 2}
    assert read_config(tmp_path / "run").federation.inputs == "float32 12"


def test_a_late_client_that_needs_checkpointing_is_told_so(tmp_path: Path) -> None:
    again = test_device_plans.needed(checkpointing=True)
    assert again < test_device_plans.needed(checkpointing=False)
    nodes = [test_device_plans.node(n) for n in range(3)]
    grid = Loopback({1: nodes[0], 3: nodes[2]})
    watcher = Changing(grid, {**grid.nodes, 9: test_device_plans.node(1, memory=f"{again}B")})
    config, model = parse(test_device_plans.settings([]), "test"), UserModel(test_device_plans.build_model, 0)
    run_on_grid(grid, config, model, test_device_plans.federation, tmp_path / "run", [watcher])
    assert tiers(tmp_path / "run", 1) == ["1/4", "full"]
    told = [RunInfo.decode(message.content).config.federation.checkpointed for message in grid.pushed]
    assert told[0] == ()
    assert told[-1] == (1,)


class Slow(Loopback):
    """A grid in which node 2 answers while others do a task, and whose answers are gone soon."""

    ready = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        listed = list(messages)
        self.ready = any(message.metadata.message_type == "train" for message in listed)
        return super().push_messages(listed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (message_id,) = message_ids
        reply = self.replies.get(message_id)
        held = isinstance(reply, Message) and reply.metadata.src_node_id == 2 and not self.ready
        return [] if held else super().pull_messages([message_id])


def test_introductions_are_read_while_a_round_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower forgets an answer after a while, and a round may last longer. So a late client would never be known."""
    monkeypatch.setattr(fedhm.flower.nodes, "ANSWER_TIMEOUT", 0.2)
    info = RunInfo(parse_flat(SETTINGS, "test").resolved(), 3, Preprocessing())
    grid = Slow({1: node(0)})
    registry = NodeRegistry(grid, 3, introduction_request(info), lambda _: None)
    registry.refresh()
    grid.nodes[2] = node(1)
    engine = FlowerEngine(grid, registry, info, 0.0, fp16=False)
    list(engine.run([Task("train", 1, 0, "full", NetworkSpec("full"), build_model().state_dict())]))
    assert set(registry.connected()) == {0}
    time.sleep(0.3)
    registry.refresh()
    assert set(registry.connected()) == {0, 1}


class Flapping(Loopback):
    """A grid whose second node comes and goes."""

    looks = 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        self.looks += 1
        assert self.looks < 400, "the server waits for ever"
        return [info for info in super().get_nodes() if info.node_id == 1 or self.looks % 2]


def test_a_client_that_comes_and_goes_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedhm.flower.nodes, "POLL_SECONDS", 0.02)
    info = RunInfo(parse_flat(SETTINGS, "test").resolved(), 3, Preprocessing())
    registry = NodeRegistry(Flapping({1: node(0), 2: node(1)}), 3, introduction_request(info), lambda _: None)
    registry.wait(0.5)
