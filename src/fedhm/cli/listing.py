"""`fedhm presets`, which needs nothing of what runs them."""

import argparse

from fedhm.config.presets import presets


def list_presets(_: argparse.Namespace) -> None:
    for name, text in presets().items():
        print(f"{name:24}{text.splitlines()[0].removeprefix('# ')}")
