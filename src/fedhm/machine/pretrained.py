"""Find a pretrained model: in a folder, or in an installed package."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from fedhm.errors import FedhmError


def find_pretrained(name: str) -> Path:
    """Return the folder with the `config.json` of the pretrained model that a setting names."""
    folder = Path(name)
    if (folder / "config.json").is_file():
        return folder
    try:
        configs = [Path(str(file.locate())) for file in files(name) or () if file.name == "config.json"]
    except (PackageNotFoundError, ValueError):
        if folder.is_dir():
            raise FedhmError(
                f"model.base = '{name}' is a folder without a config.json: name one that transformers saved"
            ) from None
        raise FedhmError(
            f"model.base = '{name}' is neither a folder with a config.json nor an installed package: name a model as "
            f"transformers save it, or install the package with 'pip install {name}'"
        ) from None
    beside = [file.parent for file in configs if any(file.parent.glob("*.safetensors"))]
    if not beside:
        raise FedhmError(f"model.base = '{name}' is a package without a pretrained model in it")
    return min(beside, key=lambda place: len(place.parts))
