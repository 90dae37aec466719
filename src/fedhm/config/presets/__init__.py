"""Presets: the TOML files in this folder."""

import difflib
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


def unknown_preset(name: str) -> str:
    """Return the error sentence for a name that no preset has."""
    known = presets()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "known are " + ", ".join(known)
    return f"there is no preset '{name}': {hint}"
