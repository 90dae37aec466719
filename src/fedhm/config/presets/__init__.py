"""Settings that come with the library, a TOML file for each preset."""

from importlib import resources


def presets() -> dict[str, str]:
    """Return the TOML text of every preset by its name."""
    folder = resources.files("fedhm.config.presets")
    texts = {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return dict(sorted(texts.items()))
