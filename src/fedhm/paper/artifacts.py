"""What each table and figure of the paper is: what it shows, on which data, and the runs that it needs.

This file imports nothing heavy, so that `fedhm paper` lists them at once.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedhm.errors import FedhmError
from fedhm.paper.numbers import (
    DATA_TITLES,
    TABLE_2,
    TABLE_3,
    TABLE_7,
    TABLE_8,
    DataName,
    PaperTable,
)

# How clients differ. Homogeneous runs train one model everywhere, so they serve the tables of both other settings.
Setting = Literal["fixed", "dynamic", "homogeneous"]
UntrainedKind = Literal["layers", "settings", "sizes", "stages", "drawing"]  # nothing is run for them
RunsKind = Literal["accuracy", "convergence", "communication", "target", "size"]
Kind = UntrainedKind | RunsKind
ALL_DATA: tuple[DataName, ...] = get_args(DataName)
KERNEL = 3  # k of a ResNet's convolutions


@dataclass(frozen=True)
class Trained:
    """Runs of a name in `fedhm compare --methods`. A family is one run for each size below the full model."""

    name: str
    setting: Setting
    smallest: bool = False  # of a family: only its smallest member
    rank_is_kernel: bool = False  # of lowrank: every convolution has the rank k of its k × k kernel, none stays dense

    def __str__(self) -> str:
        if self.rank_is_kernel:
            return f"{self.name} at rank k"
        return f"{self.name}:SMALLEST" if self.smallest else self.name


@dataclass(frozen=True)
class Column:
    """A column of a table, or a line of a figure: models of one kind, the largest first."""

    key: str  # for --methods; the paper's numbers have the same keys
    title: str  # as in the paper
    runs: tuple[Trained, ...]


@dataclass(frozen=True)
class Artifact:
    """A table or figure of the paper."""

    name: str
    shows: str
    kind: Kind
    data: tuple[DataName, ...] = ()  # the data sets to choose from; empty: there is no choice
    columns: tuple[Column, ...] = ()
    paper: PaperTable | None = None  # the accuracies that it publishes
    with_table: str = ""  # a figure: the table with which it shares runs

    @property
    def title(self) -> str:
        return f"{self.name[:-1].capitalize()} {self.name[-1]}: {self.shows}"

    @property
    def needs_runs(self) -> bool:
        return self.kind in get_args(RunsKind)

    @property
    def runs(self) -> list[Trained]:
        """Return all runs, each once: the full model stands in both columns of Table 8."""
        return list(dict.fromkeys(trained for column in self.columns for trained in column.runs))

    def choose(self, wanted: Sequence[str]) -> tuple[Column, ...]:
        """Return the columns that --methods names; none named: all."""
        if not wanted:
            return self.columns
        known = {column.key: column for column in self.columns}
        for key in wanted:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                listed = ", ".join(known) or "none"
                raise FedhmError(f"--methods: {self.name} has no column '{key}', {hint}its columns are {listed}")
        return tuple(column for column in self.columns if column.key in wanted)


def _mixed(setting: Setting) -> tuple[Column, ...]:
    """Return the columns of Tables 2 and 3, and FedHM with the library's defaults as one more."""
    return (
        Column("splitmix", "Split-Mix", (Trained("splitmix", setting),)),
        Column("heterofl", "HeteroFL", (Trained("heterofl", setting),)),
        Column("heterofl-v2", "HeteroFL-V2", (Trained("heterofl-v2", setting),)),
        Column("heterofl-v3", "HeteroFL-V3", (Trained("heterofl-v3", setting),)),
        Column("fedavg", "FedAvg", (Trained("slimmed", "homogeneous", smallest=True),)),
        Column("fedhm-paper", "FedHM", (Trained("fedhm-paper", setting),)),
        Column("fedhm-default", "FedHM (our defaults)", (Trained("fedhm-default", setting),)),
    )


FULL = Trained("fedavg", "homogeneous")
LOW_RANK = Column("lowrank", "Low Rank Model", (FULL, Trained("lowrank", "homogeneous")))
SLIMMED = Column("slimmed", "Width Slimming Model", (FULL, Trained("slimmed", "homogeneous")))
RANK_IS_KERNEL = Column(
    "lowrank-rank-k", "Low Rank Model, rank k", (Trained("lowrank", "homogeneous", rank_is_kernel=True),)
)
COMBINATIONS = (
    Column("fedhm-paper", "FedHM", (Trained("fedhm-paper", "fixed"),)),
    Column("fedhm-v2", "FedHM-V2", (Trained("fedhm-v2", "fixed"),)),
    Column("fedhm-v3", "FedHM-V3", (Trained("fedhm-v3", "fixed"),)),
    Column("lowrank-smallest", "Low Rank Model", (Trained("lowrank", "homogeneous", smallest=True),)),
)
CIFAR: tuple[DataName, ...] = ("cifar10", "cifar100")

ARTIFACTS: Mapping[str, Artifact] = {
    artifact.name: artifact
    for artifact in (
        Artifact("table1", "parameters and MACs of factorized layers, by formula and measured", "layers"),
        Artifact("table2", "accuracy with dynamic tiers", "accuracy", ALL_DATA, _mixed("dynamic"), TABLE_2),
        Artifact("table3", "accuracy with fixed tiers", "accuracy", ALL_DATA, _mixed("fixed"), TABLE_3),
        Artifact("table4", "settings of the experiments", "settings"),
        Artifact("table5", "the hybrid ResNet-18, layer by layer", "sizes", ("cifar10",)),
        Artifact("table6", "the hybrid ResNet-34, layer by layer", "sizes", ("cifar100", "tinyimagenet")),
        Artifact(
            "table7",
            "accuracy of FedHM with other combinations of tiers",
            "accuracy",
            ("cifar10",),
            COMBINATIONS,
            TABLE_7,
        ),
        Artifact(
            "table8", "accuracy with one model for all clients", "accuracy", ALL_DATA, (LOW_RANK, SLIMMED), TABLE_8
        ),
        Artifact("figure1", "overview of FedHM", "drawing"),
        Artifact(
            *("figure2", "accuracy of the smallest model by round, fixed tiers", "convergence", ALL_DATA),
            columns=_mixed("fixed"),
            with_table="table3",
        ),
        Artifact(
            *("figure3", "accuracy by communication, one low-rank model for all clients", "communication", CIFAR),
            columns=(LOW_RANK,),
            with_table="table8",
        ),
        Artifact(
            *("figure4", "communication and computation until a target accuracy", "target", CIFAR),
            columns=(LOW_RANK,),
            with_table="table8",
        ),
        Artifact("figure5", "FedAvg on unlike devices", "drawing"),
        Artifact("figure6", "a factorized layer", "drawing"),
        Artifact("figure7", "parameters and MACs by stage of both ResNets", "stages"),
        Artifact(
            *("figure8", "accuracy by size, one model for all clients", "size", CIFAR),
            columns=(LOW_RANK, RANK_IS_KERNEL, SLIMMED),
            paper=TABLE_8,
            with_table="table8",
        ),
    )
}
# Names that people guess. Of several, the first that has the data set.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "complexity": ("table1",),
    "dynamic": ("table2",),
    "fixed": ("table3",),
    "settings": ("table4",),
    "sizes": ("table5", "table6"),
    "combinations": ("table7",),
    "homogeneous": ("table8",),
}


def find_artifact(name: str, data: str | None) -> Artifact:
    """Return the table or figure of this name, or refuse the name, or a data set that it does not have."""
    plain = name.lower()
    if plain not in ARTIFACTS and plain not in ALIASES:
        near = difflib.get_close_matches(plain, [*ARTIFACTS, *ALIASES], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "'fedhm paper' lists all of them"
        raise FedhmError(f"the paper has no '{name[:80]}': {hint}")
    named = [ARTIFACTS[each] for each in ALIASES.get(plain, (plain,))]
    found = next((artifact for artifact in named if data is None or data in artifact.data), named[0])
    if found.kind == "drawing":
        raise FedhmError(f"{found.name} is a drawing ({found.shows}): there is nothing to run")
    if data is not None and data not in found.data:
        only = " and ".join(DATA_TITLES[each] for each in found.data)
        raise FedhmError(f"{found.name} has no --data {data}: " + (f"it is about {only}" if only else "leave it out"))
    return found


def listing() -> str:
    """Return all tables and figures as text: what each shows, its data sets and the runs that it needs."""
    lines: list[str] = []
    for artifact in ARTIFACTS.values():
        also = ", ".join(alias for alias, names in ALIASES.items() if artifact.name in names)
        lines.append(f"{artifact.name:9}{artifact.shows}{f' (also: {also})' if also else ''}")
        if artifact.kind == "drawing":
            lines.append(f"{'':9}a drawing: nothing to run")
            continue
        data = f"data: {', '.join(artifact.data)}; " if artifact.data else ""
        runs = ", ".join(dict.fromkeys(map(str, artifact.runs)))
        shared = f" (shared with {artifact.with_table})" if artifact.with_table else ""
        lines.append(f"{'':9}{data}{f'runs: {runs}{shared}' if runs else 'no runs'}")
    return "\n".join(lines)
