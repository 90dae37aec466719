"""The README's picture of a page, with values under the pointer: `make picture`, after `fedhm run digits`.

python tests/page_picture.py runs/digits/report.html docs/images/report-page.png
"""

import base64
import sys
import tempfile
from pathlib import Path

from browser import Browser

WIDTH = 1000  # pixels
ENDS_BELOW = "#plot-accuracy-by-round .note"  # the first plot with its legend, and the sentence on it
PLACE = "const box = document.querySelector('#plot-accuracy-by-round .nsewdrag').getBoundingClientRect();"


def main() -> None:
    page, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            size = {"width": WIDTH, "height": 1600, "deviceScaleFactor": 1, "mobile": False}
            browser.emulate("Emulation.setDeviceMetricsOverride", **size)
            browser.emulate("Emulation.setScrollbarsHidden", hidden=True)
            browser.open(page.absolute().as_uri())
            x, y = browser.run(f"{PLACE} return [box.left + 0.36 * box.width, box.top + box.height / 2]")
            browser.emulate("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            browser.wait(lambda: browser.run("return document.querySelector('figure .hoverlayer').textContent"))
            end = browser.run(f"return document.querySelector('{ENDS_BELOW}').getBoundingClientRect().bottom")
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": end + 3, "scale": 1}
            shot = browser.emulate("Page.captureScreenshot", format="png", clip=clip)
        finally:
            browser.driver.quit()
    target.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
