"""The page in a real browser: everything draws and can be switched, and nothing is asked for from elsewhere."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from browser import Browser, needs_browser
from fedhm.report.page import LivePages, PageServer, save_page
from fedhm.report.palette import DARK_TWINS, TIERS
from fedhm.runs.folder import RunFolder
from fedhm.runs.history import Run
from fedhm.runs.rounds import append_record
from made_runs import eventful_run, made_run

pytestmark = [needs_browser, pytest.mark.slow]

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
SHOWN = "return [...document.querySelectorAll('figure.drawn .interactive')]"
LINES = f"{SHOWN}.map((place) => place._fullData.filter((trace) => trace.visible === true).length)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.driver.quit()


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [eventful_run(), eventful_run(name=f"other {EVIL}", reason=EVIL)]


@pytest.fixture(scope="module")
def address(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_page(runs, tmp_path_factory.mktemp("page")).as_uri()


@pytest.fixture(scope="module")
def opened(browser: Browser, address: str) -> Browser:
    browser.open(address)
    return browser


def test_every_plot_draws_without_complaint_or_request(opened: Browser) -> None:
    figures = opened.run("return document.querySelectorAll('figure').length")
    opened.run("for (const one of document.querySelectorAll('details.folded')) one.open = true")
    opened.wait(lambda: opened.run("return document.querySelectorAll('figure.drawn').length") == figures)
    sizes = opened.run(f"{SHOWN}.map((place) => place.querySelector('svg.main-svg').getBoundingClientRect().width)")
    assert len(sizes) == figures == 13
    assert min(sizes) > 500
    paths = opened.run(f"{SHOWN}.map((place) => place.querySelectorAll('.trace path').length)")
    assert min(paths) > 0
    stills = opened.run("return [...document.querySelectorAll('.still')].map((one) => getComputedStyle(one).display)")
    assert set(stills) == {"none"}
    assert opened.complaints() == []
    assert {address.partition(":")[0] for address in opened.asked_for()} == {"file"}


def test_tiers_and_runs_are_switched_off_in_every_plot(opened: Browser) -> None:
    before = opened.run(LINES)

    def click(name: str, number: int) -> list[int]:
        opened.run(f"document.querySelectorAll('.switches input[name={name}]')[{number}].click()")
        found: list[int] = opened.run(LINES)
        return found

    without_tier = click("tier", 0)
    assert without_tier[0] == before[0] - 2  # of both runs
    without_both = click("run", 1)
    assert without_both[0] == 1
    click("tier", 0)
    assert click("run", 1) == before
    assert opened.complaints() == []


def test_values_stand_under_the_pointer(opened: Browser) -> None:
    opened.run("document.querySelector('figure').scrollIntoView()")
    place = opened.run(
        "const box = document.querySelector('figure .nsewdrag').getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]"
    )
    opened.emulate("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    text = opened.wait(lambda: opened.run("return document.querySelector('figure .hoverlayer').textContent"))
    assert "50.00" in text
    assert "round 2" in text


def test_what_is_not_ours_is_text_and_no_more(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('main img').length") == 0
    assert "<img src=x" in opened.run("return document.querySelector('main').textContent")
    assert "<img" in opened.run("return document.querySelector('figure .legend').textContent")
    opened.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/\" onerror=\"x = 1\">')")
    opened.wait(lambda: any("Content Security Policy" in each for each in opened.complaints()))
    assert opened.run("return typeof x") == "undefined"


def test_it_is_readable_without_scripts_on_a_phone_in_the_dark_and_on_paper(opened: Browser, address: str) -> None:
    opened.emulate("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    opened.open(address)
    assert opened.run("return document.documentElement.scrollWidth") <= 390
    colour = "return getComputedStyle(document.querySelector('figure text.xtitle')).fill"
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = opened.run(colour), opened.run(ground)
    opened.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = opened.run(colour), opened.run(ground)
    drawn = "return document.querySelector('figure .scatterlayer path.js-line').style.stroke"
    twin = f"rgb{tuple(bytes.fromhex(DARK_TWINS[TIERS[0]][1:]))}"
    opened.wait(lambda: opened.run(drawn) == twin)  # lines have the twins of their colours
    assert light == ("rgb(26, 26, 26)", "rgb(255, 255, 255)")
    assert dark == ("rgb(230, 230, 230)", "rgb(22, 24, 27)")
    opened.emulate("Emulation.setEmulatedMedia", media="print")
    still = "return getComputedStyle(document.querySelector('figure.drawn .still')).display"
    assert opened.run(still) == "block"
    opened.emulate("Emulation.setEmulatedMedia", media="", features=[])
    opened.emulate("Emulation.clearDeviceMetricsOverride")
    opened.emulate("Emulation.setScriptExecutionDisabled", value=True)
    opened.open(address)
    visible = opened.driver.find_elements("css selector", "figure .still svg")
    assert sum(element.is_displayed() for element in visible) == 10  # the other metric's are folded
    assert not opened.driver.find_element("css selector", ".switches").is_displayed()
    opened.emulate("Emulation.setScriptExecutionDisabled", value=False)


OVERLAPS = f"""{SHOWN}.flatMap((place) => {{
  const box = (what) => place.querySelector(what)?.getBoundingClientRect(), legend = box('.legend');
  const over = (other) => legend && other && legend.top < other.bottom - 1 && other.top < legend.bottom - 1;
  return [box('.xtitle'), box('.xaxislayer-above'), box('.modebar')].map(over);
}})"""
OUTSIDE = f"""{SHOWN}.map((place) => Math.max(...[...place.querySelectorAll('text')].map(
  (text) => text.getBoundingClientRect().right - place.getBoundingClientRect().right)))"""
NUMBERS = f"{SHOWN}.map((place) => [...place.querySelectorAll('.%stick text')].map((text) => text.textContent))"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_lies_over_anything_else_at_any_width(browser: Browser, address: str, width: int) -> None:
    browser.emulate("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=True)
    try:
        browser.open(address)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        overlaps = browser.run(OVERLAPS)
        assert len(overlaps) > 20
        assert not any(overlaps)
        assert max(browser.run(OUTSIDE)) < 1
    finally:
        browser.emulate("Emulation.clearDeviceMetricsOverride")


def test_axes_of_a_single_point_have_numbers_and_no_client_is_a_half(browser: Browser, tmp_path: Path) -> None:
    run = made_run("short", {"full": 1000}, [{"full": 0.5}])
    run.records[0].diagnostics = {"energy_beyond/1/8": 0.0234}
    browser.open(save_page([run], tmp_path).as_uri())
    across, up = browser.run(NUMBERS % "x"), browser.run(NUMBERS % "y")
    assert len(across) == 5  # by round, bytes and computation; spectrum; who took part
    assert min(len(numbers) for numbers in (*across, *up)) >= 2
    assert up[-1] == ["0", "1"]


def test_a_run_that_goes_on_shows_its_news_and_keeps_what_is_switched_off(browser: Browser, tmp_path: Path) -> None:
    run = replace(eventful_run(), layers={})
    with RunFolder.create(tmp_path / "run", run.config.resolved()) as folder:
        folder.save_costs(run.costs)
        folder.save_data_facts(run.data)
        append_record(folder.path / "records.jsonl", run.records[0])
        with PageServer(LivePages([folder.path])) as server:
            thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                browser.open(server.address)
                assert "done 1 of its 3 rounds" in browser.run("return document.querySelector('main').textContent")
                browser.run("document.querySelector('.switches input').click()")
                browser.run("document.querySelector('figure details').open = true")
                append_record(folder.path / "records.jsonl", run.records[1])
                news = "return document.querySelector('main').textContent.includes('done 2 of its 3 rounds')"
                browser.wait(lambda: browser.run(news))
                assert browser.run("return document.querySelector('.switches input').checked") is False
                assert browser.run("return document.querySelector('figure details').open") is True
                assert browser.run(LINES)[0] == 1
                assert browser.run(f"{SHOWN}[0]._fullData[1].x.length") == 2
                assert browser.complaints() == []
                assert {address.rpartition("/")[0] + "/" for address in browser.asked_for()} == {server.address}
            finally:
                server.shutdown()
                thread.join()
    said = "return getComputedStyle(document.querySelector('main'), '::before').content.includes('no longer served')"
    browser.wait(lambda: browser.run(said))
