"""Clients that fail in the ways that the run config says: {"round client": what}."""

import json
import os
import signal
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from faulty.task import build_model, client_data
from fedhm.flower import client_app
from fedhm.flower.wire import decode_tasks

honest = client_app(build_model, client_data)
app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    faults = json.loads(str(context.run_config["faults"]))
    fault = faults.get(f"{decode_tasks(message.content)[0].round} {context.node_config['partition-id']}")
    if fault == "raise":
        raise ValueError("the disk is full")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    reply = honest(message, context)
    arrays = reply.content.array_records["tensors.0"]
    if fault == "NaN":
        name = next(iter(arrays))
        arrays[name] = Array(np.full(arrays[name].shape, np.nan, dtype=np.float32))
    if fault == "rank":
        name = next(iter(arrays))
        arrays[name] = Array(np.zeros(1, dtype=np.float32))
    assert isinstance(arrays, ArrayRecord)
    return reply
