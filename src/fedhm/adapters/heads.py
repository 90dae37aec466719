"""Heads: the modules of an adapted model that are trained whole, of one layer or of several."""

from collections.abc import Sequence

from torch import nn

from fedhm.errors import FedhmError

HEADS = ("classifier", "score")  # how transformers call the layer that is made for the task


def find_head(
    model: nn.Module, given: tuple[str, ...] | str, classifier: str | None, per_token: bool
) -> tuple[str, ...]:
    """Return the modules that are trained whole: those given, or all that was made for the task."""
    if not isinstance(given, str):
        return given
    if per_token:  # what gives the scores of tokens is the base's own
        return ()
    made = _beside_the_base(model)
    if made and (classifier is None or _inside(classifier, made)):
        return made
    if classifier:
        return (classifier,)
    own = dict(model.named_modules())
    if found := [name for name in HEADS if name in own]:
        return (found[0],)
    raise FedhmError("the layer that gives the model's outputs cannot be told: name it with method.head = ['NAME']")


def _beside_the_base(model: nn.Module) -> tuple[str, ...]:
    """Return the modules with weights that a model of transformers has beside its base model; of others, nothing.

    A head may have several layers, as RoBERTa's and DistilBERT's: the first ones are as new as the last.
    """
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if isinstance(prefix, str) and prefix else None
    if not isinstance(base, nn.Module):
        return ()
    return tuple(
        name for name, module in model.named_children() if module is not base and any(True for _ in module.parameters())
    )


def head_modules(model: nn.Module, head: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that peft trains whole for these names: all whose own names end so."""
    modules = [name for name, _ in model.named_modules()]
    for name in head:
        if not any(f".{each}".endswith(f".{name}") for each in modules):
            raise FedhmError(f"method.head: the model has no module '{name}'")
    found = tuple(name for name in modules if name and name.endswith(tuple(head)))
    for name in found:
        if outer := [other for other in found if name.startswith(f"{other}.")]:
            raise FedhmError(f"method.head names '{name}', which is inside of '{outer[0]}': name one of both")
    _check_own_weights(model, found)
    return found


def _check_own_weights(model: nn.Module, heads: tuple[str, ...]) -> None:
    """Refuse a head that shares weights with the base: its own would part from those, which stay as they are."""
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
