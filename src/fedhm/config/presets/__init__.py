"""Presets: the TOML files in this folder."""

from importlib import resources


def presets() -> dict[str, str]:
    """Return the TOML text of every preset by name."""
    folder = resources.files("fedhm.config.presets")
    texts = {
        f.name.removesuffix(".toml"): f.read_text(encoding="utf-8")
        for f in folder.iterdir()
        if f.name.endswith(".toml")
    }
    return dict(sorted(texts.items()))
