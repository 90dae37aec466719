"""A client that trains by ExecuTorch alone: no model code, nothing of fedhm. Made to be read, and translated.

It needs the files that `fedhm export … --to executorch --train` writes: the graph and its manifest. Weights come as
safetensors, and go back as safetensors:

    python phone_client.py 1-8.train.json samples.safetensors weights.safetensors update.safetensors --round 3

`samples.safetensors` holds `inputs` and `targets`. Beside the update there is a JSON file with its loss and labels. On
Flower, `flower_app` returns a ClientApp that answers the messages of a fedhm server (docs/on-device.md).

torch is here a container of numbers, because ExecuTorch's Python bindings use it. C++ has the same calls.
"""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import math
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

FORMAT = "fedhm-training-graph-1"
Tensors = dict[str, Tensor]


class PhoneError(Exception):
    """One sentence for a person."""


class Phone:
    """One tier's training graph in the runtime."""

    def __init__(self, manifest_path: str | Path) -> None:
        path = Path(manifest_path)
        self.manifest = read_manifest(path)
        try:
            self._program = path.with_name(self.manifest["file"]).read_bytes()  # the runtime reads it where it lies
        except (OSError, ValueError) as error:
            raise PhoneError(f"{path} cannot be read as a manifest with its file: {error}") from None
        if hashlib.sha256(self._program).hexdigest() != self.manifest["sha256"]:
            raise PhoneError(f"{self.manifest['file']} is damaged, or not the file of {path}")
        portable, training = in_runtime("ExecuTorch cannot be imported", import_runtime)
        why = f"the runtime cannot load {self.manifest['file']}"
        self._module = in_runtime(why, portable._load_for_executorch_from_buffer, self._program)
        self._training = in_runtime(why, training.TrainingModule, self._module)
        self._make_optimizer = training.get_sgd_optimizer
        try:
            moments = self._try()
        except PhoneError as error:
            raise PhoneError(f"{path} does not fit {self.manifest['file']}: {error}") from None
        prefix = self.manifest["methods"]["train"]["prefix"]
        named = self._training.named_parameters()  # the runtime tells them after a step only
        self._parameters = {name.removeprefix(prefix): p for name, p in named.items()}
        self._check_graph(path, moments)

    # ---- one round ----

    def train(
        self, tensors: Tensors, inputs: Tensor, targets: Tensor, round_number: int, seed: int = 0
    ) -> tuple[Tensors, float, list[int] | None]:
        """Train for one round; return the trained tensors, the mean loss of the last epoch, and the labels.

        Running averages need not come, because servers gather BatchNorm statistics otherwise. Then they begin at 0 and
        1, and do not go back.
        """
        m = self.manifest
        self.check_samples(inputs, targets)
        self.check_tensors(tensors)
        labels = sorted(set(targets.tolist())) if m["masked"] else None
        held = torch.ones(m["outputs"])
        if labels is not None:
            held = torch.tensor([float(number in labels) for number in range(m["outputs"])])
        bases = [tensors[f"basis {layer}"] for layer in m["bases"]]

        self._load(tensors)
        averages = {name: tensor.clone() for name, tensor in self._averages(tensors).items()}
        optimizers = self._optimizers(learning_rate(m["learning_rate"], round_number))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + round_number)
        batches = self._batches(len(targets), generator)
        last_epoch = len(batches) - len(split(torch.arange(len(targets)), m["batch"]))
        total = seen = 0.0
        for number, rows in enumerate(batches):
            batch = self._augmented(inputs[rows], generator)
            loss, moments = self._forward_backward(batch, targets[rows], held, bases)
            prefix = m["methods"]["train"]["prefix"]
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
        trained = {name: p.clone() for name, p in self._parameters.items()} | averages
        return {name: trained[name] for name in m["sends"] if name in tensors}, total / seen, labels

    def gather(self, tensors: Tensors, inputs: Tensor, targets: Tensor) -> Tensors:
        """Return how many values each channel of each BatchNorm layer saw, their mean and their variance.

        The batches pool exactly: N = Σ nᵢ, M = Σ nᵢ mᵢ / N, V = Σ nᵢ (vᵢ + (mᵢ − M)²) / N. Nothing is trained.
        """
        m = self.manifest
        self.check_samples(inputs, targets)
        bases = {f"basis {layer}": torch.zeros(shape) for layer, shape in m["bases"].items()}  # for the loss alone
        self.check_tensors(tensors | bases)
        self._load(tensors)
        held = torch.ones(m["outputs"])
        batches = split(torch.arange(len(targets)), m["batch"])
        found = [self._forward_backward(inputs[b], targets[b], held, list(bases.values()))[1] for b in batches]
        gathered: Tensors = {}
        for number, each in enumerate(m["statistics"]):
            n = torch.tensor([len(rows) * each["values"] for rows in batches], dtype=torch.float64)
            means, unbiased = (torch.stack([batch[number][part] for batch in found]).double() for part in (0, 1))
            variances = unbiased * ((n - 1) / n)[:, None]
            mean = n @ means / n.sum()
            variance = n @ (variances + (means - mean) ** 2) / n.sum()
            if not variance.isfinite().all():
                raise PhoneError(f"the values of '{each['mean']}' have no variance: give more samples, or lower lr")
            layer = each["mean"].rpartition(".")[0]
            gathered |= {f"{layer}/values": n.sum(), f"{layer}/mean": mean, f"{layer}/variance": variance}
        return gathered

    def evaluate(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Return the outputs of the network with these tensors."""
        rows, names = self.manifest["rows"], self.manifest["sends"]
        method = self.manifest["methods"]["evaluate"]["name"]
        tensors = tensors | self._averages(tensors)
        found = []
        for part in inputs.split(rows):
            whole = part[torch.arange(rows).clamp(max=len(part) - 1)].contiguous()
            given = [*(tensors[name].contiguous() for name in names), whole]
            outputs = in_runtime("the runtime cannot evaluate", self._module.run_method, method, given)
            found.append(outputs[0][: len(part)])
        return torch.cat(found)

    def _load(self, tensors: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])  # in the runtime's own memory

    def _averages(self, tensors: Tensors) -> Tensors:
        """Return the running averages that came; in place of others 0 for a mean, and 1 for a variance."""
        found: Tensors = {}
        for each in self.manifest["statistics"]:
            for part, missing in (("mean", torch.zeros), ("variance", torch.ones)):
                name = each[part]
                found[name] = tensors[name] if name in tensors else missing(each["shape"])
        return found

    def _try(self) -> list[tuple[Tensor, Tensor]]:
        """Make one step with ones, which are thrown away."""
        m = self.manifest
        inputs, targets = (
            torch.ones(1, *m[n]["shape"]).to(getattr(torch, m[n]["dtype"])) for n in ("inputs", "targets")
        )
        if not targets.is_floating_point():
            targets.zero_()  # the first label: there may be no other
        bases = [torch.ones(shape) for shape in m["bases"].values()]
        return self._forward_backward(inputs, targets, torch.ones(m["outputs"]), bases)[1]

    def _forward_backward(
        self, inputs: Tensor, targets: Tensor, held: Tensor, bases: list[Tensor]
    ) -> tuple[float, list[tuple[Tensor, Tensor]]]:
        rows, count = self.manifest["rows"], len(targets)
        places = torch.arange(rows).clamp(max=count - 1)  # missing rows repeat the last one, with weight 0
        weights = (torch.arange(rows) < count).float()
        given = [inputs[places], targets[places], weights, held, *bases]
        method = self.manifest["methods"]["train"]["name"]
        call, why = self._training.forward_backward, "the runtime cannot make a step"
        _, loss, *moments = in_runtime(why, call, method, [each.contiguous() for each in given])
        return loss.item(), list(zip(moments[::2], moments[1::2], strict=True))

    def _optimizers(self, lr: float) -> list[tuple[list[str], Any]]:
        m = self.manifest
        found = []
        for decay in sorted({each["weight_decay"] for each in m["parameters"]}):
            names = [each["name"] for each in m["parameters"] if each["weight_decay"] == decay]
            own = {name: self._parameters[name] for name in names}
            settings = (lr, m["momentum"], m["dampening"], decay, m["nesterov"])
            found.append((names, in_runtime("there is no optimizer", self._make_optimizer, own, *settings)))
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
        averages = {each[part]: each["shape"] for each in self.manifest["statistics"] for part in MOMENTS}
        wanted |= {name: shape for name, shape in averages.items() if name in tensors}
        wanted |= {f"basis {layer}": shape for layer, shape in self.manifest["bases"].items()}
        why = f"the weights do not fit the graph of tier {self.manifest['tier']}"
        for name, shape in wanted.items():
            if name not in tensors or list(tensors[name].shape) != shape:
                found = list(tensors[name].shape) if name in tensors else "missing"
                raise PhoneError(f"{why}: '{name}' is {found}, not {shape}")
            if tensors[name].dtype != torch.float32:
                raise PhoneError(f"{why}: '{name}' is {str(tensors[name].dtype).removeprefix('torch.')}, not float32")
        if unknown := sorted(set(tensors) - set(wanted)):
            raise PhoneError(f"{why}: it has no '{unknown[0]}'")

    def check_run(self, terms: str) -> None:
        """Refuse a server's run that the graph was not exported for; `terms` are those of its messages."""
        config = tomllib.loads(json.loads(terms)["config"])
        privacy = config.get("privacy", {})
        if privacy.get("clip") and privacy.get("where") == "client":
            raise PhoneError(
                "the run has privacy.where = 'client', and a client with a training graph does not clip its update or "
                "add noise to it"
            )
        for key, own in self.manifest["settings"].items():
            section, _, name = key.partition(".")
            values = config.get(section, {})
            given = values.get(name, DEFAULTS.get(name)) if name else values
            if given != own:
                raise PhoneError(
                    f"the training graph was exported with {key} = {json.dumps(own)}, and the server's run has "
                    f"{json.dumps(given)}: export it with the settings of the run"
                )

    def _check_graph(self, path: Path, moments: list[tuple[Tensor, Tensor]]) -> None:
        """Refuse a manifest with other parameters or statistics than the graph."""
        m = self.manifest
        graph = {name: list(p.shape) for name, p in self._parameters.items()}
        listed = {each["name"]: each["shape"] for each in m["parameters"]}
        for name in sorted(graph.keys() | listed.keys()):
            if graph.get(name) != listed.get(name):
                found, wanted = graph.get(name, "missing"), listed.get(name, "missing")
                raise PhoneError(f"{path} does not fit its graph: '{name}' is {wanted} there, and {found} in the graph")
        shapes = [[each["shape"]] * 2 for each in m["statistics"]]
        if [[list(mean.shape), list(variance.shape)] for mean, variance in moments] != shapes:
            raise PhoneError(f"{path} does not fit its graph: its statistics are not those of the BatchNorm layers")
        known = listed.keys() | {each[part] for each in m["statistics"] for part in MOMENTS}
        if set(m["sends"]) != known:
            raise PhoneError(f"{path} does not fit its graph: 'sends' must name all parameters and statistics")


MOMENTS = ("mean", "variance")
DEFAULTS = {"schedule": "milestones", "warmup_rounds": 0}  # of settings that a server leaves out

# The fields of a manifest and their types; a list has one type for all of its items.
SAMPLE = {"shape": [int], "dtype": str}
FIELDS = {
    **dict.fromkeys(("file", "sha256", "tier", "work"), str),
    **dict.fromkeys(("outputs", "rows", "batch", "epochs", "iterations", "crop"), int),
    **dict.fromkeys(("momentum", "dampening", "clip_norm"), float),
    **dict.fromkeys(("nesterov", "masked", "flip"), bool),
    "methods": {"train": {"name": str, "prefix": str}, "evaluate": {"name": str}},
    "inputs": SAMPLE,
    "targets": SAMPLE,
    "learning_rate": {
        **dict.fromkeys(("lr", "factor"), float),
        **dict.fromkeys(("warmup_rounds", "rounds"), int),
        "schedule": str,
        "milestones": [int],
    },
    "parameters": [{"name": str, "shape": [int], "weight_decay": float}],
    "statistics": [{"mean": str, "variance": str, "shape": [int], "momentum": float, "values": int}],
    "bases": dict,
    "sends": [str],
    "settings": dict,
}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest, or refuse it in one sentence."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PhoneError(f"{path} cannot be read as a manifest: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PhoneError(f"{path} is not a manifest of this kind of training graph")
    problem = misfit(found, FIELDS, "") or misfit(list(found["bases"].values()), [[int]], "bases")
    if not problem and found["rows"] != found["batch"] + 1:
        problem = f"{found['rows']} rows are not those of a batch of {found['batch']}, and one more"
    if not problem and (found["batch"] < 1 or max(found["epochs"], found["iterations"]) < 1):
        problem = "batch, and epochs or iterations, must be 1 or more"
    for name in ("inputs", "targets"):
        if not problem and not isinstance(getattr(torch, found[name]["dtype"], None), torch.dtype):
            problem = f"torch has no type '{found[name]['dtype']}', of {name}"
    if not problem and found["learning_rate"]["schedule"] not in SCHEDULES:
        problem = f"learning_rate.schedule must be one of {', '.join(SCHEDULES)}"
    if problem:
        raise PhoneError(f"{path} is a damaged manifest: {problem}")
    return found


def misfit(value: Any, wanted: Any, name: str) -> str:
    """Return which part of a manifest is missing or of another type; empty if there is none."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            return f"'{name}' must be a table"
        names = {key: f"{name}.{key}".removeprefix(".") for key in wanted}
        parts = ((value[key], wanted[key], names[key]) if key in value else names[key] for key in wanted)
        problems = (f"it has no '{part}'" if isinstance(part, str) else misfit(*part) for part in parts)
        return next(filter(None, problems), "")
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return f"'{name}' must be a list"
        return next(filter(None, (misfit(each, wanted[0], name) for each in value)), "")
    kinds = (int, float) if wanted is float else (wanted,)
    return "" if type(value) in kinds else f"'{name}' is {json.dumps(value)}, which is no {wanted.__name__}"


def import_runtime() -> tuple[Any, Any]:
    from executorch.extension import training
    from executorch.extension.pybindings import portable_lib

    return portable_lib, training


def in_runtime(why: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of ExecuTorch. An error is one sentence, with the first line that the runtime wrote about it.

    The runtime writes on the standard error, and Python's part of it warns that training is experimental.
    """
    written, level = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(written), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(*arguments)
    except Exception as error:  # whatever a runtime raises
        lines = [line for line in written.getvalue().splitlines() if line.startswith("[") and "cpuinfo" not in line]
        told = lines[0].partition("] ")[2] if lines else str(error)
        raise PhoneError(f"{why}: {' '.join(told.split())}") from None
    finally:
        logging.disable(level)


SCHEDULES = ("milestones", "cosine", "constant")


def learning_rate(rate: dict[str, Any], round_number: int) -> float:
    """Return the learning rate of round 1, 2, …; a milestone is the last round before a drop."""
    lr, warm_up = float(rate["lr"]), int(rate["warmup_rounds"])
    if round_number <= warm_up:
        return lr * round_number / (warm_up + 1)
    if rate["schedule"] == "cosine":
        done = (round_number - 1 - warm_up) / (rate["rounds"] - warm_up)
        return lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    drops: int = sum(round_number > milestone for milestone in rate["milestones"])
    return lr * float(rate["factor"]) ** drops


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

STATISTICS = "statistics"  # the kind of a task that gathers BatchNorm statistics for an evaluation


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
            terms = str(message.content.config_records["fedhm"]["terms"])
            phone.check_run(terms)
            phone.check_samples(inputs, targets)
            own |= {"samples": len(targets), "tier": phone.manifest["tier"]}
            if not json.loads(terms)["classes"]:
                own["inputs"] = f"{inputs.dtype} {'x'.join(map(str, inputs.shape[1:]))}".removeprefix("torch.")
        except PhoneError as error:
            own["problem"] = str(error)
        return Message(RecordDict({"fedhm": ConfigRecord(own)}), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        replies: list[dict[str, Any]] = []
        records: dict[str, Any] = {}
        told = message.content.config_records["fedhm"]
        for number, task in enumerate(json.loads(str(told["tasks"]))):
            try:
                phone = phone_of(context)
                phone.check_run(str(told["terms"]))
                arrays = message.content.array_records[f"tensors.{number}"]
                types = task["tensors"]
                given = {n: torch.tensor(arrays[n].numpy()).to(getattr(torch, types[n])) for n in types}
                inputs, targets = samples_of(context)
                loss, labels = 0.0, None
                if task["kind"] == STATISTICS:
                    if (tier := task["network"]["tier"]) != phone.manifest["tier"]:
                        raise PhoneError(f"this client has a graph of tier {phone.manifest['tier']}, not of {tier}")
                    answer = phone.gather(given, inputs, targets)
                elif task["kind"] == phone.manifest["work"]:
                    answer, loss, labels = phone.train(given, inputs, targets, task["round"], task["client"])
                else:
                    raise PhoneError(f"this client can do '{phone.manifest['work']}', not '{task['kind']}'")
            except PhoneError as error:
                replies.append({"failure": str(error)})
                continue
            values = {name: task[name] for name in ("kind", "round", "client", "tier", "network")}
            replies.append(values | {"samples": len(targets), "labels": labels, "loss": loss, "measured": None})
            records[f"tensors.{number}"] = ArrayRecord({n: Array(t.numpy()) for n, t in answer.items()})
        records["fedhm"] = ConfigRecord({"replies": json.dumps(replies)})
        return Message(RecordDict(records), reply_to=message)

    return app


# ---- files ----


def read(path: str) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise PhoneError(f"{path} cannot be read as safetensors: {error}") from None


def write(path: Path, trained: Tensors, facts: dict[str, Any]) -> None:
    try:
        path.write_bytes(save({name: tensor.contiguous() for name, tensor in trained.items()}))
        path.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    except OSError as error:
        raise PhoneError(f"{path} cannot be written: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tier for one round with ExecuTorch.")
    for name in ("manifest", "samples", "weights", "update"):
        parser.add_argument(name)
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    update = Path(options.update)
    try:
        if options.round < 1:
            raise PhoneError("rounds are counted from 1")
        if not update.parent.is_dir():
            raise PhoneError(f"there is no folder {update.parent} for the update")
        phone, samples = Phone(options.manifest), read(options.samples)
        if set(samples) != {"inputs", "targets"}:
            raise PhoneError(f"{options.samples} must hold 'inputs' and 'targets'")
        weights = read(options.weights)
        trained, loss, labels = phone.train(weights, samples["inputs"], samples["targets"], options.round, options.seed)
        facts = {"round": options.round, "samples": len(samples["targets"]), "loss": loss, "labels": labels}
        write(update, trained, facts)
    except PhoneError as error:
        sys.exit(f"phone_client: {error}")


if __name__ == "__main__":
    main()
