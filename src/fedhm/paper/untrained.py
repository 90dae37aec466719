"""The tables and figures that need no runs: formulas of layers, settings, sizes of networks by layer and by stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedhm.assembly import Design, named_design
from fedhm.compare.plots import network_plots
from fedhm.config.schema import Config
from fedhm.config.section import tier_name
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.lowrank.svd import Form
from fedhm.measure.cost import LayerCost, cost_by_layer, cost_of_modules, measure
from fedhm.networks.inputs import require_tensor
from fedhm.paper.artifacts import ALL_DATA, Artifact
from fedhm.paper.numbers import (
    DATA_TITLES,
    LATE_MACS_RESNET34,
    LATE_PARAMETERS,
    SIZES,
    TABLE_4,
    DataName,
    PaperSettings,
)
from fedhm.paper.report import PaperReport
from fedhm.paper.scale import ScaleName, paper_config
from fedhm.report.format import MISSING, format_macs, format_parameters
from fedhm.report.plot import Plot
from fedhm.report.sheets import Sheet


@dataclass(frozen=True)
class UntrainedReport:
    """What a report without runs is made of."""

    artifact: Artifact
    data: DataName | None
    scale: ScaleName
    changes: Sequence[str]
    stem: str
    command: str

    def report(self) -> PaperReport:
        """Return the report by the kind of table or figure."""
        kinds: dict[str, Callable[[], tuple[Sequence[Sheet], Sequence[Plot]]]] = {
            "layers": lambda: ([layer_sheet(ExampleLayer())], []),
            "settings": lambda: ([settings_sheet({data: self._config(data) for data in ALL_DATA})], []),
            "sizes": self._sizes,
            "stages": self._stages,
        }
        sheets, plots = kinds[self.artifact.kind]()
        small = " (small scale)" if self.scale == "small" and self.artifact.kind != "layers" else ""
        return PaperReport(self.stem, f"{self.artifact.title}{small}", self.command, sheets, plots)

    def _config(self, data: DataName) -> Config:
        return paper_config(data, "iid", "fixed", self.scale, self.changes)

    def _sizes(self) -> tuple[list[Sheet], list[Plot]]:
        data = self.data or self.artifact.data[0]
        published = [size.millions for size in SIZES[data]["fedhm-paper"]] if self.scale == "paper" else []
        return [network_sheet(self._config(data), published)], []

    def _stages(self) -> tuple[list[Sheet], list[Plot]]:
        networks = {
            f"{config.model.name if config.model else ''}, {DATA_TITLES[data]}": stages_of(named_design(config))
            for data, config in ((data, self._config(data)) for data in ALL_DATA)
        }
        return [stage_sheet(networks)], network_plots(networks, each="network and data set")


# Table 1: formulas


@dataclass(frozen=True)
class ExampleLayer:
    """Sizes for which the formulas of Table 1 are evaluated, and layers measured."""

    inputs: int = 128  # m
    outputs: int = 256  # n
    kernel: int = 3  # k
    side: int = 16  # H and W
    rank: int = 32  # r


@dataclass(frozen=True)
class Formula:
    """A row of Table 1: the paper's formulas with their values, and a layer to measure."""

    layer: str
    parameters: str
    macs: str
    expected: LayerCost
    network: nn.Module
    shape: tuple[int, ...]


def formulas(example: ExampleLayer) -> list[Formula]:
    """Return the rows of Table 1 for an example."""
    m, n, k, r = example.inputs, example.outputs, example.kernel, example.rank
    pixels = example.side**2
    linear, convolution = nn.Linear(m, n, bias=False), nn.Conv2d(m, n, k, padding=k // 2, bias=False)
    vector, image = (m,), (m, example.side, example.side)

    def factorized(layer: nn.Module, form: Form = "spatial") -> nn.Module:
        return to_hybrid(nn.Sequential(layer), RankPlan({"0": r}, form), spectral=False)

    def fully_connected(name: str, terms: str, parameters: int, network: nn.Module) -> Formula:
        return Formula(name, terms, terms, LayerCost(parameters, parameters), network, vector)

    def convolved(name: str, terms: str, parameters: int, network: nn.Module) -> Formula:
        return Formula(name, terms, f"{terms} · HW", LayerCost(parameters, parameters * pixels), network, image)

    return [
        fully_connected("FC", "mn", m * n, linear),
        fully_connected("factorized FC", "r(m + n)", r * (m + n), factorized(linear)),
        convolved("convolution", "mnk²", m * n * k * k, convolution),
        convolved("factorized convolution", "rk(m + n)", r * k * (m + n), factorized(convolution)),
        convolved(
            "factorized convolution of Pufferfish",
            "r(mk² + n)",
            r * (m * k * k + n),
            factorized(convolution, "pufferfish"),
        ),
    ]


def layer_sheet(example: ExampleLayer) -> Sheet:
    """Return Table 1 with the formulas' values for an example, and what our layers have."""
    rows: list[list[str]] = []
    for formula in formulas(example):
        measured = measure(formula.network, formula.shape, torch.float32)
        of_parameters = [formula.parameters, f"{formula.expected.parameters:,}", f"{measured.parameters:,}"]
        rows.append([formula.layer, *of_parameters, formula.macs, f"{formula.expected.macs:,}", f"{measured.macs:,}"])
    note = (
        f"For m = {example.inputs} inputs, n = {example.outputs} outputs, a kernel of k = {example.kernel}, "
        f"H = W = {example.side} and rank r = {example.rank}, without bias. by formula: the paper's; measured: our "
        "layer. MACs are those of one sample."
    )
    columns = ["layer", "parameters", "parameters by formula", "parameters measured"]
    columns += ["MACs", "MACs by formula", "MACs measured"]
    return Sheet(columns, [rows], left=1, note=note)


# Table 4: settings


def settings_sheet(configs: dict[DataName, Config]) -> Sheet:
    """Return Table 4: for each data set, the paper's setting and that of our runs."""
    columns = ["setting"]
    settings: dict[str, list[str]] = {}
    for data, config in configs.items():
        columns += [f"{DATA_TITLES[data]}, paper", "ours"]
        for name, paper, ours in _settings(TABLE_4[data], config):
            settings.setdefault(name, []).extend((paper, ours if ours == paper else f"**{ours}**"))
    rows = [[name, *values] for name, values in settings.items()]
    note = (
        "Bold: differs from the paper's. Samples per client are those of the whole data set, unless settings say less."
    )
    return Sheet(columns, [rows], left=1, note=note)


def _settings(paper: PaperSettings, config: Config) -> list[tuple[str, str, str]]:
    """Return name, the paper's value and ours of every setting."""
    train, federation = config.train, config.federation
    assert config.model is not None  # presets name both
    assert config.data is not None
    samples = config.data.train_samples // federation.clients or (
        paper.samples_per_client * paper.clients // federation.clients
    )
    model = config.model.name + (f", width {config.model.width:g}" if config.model.width != 1 else "")
    return [
        ("clients", str(paper.clients), str(federation.clients)),
        ("samples per client", f"{paper.samples_per_client:,}", f"{samples:,}"),
        ("client sampling rate", f"{paper.participation:g}", f"{federation.participation:g}"),
        ("local epochs", str(paper.epochs), str(train.epochs)),
        ("batch", str(paper.batch), str(train.batch)),
        ("optimizer", paper.optimizer, train.optimizer),
        ("momentum", f"{paper.momentum:g}", f"{train.momentum:g}"),
        ("weight decay", f"{paper.weight_decay:g}", f"{train.weight_decay:g}"),
        ("learning rate", f"{paper.lr:g}", f"{train.lr:g}"),
        ("decay at milestones", f"{paper.lr_decay:g}", f"{train.lr_decay:g}"),
        ("model", paper.model, model),
        ("downscaling of images", "1", str(config.data.downscale)),
        ("rounds", str(paper.rounds), str(train.rounds)),
        ("milestones", _numbers(paper.milestones), _numbers(train.milestones)),
        ("static BatchNorm after round", str(paper.milestones[0]), str(config.evaluation.static_from)),
    ]


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


# Tables 5 and 6: the hybrid networks


def network_sheet(config: Config, published: Sequence[float]) -> Sheet:
    """Return the layers of the hybrid networks: the rank at every ratio, and parameters and MACs of every tier.

    published  the paper's #Params of the tiers, in millions; empty: it has none for this network
    """
    design = named_design(config)
    shape = tuple(require_tensor(design.sample, "this table").shape[1:])
    ratios = sorted(set(config.method.rank_ratios), reverse=True)
    own = config.method.model_dump()
    plans = {
        ratio: plan_ranks(
            *(design.model, ratio, own["keep"]),
            classifier=design.classifiers or None,
            form=own["form"],
            dense=own["dense"],
            max_rank=own["max_rank"],
        )
        for ratio in ratios
    }
    networks = {ratio: to_hybrid(design.model, plan, spectral=False) for ratio, plan in plans.items()}
    layers = list(next(iter(plans.values())).decisions)
    costs = {ratio: cost_of_modules(network, shape, layers) for ratio, network in networks.items()}
    rows = [
        [
            *(layer, _layer_text(design.model.get_submodule(layer))),
            *(_rank(plans[ratio], layer) for ratio in ratios if ratio < 1),
            *(f"{costs[ratio][layer].parameters:,}" for ratio in ratios),
            *(format_macs(costs[ratio][layer].macs) for ratio in ratios),
        ]
        for layer in layers
    ]
    whole = {ratio: measure(network, shape) for ratio, network in networks.items()}
    blank = [""] * sum(ratio < 1 for ratio in ratios)
    sizes, macs = ([f"{whole[r].parameters:,}" for r in ratios], [format_macs(whole[r].macs) for r in ratios])
    totals = [["all, with BatchNorm", "", *blank, *sizes, *macs]]
    if len(published) == len(ratios):
        totals.append(
            [
                "the paper",
                "",
                *blank,
                *(format_parameters(1e6 * each) for each in published),
                *([MISSING] * len(ratios)),
            ]
        )
    named = [tier_name(ratio) for ratio in ratios]
    columns = ["layer", "shape", *(f"rank at {name}" for name in named if name != "full")]
    columns += [*(f"parameters, {name}" for name in named), *(f"MACs, {name}" for name in named)]
    note = "A dash in place of a rank: the layer stays dense in every tier. MACs are those of one sample."
    return Sheet(columns, [rows, totals], left=2, note=note)


def _rank(plan: RankPlan, layer: str) -> str:
    return str(plan[layer]) if layer in plan else MISSING


def _layer_text(layer: nn.Module) -> str:
    if isinstance(layer, nn.Conv2d):
        return f"{layer.kernel_size[0]}×{layer.kernel_size[1]}, {layer.in_channels} → {layer.out_channels}"
    return f"{layer.in_features} → {layer.out_features}" if isinstance(layer, nn.Linear) else type(layer).__name__


# Figure 7: stages


def stages_of(design: Design) -> dict[str, LayerCost]:
    """Return the costs of a ResNet by stage, as the paper groups them: its first BatchNorm belongs to conv1."""
    shape = tuple(require_tensor(design.sample, "this figure").shape[1:])
    parts = cost_by_layer(design.model, shape)
    stages: dict[str, LayerCost] = {}
    for name, cost in parts.items():
        stage = {"bn1": "conv1", "fc": "FC"}.get(name, name)
        before = stages.get(stage, LayerCost(0, 0))
        stages[stage] = LayerCost(before.parameters + cost.parameters, before.macs + cost.macs)
    return stages


def stage_sheet(networks: dict[str, dict[str, LayerCost]]) -> Sheet:
    """Return parameters and MACs of every stage, with their shares, for each network."""
    columns = ["stage"]
    for name in networks:
        columns += [f"parameters, {name}", f"MACs, {name}"]
    stages = list(next(iter(networks.values())))
    rows = [[stage] for stage in stages]
    late = ["layer3 and layer4"]
    for costs in networks.values():
        parameters, macs = (sum(part) for part in zip(*((c.parameters, c.macs) for c in costs.values()), strict=True))
        for row, stage in zip(rows, stages, strict=True):
            cost = costs[stage]
            row.append(f"{format_parameters(cost.parameters)} ({100 * cost.parameters / parameters:.1f} %)")
            row.append(f"{format_macs(cost.macs)} ({100 * cost.macs / macs:.1f} %)")
        last = [costs["layer3"], costs["layer4"]]
        late.append(f"{100 * sum(c.parameters for c in last) / parameters:.1f} %")
        late.append(f"{100 * sum(c.macs for c in last) / macs:.1f} %")
    note = (
        f"The paper says of layer3 and layer4: over {LATE_PARAMETERS:g} % of the parameters of both networks, and "
        f"{LATE_MACS_RESNET34:g} % of the MACs of ResNet-34."
    )
    return Sheet(columns, [rows, [late]], left=1, note=note)
