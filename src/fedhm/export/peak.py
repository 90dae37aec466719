"""A process that loads and runs one exported file, and prints the peak of the memory that this added, in bytes.

python -m fedhm.export.peak FORMAT FILE SAMPLE.safetensors
"""

import gc
import json
import re
import sys
from pathlib import Path

from safetensors.torch import load_file

from fedhm.export.formats import find_format

STATUS = Path("/proc/self/status")
CALLS = 5


def main() -> None:
    to, path, inputs = sys.argv[1:]
    sample, made = load_file(inputs)["sample"], find_format(to)
    for module in made.modules[-1:]:
        __import__(module)
    gc.collect()
    if not STATUS.exists():
        print(json.dumps(None))
        return
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="utf-8"
    )  # forget the peak so far, which was that of the imports
    before = peak_bytes("VmRSS")
    outputs = made.load(Path(path), threads=1)
    for _ in range(CALLS):
        outputs(sample)
    print(json.dumps(max(0, peak_bytes("VmHWM") - before)))


def peak_bytes(name: str) -> int:
    """Return a number of bytes that Linux tells of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
