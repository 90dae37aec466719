"""The server side of an app: finds out which clients there are, and runs the loop on them."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from torch import nn

from fedhm.adapters.adapted import base_digest
from fedhm.assembly import assemble, design, read_federation
from fedhm.config.reading import parse_flat, parse_resolved
from fedhm.config.sections.federation import NO_TIER
from fedhm.config.settings import Config, ResolvedConfig
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.federation import Federation, remote_federation
from fedhm.data.form import InputForm, made_up
from fedhm.data.held_out.client_tests import ClientTests, check_share, default_share
from fedhm.data.own import DataLike, PublicLike, own_samples
from fedhm.errors import FedhmError, show_warnings
from fedhm.flower.apps import Context, Grid, ServerApp, make_server_app
from fedhm.flower.asking import inputs_of_most, unknown_inputs
from fedhm.flower.commands.status import StatusFile
from fedhm.flower.grid_engine import FlowerEngine
from fedhm.flower.models import Model, NamedModel, OwnModel, demands
from fedhm.flower.nodes import Node, Roster
from fedhm.flower.tiers import chosen_tiers, too_much, with_devices
from fedhm.flower.wire import Terms, greeting
from fedhm.machine.printable import printable
from fedhm.measure.cost import form_of
from fedhm.methods.method import AnyMethod
from fedhm.methods.tier_work import TierWork, plan_fleet
from fedhm.networks.exchange import digest_of
from fedhm.networks.inputs import Inputs, shape_of
from fedhm.report.progress import progress
from fedhm.run import as_begun, report_on
from fedhm.runs.folder import RunFolder
from fedhm.runs.identities import Identities
from fedhm.server.intake import Intake
from fedhm.server.participants.fleet import Planned, with_plan
from fedhm.server.participants.sampling import check_assignment
from fedhm.server.watcher import Watcher

# Makes the federation from the number of samples at each client, and what most of them say of their inputs
MakeFederation = Callable[[tuple[int, ...], str], Federation]


def server_app(
    model: Callable[[], nn.Module],
    test: Callable[[], DataLike] | None = None,
    classes: int = 0,
    *,
    inputs: Any = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    crop: int = 0,
    flip: bool = False,
    public: Callable[[], PublicLike] | None = None,
    client_test: float | None = None,
) -> ServerApp:
    """Return a Flower ServerApp that trains `model` on the nodes that are connected.

    test        samples to evaluate every tier's model on, as `fedhm.run` takes them; without, models are evaluated at
                the clients
    classes     how many there are, or numbers to predict, which the server does not see; 0: as many as the model has
                outputs
    inputs      without `test`, what goes into the model: the shape of one input, (3, 32, 32); an array like one where
                that is neither of floats nor an image. If that is not said either, it is what most clients say
    mean, std   of each channel, where inputs are uint8 images: these are divided by 255 and normalised
    crop, flip  clients augment images: random window after padding by `crop` pixels, random mirror image
    public      inputs that everybody has, for methods that distil
    client_test the share of its samples that each client holds out of its training, to evaluate every tier's model
                there, too, 0.2 where there is no `test`; clients that bring test samples of their own evaluate on
                these

    Settings are the app's run config, by dotted keys: `train.rounds = 20`. With `out`, the path of a folder, the run
    leaves there what `fedhm run` leaves, and resumes an unfinished run that it finds there. A client's number belongs
    to its SuperNode's key; `node-keys = false` is for SuperNodes that are started without one.
    """

    def serve(grid: Grid, context: Context) -> None:
        config = parse_flat(context.run_config, "the run config")
        own = OwnModel(model, config.seed)
        preprocessing, learned = Preprocessing(tuple(mean), tuple(std), crop, flip), config.objective

        def federation(sizes: tuple[int, ...], said_inputs: str) -> Federation:
            everybodys = public() if public else None
            dtype, _ = demands(own)
            samples, outputs, form = (test() if test else None), classes, None
            if samples is None or not outputs:
                like = InputForm.read(said_inputs).zeros() if samples is None and inputs is None else inputs
                like = like if samples is None else own_samples(samples, "the test set", dtype, learned).example
                form, outputs = made_up(like, classes, own.build(), preprocessing, learned, dtype)
            there = remote_federation(samples, outputs, sizes, preprocessing, everybodys, dtype, learned, form)
            share = default_share(test is not None) if client_test is None else check_share(client_test)
            return replace(there, tests=ClientTests(share=share))

        said = context.run_config
        out, keys = str(said.get("out", "")), said.get("node-keys", True) is not False
        with progress(Console(), config.objective.headline) as bar:
            folder, ask = Path(out) if out else None, test is None and inputs is None
            run_on(grid, config, own, federation, folder, [bar], node_keys=keys, ask_inputs=ask)

    return make_server_app(serve)


def named_server_app() -> ServerApp:
    """Return the app of runs from a config, which names model and data."""

    def serve(grid: Grid, context: Context) -> None:
        said = context.run_config
        status = StatusFile(Path(str(said["status"])))
        # Flower's files are their owner's only, but the run's are as a user wishes
        os.umask(int(str(said["umask"]), 8))
        try:
            config = parse_resolved(str(said["config"]), "the run's config")
            out, keys = Path(str(said["out"])), said.get("node-keys", True) is not False
            with warnings.catch_warnings():
                show_warnings(status.said)
                run_named(grid, config, out, [status], status.said, keys)
        except FedhmError as error:
            status.ended(str(error))
            raise
        except httpx.HTTPError as error:
            status.ended(f"the SuperLink does not answer any more ({type(error).__name__})", unforeseen=True)
            raise
        except BaseException as error:
            status.ended(f"the server raised {printable(repr(error))}; its log has more", unforeseen=True)
            raise
        status.ended()

    return make_server_app(serve)


def run_named(
    grid: Grid,
    config: ResolvedConfig,
    out: Path,
    watchers: Sequence[Watcher],
    say: Callable[[str], None] = print,
    node_keys: bool = True,
) -> None:
    federation = read_federation(config)
    named = NamedModel(config, federation.input_shape, federation.classes)
    run_on(grid, config, named, lambda *_: federation, out, watchers, say, node_keys)


def run_on(
    grid: Grid,
    config: Config,
    model: Model,
    make_federation: MakeFederation,
    out: Path | None,
    watchers: Sequence[Watcher],
    say: Callable[[str], None] = print,
    node_keys: bool = True,
    ask_inputs: bool = False,
) -> None:
    """Wait for the clients, ask what their inputs are like if nobody else knows, then run the rounds that are left."""
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": "flower"})})
    settings = as_begun(config, out).resolved()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open(out)) if out and (out / "config.toml").exists() else None
        clients = settings.federation.clients
        identities = Identities.read(folder.path) if folder else Identities()

        def roster_of(terms: Terms) -> Roster:
            return Roster(grid, clients, greeting(terms), say, identities if node_keys else None)

        inputs = settings.federation.inputs
        if ask_inputs and not inputs:
            inputs = inputs_of_most(roster_of(unknown_inputs(settings)), settings, folder is None, say)
            if not folder:
                found = settings.federation.model_copy(update={"inputs": inputs})
                settings = settings.model_copy(update={"federation": found})
        bare = make_federation((0,) * clients, inputs)
        batch, _ = Feed(bare.example, bare.preprocessing).one()
        # what is wrong with the method or model is said before anyone waits, if nobody has to be asked
        method = design(settings, model.build(), batch, bare.classes, bare.public_feed()).method
        check_assignment(settings.federation, clients, method.tiers, method.levels)
        roster = roster_of(_terms(settings, bare, method))
        if folder or settings.federation.given_tiers:
            roster.hold_to(partial(too_much, settings, method))
        roster.gather(settings.engine.patience, all_of_them=folder is None)
        if not folder:
            settings, refused = _with_tiers(
                settings, model.build(), method, batch, make_federation, roster.introduced()
            )
            roster.leave_out(refused)
            roster.hold_to(partial(too_much, settings, method))
            if out:
                folder = stack.enter_context(RunFolder.create(out, settings))
                identities.keep_in(out)
        known = roster.introduced()
        federation = make_federation(_sizes(known, clients), inputs)
        if federation.remote:
            tests = tuple(known[c].tests if c in known else 0 for c in range(clients))
            federation = replace(federation, tests=replace(federation.tests, remote=tests))
        place = settings.engine
        engine = FlowerEngine(grid, roster, _terms(settings, federation, method), place.deadline, place.fp16)
        try:
            assemble(model.build(), federation, settings, engine, watchers).run(folder)
        except FedhmError:
            if folder:
                folder.remove_if_nothing_was_done()
            raise
    if out:
        report_on(out)


def _with_tiers(
    config: ResolvedConfig,
    model: nn.Module,
    method: AnyMethod,
    batch: Inputs,
    make_federation: MakeFederation,
    nodes: Mapping[int, Node],
) -> tuple[ResolvedConfig, dict[int, str]]:
    """Return the settings with the tiers that clients get by what their nodes say or by their devices, and who none."""
    by_file = with_devices(config, nodes, digest_of(model, shape_of(batch)))
    config = config.model_copy(update={"federation": by_file.federation})
    work = TierWork(method, model, config, *form_of(batch))
    tiers = chosen_tiers(config, work, nodes)
    config = config.model_copy(update={"federation": tiers.federation})
    planned: list[Planned] = []

    def plan() -> list[Planned]:
        federation = make_federation(_sizes(nodes, config.federation.clients), config.federation.inputs)
        sample = next(Feed(federation.example, federation.preprocessing).ordered(1))
        planned.extend(plan_fleet(config, model, method, batch, Intake(method.network, federation, config, sample, ())))
        return planned

    config = with_plan(config, plan)
    left_out = {each.client: each.problem for each in planned if each.tier == NO_TIER}
    return config, {**tiers.refused, **left_out, **by_file.refused}


def _sizes(nodes: Mapping[int, Node], clients: int) -> tuple[int, ...]:
    return tuple(nodes[client].samples if client in nodes else 0 for client in range(clients))


def _terms(config: ResolvedConfig, federation: Federation, method: AnyMethod) -> Terms:
    base = base_digest(method.network(method.tiers[0])) if config.method.adapters else ""
    return Terms(config, federation.classes, federation.preprocessing, federation.tests.share, base)
