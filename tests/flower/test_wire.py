"""Tasks and replies pass through Flower's records unchanged, their bytes are counted, and pickles are refused."""

import re
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fedhm.config.loading import parse
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.flower.wire import RunInfo, TaskEncoder, bytes_by_task, decode_replies, decode_tasks, encode_replies
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Failure, Task, TaskOptions, Update

INFO = RunInfo(parse({"seed": 1}, "test").resolved(), 10, Preprocessing((0.5,), (0.25,), 2, True))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "conv.u": torch.randn(8, 3, 3, 1, generator=generator),
        "conv.v": torch.randn(16, 8, 1, 3, generator=generator),
        "norm.weight": torch.randn(16, generator=generator),
        "scale": torch.tensor(2.5, dtype=torch.float64),
    }


def task(client: int = 3) -> Task:
    return Task(
        "train",
        2,
        client,
        "1/2",
        NetworkSpec("1/2"),
        tensors(),
        {"kept.weight": torch.ones(2, 2)},
        TaskOptions(digest_lr=0.1),
    )


def update(of: Task) -> Update:
    changed = {name: tensor + 1 for name, tensor in of.tensors.items()}
    return Update(of.kind, of.round, of.client, of.tier, of.network, changed, 57, (0, 3, 7), 0.75, 0, dict(of.kept))


def test_tasks_arrive_as_they_were_sent() -> None:
    sent = [task(), replace(task(), kind="statistics", kept={}, options=TaskOptions())]
    content = TaskEncoder(INFO, fp16=False).encode(sent)
    assert RunInfo.decode(content) == INFO
    for before, after in zip(sent, decode_tasks(content), strict=True):
        assert_same(before, after)


def test_replies_arrive_as_they_were_sent() -> None:
    sent = [update(task()), Failure(3, "no memory"), replace(update(task()), labels=None, loss=float("nan"))]
    found = decode_replies(encode_replies(sent, fp16=False), [task()] * 3, fp16=False)
    assert isinstance(found[0], Update)
    assert_same(sent[0], found[0])
    assert found[1] == Failure(3, "no memory")
    assert isinstance(found[2], Update)
    assert found[2].labels is None
    assert np.isnan(found[2].loss)


def test_fp16_halves_matrices_and_comes_back_in_the_type_that_was_sent() -> None:
    whole, halved = (TaskEncoder(INFO, fp16).encode([replace(task(), kept={})]) for fp16 in (False, True))
    sizes = {name: len(array.data) for name, array in halved.array_records["tensors.0"].items()}
    for name, array in whole.array_records["tensors.0"].items():
        payload = np.prod(array.shape) * np.dtype(array.dtype).itemsize
        saved = payload // 2 if len(array.shape) > 1 else 0
        assert sizes[name] == len(array.data) - saved
    arrived = decode_tasks(halved)[0].tensors
    for name, tensor in tensors().items():
        assert arrived[name].dtype == tensor.dtype
        torch.testing.assert_close(arrived[name], tensor, rtol=1e-3, atol=1e-3)
    (reply,) = decode_replies(encode_replies([update(task())], fp16=True), [task()], fp16=True)
    assert isinstance(reply, Update)
    assert {name: t.dtype for name, t in reply.tensors.items()} == {n: t.dtype for n, t in tensors().items()}


def test_statistics_are_never_halved() -> None:
    counts = replace(update(task()), kind="statistics", tensors={"norm/values": torch.full((1, 1), 1e6)}, kept={})
    (reply,) = decode_replies(
        encode_replies([counts], fp16=True), [replace(task(), kind="statistics", kept={})], fp16=True
    )
    assert isinstance(reply, Update)
    assert reply.tensors["norm/values"].item() == 1e6


def test_values_too_large_for_half_precision_are_an_error() -> None:
    """They would arrive as infinity, and the client's loss would become NaN."""
    large = {**tensors(), "conv.u": torch.full((8, 3, 3, 1), 7e4)}
    sentence = "'conv.u' holds 7e+04, too large for half precision: set engine.fp16 = false"
    with pytest.raises(FedhmError, match=f"^{re.escape(sentence)}$"):
        TaskEncoder(INFO, fp16=True).encode([replace(task(), tensors=large)])
    sent = [update(task()), replace(update(task()), tensors=large)]
    first, second = decode_replies(encode_replies(sent, fp16=True), [task()] * 2, fp16=True)
    assert isinstance(first, Update)
    assert second == Failure(3, sentence)
    diverged = replace(update(task()), tensors={**tensors(), "conv.u": torch.full((8, 3, 3, 1), torch.inf)})
    (reply,) = decode_replies(encode_replies([diverged], fp16=True), [task()], fp16=True)
    assert isinstance(reply, Update)  # that it is not finite is for admission to say


def test_clients_with_equal_tensors_share_one_record() -> None:
    encoder, shared = TaskEncoder(INFO, fp16=False), tensors()
    first, second = (encoder.encode([replace(task(c), tensors=dict(shared), kept={})]) for c in (0, 1))
    other = encoder.encode([replace(task(2), tensors=tensors(), kept={})])
    assert first["tensors.0"] is second["tensors.0"]
    assert other["tensors.0"] is not first["tensors.0"]


def test_bytes_are_those_of_the_records() -> None:
    content = TaskEncoder(INFO, fp16=False).encode([task(), replace(task(), kept={})])
    first, second = bytes_by_task(content, 2)
    arrays = sum(len(array.data) for array in content.array_records["tensors.0"].values())
    kept = sum(len(array.data) for array in content.array_records["kept.0"].values())
    note = content.config_records["fedhm"].count_bytes()
    names = sum(len(name) for name in (*tensors(), "kept.weight"))
    assert arrays + kept + note <= first <= arrays + kept + note + names + 64 * 5
    assert bytes_by_task(content, 2)[1] == second
    assert sum(bytes_by_task(content, 2)) == first + second


def test_a_type_unknown_to_numpy_is_an_error() -> None:
    with pytest.raises(FedhmError, match=r"'w' is of torch\.bfloat16, which Flower cannot send: use float32"):
        TaskEncoder(INFO, fp16=False).encode([replace(task(), tensors={"w": torch.ones(2, dtype=torch.bfloat16)})])


def test_pickled_arrays_are_refused() -> None:
    content = encode_replies([update(task())], fp16=False)
    buffer = np.array([{"a": 1}], dtype=object)
    hostile = Array("object", (1,), "numpy.ndarray", _saved_with_pickle(buffer))
    record = ArrayRecord({**dict(content.array_records["tensors.0"]), "scale": hostile})
    (reply,) = decode_replies(RecordDict({**content, "tensors.0": record}), [task()], fp16=False)
    assert isinstance(reply, Failure)
    assert "pickle" in reply.reason.lower() or "allow_pickle" in reply.reason


def _saved_with_pickle(array: "np.ndarray[tuple[int], np.dtype[np.object_]]") -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def assert_same(before: Task | Update, after: Task | Update) -> None:
    for name, value in vars(before).items():
        found = getattr(after, name)
        if isinstance(value, dict) and name in ("tensors", "kept"):
            assert list(found) == list(value)
            for key, tensor in value.items():
                assert found[key].dtype == tensor.dtype
                assert torch.equal(found[key], tensor)
        else:
            assert found == value, name
