"""Everything that a comparison leaves on disk."""

from collections.abc import Sequence
from pathlib import Path

from fedhm.files import write_atomically
from fedhm.report.compared import Compared
from fedhm.report.comparison_tables import as_csv, markdown


def save_comparison(entries: Sequence[Compared], folder: Path, command: str) -> list[Path]:
    """Writes the tables; gives their paths."""
    write_atomically(folder / "comparison.md", f"{_settings(entries, command)}\n{markdown(entries)}")
    write_atomically(folder / "comparison.csv", as_csv(entries))
    return [folder / "comparison.md", folder / "comparison.csv"]


def _settings(entries: Sequence[Compared], command: str) -> str:
    """What was done, on top of what came of it."""
    config = entries[0].first.config
    train, federation = config.train, config.federation
    lines = ["# Comparison", "", f"`{command}`", ""]
    if config.data is not None and config.model is not None:
        lines.append(f"{config.model.name} on {config.data.source} ({config.data.partition}), ")
    lines.append(
        f"{federation.clients} clients of which {federation.participation:.0%} take part in a round, "
        f"{federation.heterogeneity} tiers; {train.rounds} rounds of {train.epochs} local epochs, batch {train.batch}, "
        f"learning rate {train.lr:g}; seeds {', '.join(map(str, entries[0].seeds))}."
    )
    lines += ["", "| entry | settings |", "|---|---|"]
    for entry in entries:
        method = entry.first.config.method.model_dump(mode="json")
        lines.append(f"| {entry.label} | {', '.join(f'{key} = {value}' for key, value in method.items())} |")
    return "\n".join([*lines, ""])
