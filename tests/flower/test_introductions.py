"""A node's introduction decides about this node only, whatever it says. Nodes are in this process."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from test_who_is_who import KEYS, build_model, federation, node

from fedhm.assembly import design
from fedhm.config.loading import parse, parse_flat
from fedhm.config.schema import DeviceProfile, Measurement
from fedhm.data.samples import Preprocessing
from fedhm.flower.clients import UserModel
from fedhm.flower.nodes import LONGEST_TEXT, Node, NodeRegistry, TierChooser, assign_tiers, tier_objection
from fedhm.flower.server import run_on_grid
from fedhm.flower.wire import JSON_RECORD, RunInfo, introduction_request
from fedhm.networks.exchange import structure_digest
from fedhm.runs.folder import read_config
from fedhm.server.filters.fleet import TierWork
from fedhm.server.record import Record
from flower_loopback import Loopback, LoopbackNode

pytestmark = pytest.mark.usefixtures("without_figures")
SETTINGS = {
    "federation.clients": 4,
    "federation.participation": 1.0,
    "train.rounds": 1,
    "train.batch": 8,
    "method.tiers": "[1, 1/2, 1/4]",
    "method.keep": 0,
    "server.robust": "agreement",  # as in a deployment
    "engine.patience": 0.0,
    "engine.threads": 1,
    "engine.server_threads": 1,
}
HOSTILE = 3  # the client that introduces itself in many ways; others are honest
HONEST_TIERS = {0: "full", 1: "1/4", 2: "1/2"}  # named, by its memory, and by its number plus one


class Saying:
    """An app with an introduction of its own. It does no task."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __call__(self, message: Message, _: Context) -> Message:
        if message.metadata.message_type != "query":
            raise ValueError("no task is done here")
        answer = Message(RecordDict(), reply_to=message)
        answer.__dict__["_content"] = self._content  # as Flower's own reading of bytes leaves it
        return answer


class Following:
    """A watcher that keeps the records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def started(self, *_: object) -> None: ...
    def task_done(self, *_: object) -> None: ...

    def round_done(self, record: Record) -> None:
        self.records.append(record)


def profile(**changes: Any) -> DeviceProfile:
    steps = [Measurement(network=name, macs=1000, seconds=0.1, memory=9000) for name in ("nested full", "1/2", "1/4")]
    known = {"name": "phone", "model": structure_digest(build_model(), (6,)), "described": "x", "machine": "m"}
    return DeviceProfile(**{**known, "threads": 1, "batch": 8, "optimizer": "sgd", "steps": steps, **changes})


@cache
def memory_of(tier: str) -> int:
    """Return the bytes that training a tier takes, with checkpointing if that saves some."""
    config = parse_flat(SETTINGS, "test")
    built = design(config, build_model(), torch.zeros(1, 6), 3)
    work = TierWork(built.method, built.model, config, (6,))
    return min(work.memory(tier), work.memory(tier, work.can_checkpoint()))


def honest_nodes() -> dict[int, LoopbackNode]:
    return {1: node(0, tier="full"), 2: node(1, memory=f"{memory_of('1/4')}B"), 3: node(2, tier="1/2")}


def content_of(**changes: Any) -> RecordDict:
    return RecordDict({JSON_RECORD: ConfigRecord({**vars(Node(HOSTILE, 16)), **changes})})


def run(hostile: Any, out: Path | None = None, **changes: object) -> tuple[Record, list[str]]:
    """Run one round with three honest nodes and another one; return its record, and the printed sentences."""
    grid = Loopback({**honest_nodes(), 9: LoopbackNode(Saying(hostile), {}, KEYS[4])})  # type: ignore[arg-type]
    config = parse_flat({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}, "test")
    said: list[str] = []
    watcher = Following()
    run_on_grid(grid, config, UserModel(build_model, 0), federation, out, [watcher], said.append)
    (record,) = watcher.records
    return record, said


def honest_part(record: Record) -> dict[str, Any]:
    """Return everything in a record that does not name the hostile client, or depend on the clock."""
    return {
        "tiers": {p.client: p.tier for p in record.participants if p.client != HOSTILE},
        "dropped": [entry for entry in record.dropped if entry["client"] != HOSTILE],
        "metrics": record.metrics,
    }


JUNK_FILE = "its device file is of no use here: what it sent is no device file"


@pytest.mark.parametrize(
    ("introduction", "changes", "reason"),
    [
        ({"device": "junk"}, {}, JUNK_FILE),
        ({"device": "junk", "tier": "full"}, {}, "it names both a tier and a device file"),
        ({"device": profile().model_dump_json(), "tier": "full"}, {}, "it names both a tier and a device file"),
        ({"device": profile(model="0").model_dump_json()}, {}, "its device file is of no use here: it was measured"),
        ({"device": "x" * (LONGEST_TEXT + 1)}, {}, "its tier or device file has more than 65536 characters"),
        ({"tier": "x" * 2**20}, {}, "its tier or device file has more than 65536 characters"),
        ({"tier": "\x1b[2J\u202e"}, {}, "it asks for tier '�[2J�', known are full, 1/2, 1/4"),
        ({"memory": 1}, {}, "it can spare 0 MiB, but training even tier 1/4 takes"),
    ],
    ids=range(8),
)
def test_a_node_with_a_useless_introduction_is_left_out_alone(
    introduction: dict[str, Any], changes: dict[str, object], reason: str
) -> None:
    record, said = run(content_of(**introduction), **changes)
    assert any(sentence.startswith(f"client {HOSTILE} takes no part: {reason}") for sentence in said), said
    assert {p.client: p.tier for p in record.participants if p.client != HOSTILE} == HONEST_TIERS
    assert [entry["client"] for entry in record.dropped] == [HOSTILE]
    assert record.dropped[0]["reason"].startswith(reason)
    assert record.simulated is None


@pytest.mark.parametrize("device", ["junk", profile().model_dump_json(), profile(memory=1).model_dump_json()])
@pytest.mark.parametrize(
    "settings",
    [{"federation__assignment": '["full", "1/4", "1/2", "1/4"]'}, {"federation__heterogeneity": "dynamic"}],
    ids=["assignment", "dynamic"],
)
def test_a_device_file_changes_nothing_where_settings_decide(settings: dict[str, object], device: str) -> None:
    record, _ = run(content_of(device=device), **settings)
    plain, _ = run(content_of(), **settings)
    assert record.participants == plain.participants
    assert honest_part(record) == honest_part(plain)
    assert record.simulated is None


def test_a_valid_device_file_changes_no_other_client(tmp_path: Path) -> None:
    """Each client keeps what it would get alone: by its file, its name for a tier, its memory or its number."""
    quarter = memory_of("1/4")
    measured = profile(memory=8_999)  # less than any network took on the device
    for device, tier in ((profile(), "full"), (profile(memory=9_000), "full"), (measured, "none")):
        out = tmp_path / str(device.memory)
        record, _ = run(content_of(device=device.model_dump_json()), out)
        settings = read_config(out).federation
        assert settings.plan == ("full", "1/4", "1/2", tier)
        assert settings.device_of[1].memory == quarter
        assert settings.device_of[HOSTILE].profile == device
        assert record.simulated is not None
        assert {p.client: p.tier for p in record.participants if p.client != HOSTILE} == HONEST_TIERS


@pytest.mark.parametrize(
    "change", [{"macs": 10**400}, {"seconds": 1e308}, {"seconds": 1e-320}, {"memory": 2**70}], ids=range(4)
)
def test_numbers_from_which_times_overflow_are_refused(change: dict[str, float]) -> None:
    values = profile().model_dump(mode="json")
    values["steps"] = [step | change for step in values["steps"]]
    record, _ = run(content_of(device=json.dumps(values)))
    assert record.dropped[0]["reason"].startswith(JUNK_FILE)
    assert record.simulated is None


def test_more_memory_than_settings_can_hold_is_no_error_beside_a_device_file(tmp_path: Path) -> None:
    run(content_of(device=profile().model_dump_json(), memory=2**63 - 1), tmp_path / "run")
    assert read_config(tmp_path / "run").federation.plan == ("full", "1/4", "1/2", "full")


def test_nodes_without_a_wish_keep_the_tiers_of_their_numbers_beside_device_files(tmp_path: Path) -> None:
    nodes = {n + 1: node(n) for n in range(3)}
    file = tmp_path / "device.json"
    file.write_text(profile().model_dump_json())
    nodes[4] = node(3, **{"device-file": str(file)})
    config = parse_flat(SETTINGS, "test")
    run_on_grid(Loopback(nodes), config, UserModel(build_model, 0), federation, tmp_path / "run", [])
    assert read_config(tmp_path / "run").federation.plan == ("full", "1/2", "1/4", "full")


def test_a_wish_does_not_end_a_run_whose_samples_follow_the_tiers_of_numbers() -> None:
    """With data.partition = 'by-tier', settings decide: a tier that one node names must not be refused for all."""
    table = {"data": {"partition": "by-tier", "by_tier_levels": 3}, "federation": {"clients": 4}, "train": {"batch": 8}}
    config = parse(table, "test").resolved()
    nodes = {0: Node(0, 16, tier="1/4"), 3: Node(3, 16, device=profile().model_dump_json())}
    assert assign_tiers(config, chooser(), nodes).federation == config.federation


def test_a_client_without_a_tier_may_come_back_with_a_wish() -> None:
    """No tier fits its device. Naming one anyway once raised an error for all clients."""
    config = parse_flat({**SETTINGS, "federation.clients": 4}, "test")
    method = design(config, build_model(), torch.zeros(1, 6), 3).method
    devices = [{"name": "d", "clients": [0, 1, 2, 3]}]
    table = {"clients": 4, "devices": devices, "plan": ["full", "1/4", "1/2", "none"]}
    planned = config.model_copy(update={"federation": parse({"federation": table}, "test").federation})
    assert tier_objection(planned, method, Node(3, 16, "1/4")) == "it asks for tier 1/4, but no tier fits its device"


def test_device_files_do_not_travel_to_other_clients() -> None:
    devices = [{"name": "d", "clients": [0, 1], "profile": profile().model_dump()}]
    table = {"clients": 2, "devices": devices, "plan": ["full", "full"], "deadline": 3.0, "checkpointed": [1]}
    info = RunInfo(parse({"federation": table}, "test").resolved(), 3, Preprocessing())
    told = RunInfo.decode(RecordDict({JSON_RECORD: ConfigRecord({**info.encode()})})).config.federation
    assert (told.devices, told.plan, told.deadline) == ((), (), 0.0)
    assert told.checkpointed == (1,)


# ---- hundreds of introductions ----


def chooser() -> TierChooser:
    config = parse_flat(SETTINGS, "test")
    built = design(config, build_model(), torch.zeros(1, 6), 3)
    return TierChooser(config, TierWork(built.method, built.model, config, (6,)), structure_digest(build_model(), (6,)))


TEXTS = [
    "",
    "full",
    "1/4",
    "none",
    "\x00\x1b[31m",
    "\u202etier",
    "\ud800",
    "🦊" * 40,
    "9" * 5000,
    "x" * 2**20,
    "[" * 999,
]
NUMBERS = [-1, 0, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 10**30]
OTHERS: list[Any] = [1.5, float("nan"), float("inf"), True, b"\xff", [], [1, 2], ["a"], [0.5]]
JSON_VALUES: list[Any] = [
    None,
    True,
    [],
    {},
    "",
    "9e999",
    "1e-320",
    -1,
    0,
    1e-320,
    1e308,
    2**62,
    2**63,
    10**400,
    "\x1b",
]


def damaged_file(random: Random) -> str:
    """Return a device file with some of its values changed, or text that is none."""
    values = profile().model_dump(mode="json")
    for _ in range(random.randint(0, 2)):
        steps = values.get("steps")
        table = random.choice([values, steps[0]]) if isinstance(steps, list) and steps else values
        key = random.choice([*table, "x"])
        if random.random() < 0.2:
            table.pop(key, None)
        else:
            table[key] = random.choice(JSON_VALUES)
    text = json.dumps(values).replace("1e-320", random.choice(["1e-320", "NaN", "Infinity", "-0.0"]))
    cut = random.randrange(len(text))
    return random.choice(
        [text] * 6 + [text[:cut], text[:cut] + chr(random.randrange(0x3000)) + text[cut:], "[" * 60_000]
    )


def introductions(seed: int, count: int) -> Iterator[Any]:
    """Yield what a node may say: an honest introduction with changes, or something else entirely."""
    random = Random(seed)
    for _ in range(count):
        values: dict[str, Any] = {**vars(Node(HOSTILE, 16))}
        for _ in range(random.randint(1, 3)):
            field = random.choice([*values, "device", "tier", "memory", "client", "x"])
            number = random.choice([*NUMBERS, *range(5), memory_of("1/2")])
            text = random.choice(
                [*TEXTS, damaged_file(random), damaged_file(random), "float32 6", "float32 " + "9x" * 9]
            )
            kind = random.random()
            if kind < 0.1:
                values.pop(field, None)
            elif kind < 0.2:
                values[field] = random.choice([*OTHERS, number, text])
            else:
                is_number = field in ("client", "samples", "memory", "tests")
                values[field] = number if is_number else text
        record = ConfigRecord()
        record.__dict__["_data"] = values  # without Flower's checks on this side
        yield RecordDict({random.choice([JSON_RECORD] * 30 + ["x"]): record}) if random.random() < 0.98 else values


def test_no_introduction_changes_the_tiers_of_honest_nodes() -> None:
    """Hundreds of damaged introductions. Sample counts are those of the honest nodes, too."""
    config, chosen = parse_flat(SETTINGS, "test").resolved(), chooser()
    request = introduction_request(RunInfo(config, 3, Preprocessing()))
    honest = honest_nodes()
    told = 0
    grid = Loopback(dict(honest))
    registry = NodeRegistry(grid, 4, request, lambda _: None)
    for number, content in enumerate(introductions(0, 600), start=100):
        grid.nodes = {**honest, number: LoopbackNode(Saying(content), {}, KEYS[4])}  # type: ignore[arg-type]
        registry.refresh()
        nodes = registry.connected()
        assert {c: nodes[c].samples for c in HONEST_TIERS} == dict.fromkeys(HONEST_TIERS, 16)
        given = assign_tiers(config, chosen, nodes)
        assert not set(given.refused) & set(HONEST_TIERS)
        assert dict(enumerate(given.federation.given_tiers[:3])) == HONEST_TIERS
        parse({"federation": given.federation.model_dump(mode="json")}, "test")  # a resumed run reads it
        told += bool(given.refused)
    assert told > 50  # they reach the choice of tiers


@pytest.mark.slow
def test_no_introduction_changes_the_run_of_honest_nodes(tmp_path: Path) -> None:
    """Whole runs, of one round. The hostile client does no task, so that its part in the mean is none."""
    plain, _ = run(content_of())
    for number, content in enumerate(introductions(1, 200)):
        record, said = run(content, tmp_path / str(number) if number % 10 == 0 else None)
        assert honest_part(record) == honest_part(plain), number
        assert all(sentence.isprintable() and len(sentence) < 500 for sentence in said)
