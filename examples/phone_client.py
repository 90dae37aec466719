"""A client that trains by ExecuTorch alone: no model code, nothing of fedhm. Made to be read, and translated.

It needs the files that `fedhm export … --to executorch --train` writes: the graph and its manifest. Weights come as
safetensors, and go back as safetensors:

    python phone_client.py 1-8.train.json samples.safetensors weights.safetensors update.safetensors --round 3

`samples.safetensors` holds `inputs` and `targets`. Beside the update there is a JSON file with its loss and labels. On
Flower, `flower_app` returns a ClientApp that answers the messages of a fedhm server (docs/on-device.md).

torch is here a container of numbers, because ExecuTorch's Python bindings use it. C++ has the same calls.
"""

import argparse
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = "fedhm-training-graph-1"
Tensors = dict[str, Tensor]


class PhoneError(Exception):
    """One sentence for a person."""


class Phone:
    """One tier's training graph in the runtime."""

    def __init__(self, manifest_path: str | Path) -> None:
        path = Path(manifest_path)
        try:
            self.manifest = json.loads(path.read_text(encoding="utf-8"))
            if self.manifest["format"] != FORMAT:
                raise PhoneError(f"{path} is not a manifest of this kind of training graph")
            program = path.with_name(self.manifest["file"]).read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PhoneError(f"{path} cannot be read as a manifest with its file: {error}") from None
        if hashlib.sha256(program).hexdigest() != self.manifest["sha256"]:
            raise PhoneError(f"{self.manifest['file']} is damaged, or not the file of {path}")
        from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
        from executorch.extension.training import TrainingModule

        self._program = program  # the runtime reads it where it lies
        self._module = _load_for_executorch_from_buffer(program)
        self._training = quietly(TrainingModule, self._module)

    # ---- one round ----

    def train(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, round_number: int, seed: int = 0
    ) -> tuple[Tensors, float, list[int] | None]:
        """Train for one round; return the trained tensors, the mean loss of the last epoch, and the labels."""
        m = self.manifest
        self.check_samples(inputs, targets)
        self.check_tensors(tensors)
        labels = sorted(set(targets.tolist())) if m["masked"] else None
        held = torch.ones(m["outputs"])
        if labels is not None:
            held = torch.tensor([float(number in labels) for number in range(m["outputs"])])
        bases = [tensors[f"basis {layer}"] for layer in m["bases"]]

        self._forward_backward(inputs[:1], targets[:1], held, bases)  # the runtime then tells its parameters
        prefix = m["methods"]["train"]["prefix"]
        parameters = {name.removeprefix(prefix): p for name, p in self._training.named_parameters().items()}
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])  # in the runtime's own memory
        averages = {each[part]: tensors[each[part]].clone() for each in m["statistics"] for part in MOMENTS}
        optimizers = self._optimizers(parameters, round_number)

        generator = torch.Generator().manual_seed(seed * 1_000_003 + round_number)
        batches = self._batches(len(targets), generator)
        last_epoch = len(batches) - len(split(torch.arange(len(targets)), m["batch"]))
        total = seen = 0.0
        for number, rows in enumerate(batches):
            batch = self._augmented(inputs[rows], generator)
            loss, moments = self._forward_backward(batch, targets[rows], held, bases)
            gradients = {n.removeprefix(prefix): g for n, g in self._training.named_gradients().items()}
            clip(gradients, m["clip_norm"])
            for names, optimizer in optimizers:
                optimizer.step({name: gradients[name] for name in names})
            for each, (mean, variance) in zip(m["statistics"], moments, strict=True):
                averages[each["mean"]].lerp_(mean, each["momentum"])
                averages[each["variance"]].lerp_(variance, each["momentum"])
            if number >= last_epoch:
                total, seen = total + loss * len(rows), seen + len(rows)
        if not math.isfinite(total):
            raise PhoneError("the loss is not a number any more: lower the learning rate")
        trained = {name: p.clone() for name, p in parameters.items()} | averages
        return {name: trained[name] for name in m["sends"]}, total / seen, labels

    def evaluate(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Return the outputs of the network with these tensors."""
        rows, names = self.manifest["rows"], self.manifest["sends"]
        found = []
        for part in inputs.split(rows):
            whole = part[torch.arange(rows).clamp(max=len(part) - 1)].contiguous()
            given = [*(tensors[name].contiguous() for name in names), whole]
            found.append(self._module.run_method(self.manifest["methods"]["evaluate"]["name"], given)[0][: len(part)])
        return torch.cat(found)

    def _forward_backward(
        self, inputs: Tensor, targets: Tensor, held: Tensor, bases: list[Tensor]
    ) -> tuple[float, list[tuple[Tensor, Tensor]]]:
        rows, count = self.manifest["rows"], len(targets)
        places = torch.arange(rows).clamp(max=count - 1)  # missing rows repeat the last one, with weight 0
        weights = (torch.arange(rows) < count).float()
        given = [inputs[places], targets[places], weights, held, *bases]
        method = self.manifest["methods"]["train"]["name"]
        _, loss, *moments = self._training.forward_backward(method, [each.contiguous() for each in given])
        return loss.item(), list(zip(moments[::2], moments[1::2], strict=True))

    def _optimizers(self, parameters: Tensors, round_number: int) -> list[tuple[list[str], Any]]:
        from executorch.extension.training import get_sgd_optimizer

        m = self.manifest
        rate = m["learning_rate"]
        lr = rate["lr"] * rate["factor"] ** sum(round_number > milestone for milestone in rate["milestones"])
        found = []
        for decay in sorted({each["weight_decay"] for each in m["parameters"]}):
            names = [each["name"] for each in m["parameters"] if each["weight_decay"] == decay]
            own = {name: parameters[name] for name in names}
            sgd = quietly(get_sgd_optimizer, own, lr, m["momentum"], m["dampening"], decay, m["nesterov"])
            found.append((names, sgd))
        return found

    def _batches(self, samples: int, generator: torch.Generator) -> list[Tensor]:
        m = self.manifest
        steps = m["iterations"] or m["epochs"] * len(split(torch.arange(samples), m["batch"]))
        found: list[Tensor] = []
        while len(found) < steps:
            found += split(torch.randperm(samples, generator=generator), m["batch"])
        return found[:steps]

    def _augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Shift by up to `crop` black pixels, and mirror half of the images."""
        pad, flip = self.manifest["crop"], self.manifest["flip"]
        if images.dtype != torch.uint8 or not (pad or flip):
            return images
        _, _, height, width = images.shape
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
        moves = torch.randint(0, 2 * pad + 1, (2, len(images)), generator=generator).tolist()
        mirrored = torch.randint(0, 2, (len(images),), generator=generator).tolist()
        cut = [
            image[:, top : top + height, left : left + width] for image, top, left in zip(padded, *moves, strict=True)
        ]
        return torch.stack([each.flip(2) if flip and m else each for each, m in zip(cut, mirrored, strict=True)])

    # ---- what does not fit ----

    def check_samples(self, inputs: Tensor, targets: Tensor) -> None:
        m = self.manifest
        for name, given in (("inputs", inputs), ("targets", targets)):
            wanted = (tuple(m[name]["shape"]), m[name]["dtype"])
            found = (tuple(given.shape[1:]), str(given.dtype).removeprefix("torch."))
            if found != wanted:
                raise PhoneError(
                    f"the samples' {name} are {found[1]} of shape {found[0]}, not {wanted[1]} of {wanted[0]}"
                )
        if not len(targets) or len(inputs) != len(targets):
            raise PhoneError(f"there are {len(inputs)} inputs and {len(targets)} targets: give as many of both")
        if not targets.is_floating_point() and not 0 <= targets.min() <= targets.max() < m["outputs"]:
            raise PhoneError(f"the labels must be in 0…{m['outputs'] - 1}")

    def check_tensors(self, tensors: Tensors) -> None:
        wanted = {each["name"]: each["shape"] for each in self.manifest["parameters"]}
        wanted |= {each[part]: each["shape"] for each in self.manifest["statistics"] for part in MOMENTS}
        wanted |= {f"basis {layer}": shape for layer, shape in self.manifest["bases"].items()}
        why = f"the weights do not fit the graph of tier {self.manifest['tier']}"
        for name, shape in wanted.items():
            if name not in tensors or list(tensors[name].shape) != shape:
                found = list(tensors[name].shape) if name in tensors else "missing"
                raise PhoneError(f"{why}: '{name}' is {found}, not {shape}")
        if unknown := sorted(set(tensors) - set(wanted)):
            raise PhoneError(f"{why}: it has no '{unknown[0]}'")


MOMENTS = ("mean", "variance")


def quietly(make: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of ExecuTorch, which warns that its training is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*arguments)


def split(order: Tensor, size: int) -> list[Tensor]:
    """Split into batches; a single last sample joins the batch before it, since one value has no variance."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def clip(gradients: Tensors, limit: float) -> None:
    """Scale all gradients together, so that their norm is at most `limit`; 0: no limit."""
    if limit:
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
        for each in gradients.values():
            each.mul_(min(1.0, limit / (norm + 1e-6)))


# ---- Flower ----


def flower_app(phone_of: Callable[[Any], Phone], samples_of: Callable[[Any], tuple[Tensor, Tensor]]) -> Any:
    """Return a ClientApp for nodes that have a training graph instead of a model.

    phone_of    returns the Phone of a node, from its context
    samples_of  returns its inputs and targets
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        own: dict[str, Any] = {
            "client": int(context.node_config["partition-id"]),
            "samples": 0,
            "tier": "",
            "memory": 0,
        }
        own |= {"problem": "", "tests": 0, "device": "", "inputs": ""}
        try:
            phone, (inputs, targets) = phone_of(context), samples_of(context)
            phone.check_samples(inputs, targets)
            own |= {"samples": len(targets), "tier": phone.manifest["tier"]}
            if not json.loads(str(message.content.config_records["fedhm"]["terms"]))["classes"]:
                own["inputs"] = f"{inputs.dtype} {'x'.join(map(str, inputs.shape[1:]))}".removeprefix("torch.")
        except PhoneError as error:
            own["problem"] = str(error)
        return Message(RecordDict({"fedhm": ConfigRecord(own)}), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        replies: list[dict[str, Any]] = []
        records: dict[str, Any] = {}
        for number, task in enumerate(json.loads(str(message.content.config_records["fedhm"]["tasks"]))):
            try:
                phone = phone_of(context)
                if task["kind"] != phone.manifest["work"]:
                    raise PhoneError(f"this client can do '{phone.manifest['work']}', not '{task['kind']}'")
                arrays = message.content.array_records[f"tensors.{number}"]
                types = task["tensors"]
                given = {n: torch.tensor(arrays[n].numpy()).to(getattr(torch, types[n])) for n in types}
                inputs, targets = samples_of(context)
                trained, loss, labels = phone.train(given, inputs, targets, task["round"], task["client"])
            except PhoneError as error:
                replies.append({"failure": str(error)})
                continue
            values = {name: task[name] for name in ("kind", "round", "client", "tier", "network")}
            replies.append(values | {"samples": len(targets), "labels": labels, "loss": loss, "measured": None})
            records[f"tensors.{number}"] = ArrayRecord({n: Array(t.numpy()) for n, t in trained.items()})
        records["fedhm"] = ConfigRecord({"replies": json.dumps(replies)})
        return Message(RecordDict(records), reply_to=message)

    return app


# ---- files ----


def read(path: str) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise PhoneError(f"{path} cannot be read as safetensors: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tier for one round with ExecuTorch.")
    for name in ("manifest", "samples", "weights", "update"):
        parser.add_argument(name)
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        phone, samples = Phone(options.manifest), read(options.samples)
        if set(samples) != {"inputs", "targets"}:
            raise PhoneError(f"{options.samples} must hold 'inputs' and 'targets'")
        weights = read(options.weights)
        trained, loss, labels = phone.train(weights, samples["inputs"], samples["targets"], options.round, options.seed)
    except PhoneError as error:
        sys.exit(f"phone_client: {error}")
    save_file({name: tensor.contiguous() for name, tensor in trained.items()}, options.update)
    facts = {"round": options.round, "samples": len(samples["targets"]), "loss": loss, "labels": labels}
    Path(options.update).with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
