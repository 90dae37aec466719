"""How to install optional packages. fedhm is in no package index, so its extras come with a checkout or a wheel."""


def how_to_install(extra: str) -> str:
    """Return the end of an error sentence: the commands that install an extra of `pyproject.toml`."""
    return f"pip install '.[{extra}]' in a checkout of fedhm, or pip install 'FILE.whl[{extra}]' with its wheel"
