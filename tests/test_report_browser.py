"""The page of a report in a real browser: it draws, answers to mouse and keyboard, and fetches nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Page, browse
from lockstep.cli.main import main
from traces import Plan, write_trace

EVIL = "</script><img src=x onerror=\"document.title='harm'\">"
METRICS: dict[int, dict[str, float]] = {100: {"accuracy": 0.5}, 300: {"accuracy": 0.75, EVIL: 3.0}}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("report") / "digits"
    return make(run, Plan(steps=300, slow={1: 1.5}, losses={200: math.nan, 300: 1e-3}, metrics=METRICS))


def make(run: Path, plan: Plan) -> Path:
    write_trace(run, plan)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture
def page(browser: Page, report: Path) -> Page:
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    browser.open(report)
    return browser


def rectangle(page: Page, selector: str) -> dict[str, float]:
    element = f"document.querySelector({json.dumps(selector)})"
    page.ask(f"{element}.scrollIntoView({{block: 'center'}})")
    page.settle()
    found: dict[str, float] = page.ask(f"{element}.getBoundingClientRect().toJSON()")
    return found


def view(page: Page) -> tuple[float, float]:
    begin, end = map(float, page.ask("document.getElementById('stage').dataset.view").split())
    return begin, end


def test_it_draws_everything_without_an_error_or_a_request(page: Page, report: Path) -> None:
    assert (
        page.ask("document.querySelector('h1').textContent")
        .replace("\u00a0", " ")
        .startswith("The other workers waited 31 % of the time for rank 1, which computes slower")
    )
    assert page.ask("document.querySelectorAll('.tile').length") >= 6
    assert page.ask("document.querySelectorAll('#bars .row').length") == 5
    assert page.ask("document.querySelectorAll('#stage rect.span').length") > 100
    assert page.ask("document.querySelectorAll('#curves path.line').length") == 4
    assert page.ask("document.querySelectorAll('#noise path.line').length") == 1
    assert page.ask("document.querySelectorAll('#buckets-body .row').length") == 4
    assert page.ask("document.querySelectorAll('#memory-body .row').length") == 4
    is_empty = "s => !s.hidden && s.innerText.trim().split('\\n').length < 2"
    assert page.ask(f"[...document.querySelectorAll('section')].filter({is_empty}).length") == 0
    assert page.errors == []
    assert page.requests == [report.as_uri()]


def test_metrics_of_the_program(page: Page) -> None:
    assert page.ask("[...document.querySelectorAll('#metrics h3')].map(e => e.firstChild.textContent)") == ["accuracy"]
    assert page.ask("document.querySelectorAll('#metrics path.line').length") == 1
    rows = page.ask(
        "[...document.querySelectorAll('#metrics tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == [["accuracy", "0.75", "300", "0.5", "0.75"], [EVIL, "3", "300", "3", "3"]]
    assert page.errors == []


def test_a_logarithmic_axis_says_so(page: Page) -> None:
    headings = page.ask("[...document.querySelectorAll('#curves h3')].map(e => e.textContent)")
    assert headings == ["Loss log scale", "Throughput", "Learning rate", "Gradient norm"]
    assert "log scale" in page.ask("document.querySelector('#curves .plot').getAttribute('aria-label')")


def test_code_in_advice_is_code(page: Page, tmp_path: Path) -> None:
    """In the headline's advice, which is in the page, and in what its script adds."""
    page.open(make(tmp_path / "run", Plan(workers=2, steps=40, data_s=0.1, between_s=0.05)))
    assert page.ask("[...document.querySelectorAll('.advice code')].map(e => e.textContent)") == [
        "num_workers=",
        "prefetch_factor=",
    ]
    assert "`" not in page.ask("document.body.innerText")


def test_zooming_moving_and_choosing(page: Page) -> None:
    box = rectangle(page, "#stage")
    whole = view(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    near = view(page)
    assert whole[0] < near[0] < near[1] < whole[1]
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 150, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 150, y, button="left", clickCount=1)
    moved = view(page)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0], rel=1e-3)
    page.ask("document.getElementById('stage').focus()")
    page.key("+", "+")
    assert view(page)[1] - view(page)[0] == pytest.approx((moved[1] - moved[0]) / 2, rel=1e-3)
    page.key("ArrowLeft")
    assert view(page)[0] < moved[1]
    page.key("0", "0")
    assert view(page) == whole
    page.ask("document.getElementById('in').click()")
    page.settle()
    assert view(page) != whole
    page.ask("document.getElementById('reset').click()")
    page.settle()
    assert view(page) == whole
    before = page.ask("document.getElementById('stage').innerHTML.length")
    page.ask("{const s = document.getElementById('scene'); s.value = '0'; s.dispatchEvent(new Event('change'))}")
    page.settle()
    assert page.ask("document.getElementById('stage').innerHTML.length") != before
    assert "step 1" in page.ask("document.getElementById('stage').textContent")
    assert page.errors == []


def test_tooltips_for_mouse_and_keyboard(page: Page) -> None:
    assert page.ask("document.getElementById('tip').hidden")
    box = rectangle(page, "#stage rect.span.c-backward")
    page.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 5)
    text = page.ask("document.getElementById('tip').textContent")
    assert text.startswith("backward")
    assert " ms on rank " in text
    assert not page.ask("document.getElementById('tip').hidden")
    page.mouse("mouseMoved", 5, 5)
    assert page.ask("document.getElementById('tip').hidden")
    page.ask("document.getElementById('stage').focus()")
    page.key("ArrowDown")
    page.key("ArrowDown")
    assert "on rank 0, step" in page.ask("document.getElementById('live').textContent")
    box = rectangle(page, "#curves .plot")
    page.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 50)
    assert page.ask("document.getElementById('tip').textContent").startswith("step 1")
    box = rectangle(page, "#bars .stack i.c-waiting")
    page.mouse("mouseMoved", box["x"] + 3, box["y"] + 5)
    assert "waiting for others" in page.ask("document.getElementById('tip').textContent")


def test_it_fits_a_phone(page: Page, report: Path, tmp_path: Path) -> None:
    names = (*"abcdefg", EVIL)
    elastic = make(tmp_path / "many", Plan(workers=8, steps=150, hosts=4, slow={1: 1.5}, names=names))
    may_be_wide = "'.wide, .sr, #tip, noscript, script, svg, option'"
    is_wide = f"e => !e.closest({may_be_wide}) && e.getBoundingClientRect().right > 361"
    for path in (report, elastic):
        page.resize(360, 740)
        page.open(path)
        assert page.ask("document.documentElement.scrollWidth") == 360
        found = f"[...document.querySelectorAll('body *')].filter({is_wide}).map(e => e.outerHTML.slice(0, 80))"
        assert page.ask(found) == []


def test_light_and_dark(page: Page) -> None:
    def brightness(what: str) -> float:
        color = page.ask(f"getComputedStyle(document.body).{what}")
        return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3 / 255

    assert brightness("backgroundColor") > 0.9
    assert brightness("color") < 0.2
    page.resize(1280, 900, dark=True)
    assert brightness("backgroundColor") < 0.15
    assert brightness("color") > 0.8
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert brightness("backgroundColor") == 1
    assert brightness("color") == 0
    page.call("Emulation.setEmulatedMedia", media="", features=[])


def test_all_text_has_enough_contrast(page: Page) -> None:
    """4.5 to 1, as WCAG's AA asks for, of text on what lies under it."""
    script = """(() => {
      const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
      const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
      const under = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
        if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
      const bad = [], texts = 'h1, h2, h3, p, small, td, th, span, i, dt, dd, button, a, summary, li';
      for (const e of document.querySelectorAll(texts)) {
        if (!e.textContent.trim() || !e.getClientRects().length || e.closest('.sr, .matrix, .tight')) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(under(e))].sort((x, y) => y - x);
        const contrast = (a + 0.05) / (b + 0.05);
        if (contrast < 4.5) bad.push(e.outerHTML.slice(0, 90) + ' ' + contrast.toFixed(2));
      }
      return bad; })()"""
    assert page.ask(script) == []
    page.resize(1280, 900, dark=True)
    assert page.ask(script) == []


def test_the_trace_is_handed_on_only_when_asked_for(page: Page, report: Path) -> None:
    """Perfetto's handshake: nothing before the click; PING until PONG; then the very bytes of trace.json."""
    page.ask("""window.opened = []; window.sent = []; window.open = (url) => { opened.push(url); return window.other = {
      postMessage: (message, origin) => { sent.push([typeof message === 'string' ? message : 'trace', origin]);
        if (message.perfetto) window.handed = new TextDecoder().decode(message.perfetto.buffer); } }; }""")
    page.ask("document.getElementById('perfetto').click()")
    page.ask("new Promise(done => setTimeout(done, 400))")
    assert page.ask("opened") == ["https://ui.perfetto.dev"]
    assert set(map(tuple, page.ask("sent"))) == {("PING", "https://ui.perfetto.dev")}
    page.ask("""{ const answer = new MessageEvent('message', {data: 'PONG'});
      Object.defineProperty(answer, 'source', {value: other}); window.dispatchEvent(answer); }""")
    assert page.ask("sent.at(-1)") == ["trace", "https://ui.perfetto.dev"]
    assert json.loads(page.ask("handed")) == json.loads((report.parent / "trace.json").read_text())
    page.ask("""window.blobs = []; URL.createObjectURL = (blob) => { blobs.push(blob); return '#'; }""")
    page.ask("document.getElementById('download').click()")
    page.ask("new Promise(done => setTimeout(done, 300))")
    assert json.loads(page.ask("blobs[0].text()")) == json.loads((report.parent / "trace.json").read_text())
    assert [url for url in page.requests if not url.startswith("file:")] == []


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(workers=1, steps=1),
        Plan(workers=1, steps=2, spans=False, noise=False, metrics={1: {"loss": math.nan}, 2: {"loss": math.inf}}),
        Plan(workers=2, steps=40, names=(EVIL, "b"), losses=dict.fromkeys(range(99), math.nan)),
        Plan(workers=2, steps=40, losses={3: 1e308, 4: -1e308, 5: 1e-300}),
        Plan(workers=40, steps=12, slow={17: 1.3}),
        Plan(workers=3, steps=40, ended=False, data_s=0.0, compute_s=0.0, exposed_s=0.0, between_s=0.0),
    ],
    ids=["one step", "no spans", "evil names, no loss", "huge losses", "forty workers", "no time at all"],
)
def test_odd_runs_are_drawn_without_errors(page: Page, tmp_path: Path, plan: Plan) -> None:
    path = make(tmp_path / "run", plan)
    for width in (360, 1280):
        page.resize(width, 900)
        page.open(path)
        assert page.ask("document.title") == "run: Lockstep report"
        assert page.ask("document.documentElement.scrollWidth") == width
        assert "NaN" not in page.ask("document.body.innerHTML.replace(/<script[\\s\\S]*<\\/script>/, '')")
    assert page.errors == []
    assert page.requests.count(path.as_uri()) == 2
    assert all(url.startswith("file:") for url in page.requests)


def test_damaged_runs_are_drawn_without_errors(page: Page, tmp_path: Path) -> None:
    chance = random.Random(11)
    wrong: list[Any] = [None, "text", -1, 0, 1e308, math.nan, [], {}, {"a": []}]
    for number in range(15):
        run = write_trace(tmp_path / str(number), Plan(workers=2, steps=6))
        for path in (run / "trace").iterdir():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines[1:]:
                if chance.random() < 0.4:
                    line[chance.choice(sorted(line))] = chance.choice(wrong)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["report", str(run)]) == 0
        page.open(run / "report.html")
        assert page.errors == [], number
