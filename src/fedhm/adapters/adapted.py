"""Adapted networks: a frozen base that all networks of a process share, with adapters injected by peft.

Beside the adapters a head is trained whole: the modules, of one layer or of several, that were made for the task.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhm.adapters.packing import AdapterPacking
from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install
from fedhm.machine.tensors import update_digest
from fedhm.networks.batchnorm import freeze_statistics
from fedhm.networks.exchange import Tensors, set_packing, shared_parameters
from fedhm.networks.info import declare, info_of
from fedhm.networks.structure import copy_sharing_parameters, unshare_base

HEADS = ("classifier", "score")  # names that transformers give the layer for the task


def find_head(
    model: nn.Module, given: tuple[str, ...] | str, classifier: str | None, per_token: bool
) -> tuple[str, ...]:
    """Return the modules that are trained whole: the given ones, or all that were made for the task."""
    if not isinstance(given, str):
        return given
    if per_token:  # the layer that scores tokens is part of the base
        return ()
    made = _beside_the_base(model)
    if made and (classifier is None or _inside(classifier, made)):
        return made
    if classifier:
        return (classifier,)
    own = dict(model.named_modules())
    if found := [name for name in HEADS if name in own]:
        return (found[0],)
    raise FedhmError("the layer that gives the model's outputs is unknown: name it with method.head = ['NAME']")


def _beside_the_base(model: nn.Module) -> tuple[str, ...]:
    """Return the modules with weights that a model of transformers has beside its base model; none for other models.

    A head may have several layers, as those of RoBERTa and DistilBERT. All of them are new.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if isinstance(prefix, str) and prefix else None
    if not isinstance(base, nn.Module):
        return ()
    return tuple(
        name for name, module in model.named_children() if module is not base and any(True for _ in module.parameters())
    )


def head_modules(model: nn.Module, head: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that peft trains whole for these names: all modules whose names end with one of them."""
    modules = [name for name, _ in model.named_modules()]
    for name in head:
        if not any(f".{each}".endswith(f".{name}") for each in modules):
            raise FedhmError(f"method.head: the model has no module '{name}'")
    found = tuple(name for name in modules if name and name.endswith(tuple(head)))
    for name in found:
        if outer := [other for other in found if name.startswith(f"{other}.")]:
            raise FedhmError(f"method.head names '{name}', which is inside '{outer[0]}': name one of the two")
    _check_own_weights(model, found)
    return found


def _check_own_weights(model: nn.Module, heads: tuple[str, ...]) -> None:
    """Raise if a head shares weights with the base, which stay frozen while the head's weights change."""
    holders: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not _inside(name, heads):
            holders.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if _inside(name, heads) and id(parameter) in holders:
            raise FedhmError(
                f"method.head: '{name}' is tied to '{holders[id(parameter)]}', which stays frozen, and cannot be "
                "trained whole: leave it out of method.head, or untie it (tie_word_embeddings = false)"
            )


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


ALL_LINEAR = "all-linear"  # peft's name for all linear layers except heads
DIGESTED = 64  # numbers of each tensor of a base, or a few more: all of them would take seconds


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters of a model, and the modules that are trained beside them."""

    target: tuple[str, ...]  # layers, by the ends of their names, or ALL_LINEAR alone
    scale: float  # α/r, the same for every rank
    head: tuple[str, ...] = ()  # modules that are trained whole


class FrozenBase:
    """A frozen model, which shares the memory of the user's, and its layers that get adapters."""

    def __init__(self, model: nn.Module, adapting: AdapterSettings) -> None:
        self.adapting = adapting
        self._model = copy_sharing_parameters(model)
        freeze_statistics(self._model)
        self._heads = head_modules(self._model, adapting.head)
        self._check_target()
        self._target: str | list[str] = ALL_LINEAR if adapting.target == (ALL_LINEAR,) else list(adapting.target)
        self.shapes = self._find()
        if self._target == ALL_LINEAR:  # from here on by their names, which a tier's file has
            self._target = list(self.shapes)

    def _check_target(self) -> None:
        """Raise if no layer has a given name: peft ignores such a name if there are others."""
        if self.adapting.target == (ALL_LINEAR,):
            return
        names = [
            n for n, _ in self._model.named_modules() if not f"{n}.".startswith(tuple(f"{h}." for h in self._heads))
        ]
        for target in self.adapting.target:
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise self._not_adapted(f"there is no layer '{target}'")

    def _not_adapted(self, reason: str) -> FedhmError:
        layers = sorted({n.rpartition(".")[2] for n, m in self._model.named_modules() if isinstance(m, nn.Linear)})
        return FedhmError(
            f"method.target = {list(self.adapting.target)} cannot be adapted ({reason}); the model's linear layers are "
            f"called {', '.join(layers)}"
        )

    def _find(self) -> dict[str, torch.Size]:
        """Return the weight shapes (n, m) of the layers that peft chooses."""
        lora = _peft().tuners.lora
        found: dict[str, torch.Size] = {}
        for name, module in self._injected(1).named_modules():
            if isinstance(module, lora.LoraLayer):
                if not isinstance(module, lora.Linear):
                    kind = type(module.base_layer).__name__
                    raise FedhmError(f"method.target names '{_own(name)}', a {kind}: adapters are for linear layers")
                if module.get_base_layer().weight.dtype == torch.float64:
                    raise FedhmError(
                        "adapters are trained and averaged in float32, the base is float64: use model.float()"
                    )
                found[_own(name)] = torch.Size((module.out_features, module.in_features))
        return found

    def _injected(self, rank: int) -> nn.Module:
        peft, adapting = _peft(), self.adapting
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=adapting.scale * rank,
            target_modules=self._target,
            modules_to_save=list(adapting.head) or None,
            fan_in_fan_out=self._transposed(),
        )
        shared: dict[int, Any] = {id(p): p for p in self._model.parameters()}
        try:
            with torch.random.fork_rng(devices=[]):  # the factors that peft draws are replaced later
                network: nn.Module = peft.get_peft_model(copy.deepcopy(self._model, shared), settings)
        except ValueError as error:
            raise self._not_adapted(str(error).partition(". ")[0]) from None
        return network

    def _transposed(self) -> bool:
        """Tell whether the layers to adapt hold their weights transposed, as those of GPT-2 do."""
        ends = ("",) if self.adapting.target == (ALL_LINEAR,) else self.adapting.target
        chosen = [m for n, m in self._model.named_modules() if n.endswith(ends)]
        return any(type(module).__name__ == "Conv1D" for module in chosen)

    def network(
        self, rank: int, *, fixed: Sequence[str] = (), folded: bool = False, parts: tuple[str, str] = ("u", "v")
    ) -> nn.Module:
        """Return the base with adapters of a rank. Their values are loaded later.

        fixed   factors that are not trained and do not travel: "u", "v" or none
        folded  the adapted layers have weights of their own, to which the server may add
        parts   the names of A and B when they travel
        """
        self.check_rank(rank)
        network = self._injected(rank)
        for name, parameter in network.named_parameters():
            part = "u" if ".lora_A." in name else "v" if ".lora_B." in name else ""
            if part in fixed and part:
                parameter.requires_grad = False
        own = {f"base_model.model.{layer}.base_layer.weight" for layer in self.shapes} if folded else set()
        if folded:
            self._part(network, own)
        frozen = {n for n, p in network.named_parameters() if not p.requires_grad and ".lora_" not in n}
        declare(network, shared=frozenset(frozen - own), frozen_base=True)
        held = frozenset(f"{layer}.{part}" for layer in self.shapes for part in fixed)
        weights = {layer: self._model.get_submodule(layer).weight for layer in self.shapes} if folded else {}
        form = AdapterPacking(tuple(self.shapes), self.adapting.scale, held, weights, parts, self._heads)  # type: ignore[arg-type]
        return set_packing(network, form)

    def check_rank(self, rank: int) -> None:
        """Raise if a layer cannot have this rank."""
        for layer, (outputs, inputs) in self.shapes.items():
            if rank > min(outputs, inputs):
                raise FedhmError(
                    f"rank {rank} is above what '{layer}', {inputs} → {outputs}, can have: choose at most "
                    f"{min(outputs, inputs)}"
                )

    def _part(self, network: nn.Module, names: set[str]) -> None:
        """Give a network its own copies of shared weights."""
        if self._transposed():
            raise FedhmError("nothing can be folded into layers that hold their weights transposed, as GPT-2's do")
        for name in names:
            layer, _, part = name.rpartition(".")
            module = network.get_submodule(layer)
            setattr(module, part, nn.Parameter(getattr(module, part).detach().clone(), requires_grad=False))

    def head_of(self, weights: Tensors) -> Tensors:
        """Return the tensors of the full model that are trained whole."""
        return {n: t.clone() for n, t in weights.items() if any(n.startswith(f"{head}.") for head in self._heads)}


def base_digest(network: nn.Module) -> str:
    """Return a digest of an adapted network's base, from some numbers of each tensor; "" without a base."""
    base = {name: t for name, t in shared_parameters(network).items() if ".original_module." not in name}  # of the head
    digest = hashlib.sha256()
    for name in sorted(base):
        flat = base[name].detach().flatten()
        some = flat[:: max(1, len(flat) // DIGESTED)]
        update_digest(digest, some, f"{name}{tuple(base[name].shape)}{flat.dtype}")
    return digest.hexdigest()[:16] if base else ""


def describe_adapter(network: nn.Module) -> dict[str, Any] | None:
    """Return a description of an adapted network as JSON, from which `rebuild_adapted` makes it; else None."""
    config = getattr(network, "peft_config", {}).get("default")
    if config is None:
        return None
    folded = _is_folded(network)
    target, head = sorted(config.target_modules), list(config.modules_to_save or ())
    scale, base = config.lora_alpha / config.r, base_digest(network)
    return {"rank": config.r, "scale": scale, "target": target, "head": head, "folded": folded, "base": base}


def rebuild_adapted(model: nn.Module, description: dict[str, Any]) -> nn.Module:
    """Return the described network around a model, without a packing: its tensors have their own names."""
    adapting = AdapterSettings(tuple(description["target"]), float(description["scale"]), tuple(description["head"]))
    network = FrozenBase(model, adapting).network(int(description["rank"]), folded=bool(description["folded"]))
    if description.get("base", base_digest(network)) != base_digest(network):
        raise FedhmError("the adapter was trained on another base: give the model with which the run began")
    unshare_base([network])
    return set_packing(network, None)


def save_adapter(network: nn.Module, folder: Path) -> None:
    """Save a network's adapter and head as peft does. `PeftModel.from_pretrained(base, folder)` loads them."""
    adapted = getattr(network, "save_pretrained", None)
    if adapted is None or not hasattr(network, "peft_config"):
        raise FedhmError("the tier's model has no adapter: save_adapter is for methods that train one, such as lora")
    if _is_folded(network):
        raise FedhmError("the method learns in the base itself, not in an adapter: save the whole network of the tier")
    if folder.is_file():
        raise FedhmError(f"cannot write the adapter to {folder}: it is a file, where a folder is needed")
    try:
        adapted(str(folder))
    except OSError as error:
        raise FedhmError(f"cannot write the adapter to {folder}: {error.strerror}") from None


def _is_folded(network: nn.Module) -> bool:
    """Tell whether the adapted layers have weights of their own, to which the server adds."""
    info = info_of(network)
    weights = (name for name, _ in network.named_parameters() if name.endswith(".base_layer.weight"))
    return info.frozen_base and any(name not in info.shared for name in weights)


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise FedhmError(f"adapters need the package peft ({error}): {how_to_install('lora')}") from None


def _own(name: str) -> str:
    return name.removeprefix("base_model.model.")
