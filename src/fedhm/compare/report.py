"""The report of a comparison: the tables that are printed, and all files that it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedhm.compare.plots import convergence_plot, cost_plots, layer_plots, target_plot
from fedhm.compare.results import (
    EntryRuns,
    TargetCost,
    common_target,
    costs_to_reach,
    full_model,
    incomparable_entries,
    times_to_reach,
)
from fedhm.compare.tables import (
    Comparison,
    arrange_table,
    comparison_csv,
    cost_sheet,
    difference_sheet,
    metric_sheet,
    target_cost_sheet,
    target_time_sheet,
)
from fedhm.compare.tuning import TUNE_FILE, TuningResult
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.measure.cost import LayerCost
from fedhm.report.page import save_sections
from fedhm.report.plot import Plot, save_png
from fedhm.report.plots import energy_plot, tier_colours
from fedhm.report.sections import Section, Switch
from fedhm.report.sheets import Sheet, markdown_code, markdown_paragraph, markdown_picture, markdown_table

TARGET_PNG, LAYERS_PNG, ENERGY_PNG = "cost-to-target.png", "parameters-and-macs-by-layer.png", "energy-beyond-rank.png"
NOT_SHOWN = ("engine.", "data.folder", "seed", "tracking.", "federation.plan", "federation.checkpointed")


@dataclass(frozen=True)
class ComparisonReport:
    """The report on entries. Entries that are not comparable are refused."""

    entries: Sequence[EntryRuns]
    command: str
    layers: Mapping[str, Mapping[str, LayerCost]]  # tier → layer → cost; may be empty
    given_target: float | None = None
    tuned: TuningResult | None = None

    def __post_init__(self) -> None:
        if found := incomparable_entries(self.entries, self._tuned_keys):
            raise FedhmError(f"these runs cannot be compared: {found}")

    @property
    def _tuned_keys(self) -> list[str]:
        return self.tuned.keys if self.tuned else []

    @cached_property
    def comparison(self) -> Comparison:
        return arrange_table(self.entries)

    @cached_property
    def target(self) -> float:
        return common_target(self.entries) if self.given_target is None else self.given_target

    @cached_property
    def reached(self) -> list[TargetCost]:
        """Return the cost of the target for each entry; none if the full model is not among the entries."""
        full = full_model(self.entries)
        return costs_to_reach(self.target, self.entries, full) if full else []

    @property
    def sheets(self) -> list[Sheet]:
        return [*self._metric_sheets, *([self._tuning] if self._tuning else []), *self._cost_sheets]

    @property
    def _metric_sheets(self) -> list[Sheet]:
        seeds = len(self.entries[0].runs)
        tables = [metric_sheet(self.comparison, seeds)]
        if seeds > 1 and len(self.comparison.columns) > 1:
            tables.append(difference_sheet(self.comparison))
        return tables

    @property
    def _tuning(self) -> Sheet | None:
        return self.tuned.sheet if self.tuned and self.tuned.tried else None

    @property
    def _cost_sheets(self) -> list[Sheet]:
        tables = [cost_sheet(self.entries)]
        if self.reached:
            tables.append(target_cost_sheet(self.comparison.metric, self.target, self.reached))
        if timed := times_to_reach(self.target, self.entries):
            tables.append(target_time_sheet(self.comparison.metric, self.target, timed))
        return tables

    @cached_property
    def plots(self) -> dict[str, list[Plot]]:
        """Return the plots by the PNG file that shows them."""
        stem = self.comparison.metric.stem
        plots = {"convergence-smallest.png": [convergence_plot(self.comparison)]}
        plots |= {f"{stem}-by-{cost}.png": pair for cost, pair in cost_plots(self.comparison).items()}
        if self.reached:
            plots[TARGET_PNG] = [target_plot(self.comparison, self.target, self.reached)]
        several_tiers = [entry.first for entry in self.entries if len(entry.tiers) > 1]
        factorized = [run for run in several_tiers if run.config.method.rank_ratios]
        if self.layers:
            plots[LAYERS_PNG] = layer_plots(self.layers, tier_colours(factorized))
        if energy := energy_plot(factorized):
            plots[ENERGY_PNG] = [energy]
        return plots

    def save(self, folder: Path) -> list[Path]:
        """Write tables, plots and the page, and return their paths."""
        stale = (f"{self.comparison.metric.stem}-by-time.png", TARGET_PNG, LAYERS_PNG, ENERGY_PNG, TUNE_FILE)
        for name in stale:  # an earlier comparison may have left them
            (folder / name).unlink(missing_ok=True)
        write_atomically(folder / "comparison.csv", comparison_csv(self.entries))
        written = [save_png(plots, folder / name, side_by_side=len(plots) > 1) for name, plots in self.plots.items()]
        pictures = "\n".join(markdown_picture(path.stem, path.name) for path in written)
        tables = "\n".join(markdown_table(sheet) for sheet in self.sheets)
        write_atomically(folder / "comparison.md", f"{self._settings()}\n{tables}\n{pictures}\n")
        switches = [Switch("run", "Methods", list(self.comparison.columns))]
        page = save_sections("Comparison", self._sections(), switches, folder)
        plain = [page, folder / "comparison.csv", *([self.tuned.save(folder)] if self.tuned else [])]
        return [folder / "comparison.md", *plain, *written]

    def _sections(self) -> list[Section]:
        """Return the content of the comparison's page."""
        metric = self.comparison.metric.name
        heading = f"{metric[0].upper()}{metric[1:]} by tier and method"
        apart = (LAYERS_PNG, ENERGY_PNG)
        figures = [plot for name, plots in self.plots.items() if name not in apart for plot in plots]
        sections = [
            Section(heading, [self._summary, *self._metric_sheets]),
            Section("Curves and costs", figures),
            Section("Costs in numbers", self._cost_sheets),
            Section("Tuning", [self._tuning] if self._tuning else []),
            Section("Spectrum", self.plots.get(ENERGY_PNG, [])),
            Section("Layers", self.plots.get(LAYERS_PNG, [])),
            Section("Settings", [f"Made by: {self.command}", self._entry_sheet]),
        ]
        return [section for section in sections if section.parts]

    def _settings(self) -> str:
        """Return the head of `comparison.md`: the command and the settings."""
        summary = markdown_paragraph(self._summary)
        return "\n\n".join(["# Comparison", markdown_code(self.command), summary, markdown_table(self._entry_sheet)])

    @property
    def _summary(self) -> str:
        config = next((e for e in self.entries if not e.declared), self.entries[0]).first.config
        federation, seeds = config.federation, ", ".join(map(str, self.entries[0].seeds))
        tiers = next((e.first.config.federation.heterogeneity for e in self.entries if len(e.tiers) > 1), None)
        data = f"{config.data.source}, {config.data.partition}; " if config.data else ""
        model = f"{config.model.name} on " if config.model and data else ""
        share = f"{100 * federation.participation:g} %"

        def setting(key: str) -> str:
            return "tuned" if f"train.{key}" in self._tuned_keys else f"{getattr(config.train, key):g}"

        local = "iterations" if config.train.iterations else "epochs"
        return (
            f"{model}{data}{federation.clients} clients, of which {share} take part in a round"
            f"{f', with {tiers} tiers' if tiers else ''}; {config.train.rounds} rounds; "
            f"local {local} {setting(local)}, batch {setting('batch')}, learning rate {setting('lr')}; seeds {seeds}."
        )

    @property
    def _entry_sheet(self) -> Sheet:
        labels = [entry.label for entry in self.entries]
        rows = [list(row) for row in zip(labels, _own_settings(self.entries, self._tuned_keys), strict=True)]
        return Sheet(["entry", "settings"], [rows], left=2)


def _own_settings(entries: Sequence[EntryRuns], tuned: Sequence[str]) -> list[str]:
    """Return each entry's method, its tuned and declared settings, and all others in which entries differ."""
    all_settings = [{"method.name": "", **entry.first.config.dotted()} for entry in entries]  # the name comes first
    shared = set.intersection(*({(key, str(value)) for key, value in own.items()} for own in all_settings))
    declared = {change.name for entry in entries for change in entry.declared}
    return [
        ", ".join(
            f"{key.removeprefix('method.')} = {value}"
            for key, value in own.items()
            if key.startswith("method.")
            or key in tuned
            or key in declared
            or ((key, str(value)) not in shared and not key.startswith(NOT_SHOWN))
        )
        for own in all_settings
    ]
