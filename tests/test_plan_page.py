"""The page of a plan: hostile names stay text, nothing is fetched, and a real browser draws every chart."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Page, browse
from lockstep.plan.page import MOST_FORECASTS, render_plan, select_forecasts

EVIL = "</script><img src=x onerror=\"document.title='harm'\"><!-- @@DATA@@ --> `a` & {b}"
LINKS = {"25GbE": 25.0, "100GbE": 100.0, "InfiniBand NDR": 400.0}
CODECS = {"float32": (4.0, 1.0), "int8": (1.0, 1.02)}  # bytes per gradient, and how much longer the rest takes
PARTS = ["recommended", "efficiency", "money", "memory", "goodput", "batch", "checked", "forecasts", "links", "notes"]


# ---- a plan ----------------------------------------------------------------------------------------------------------


def sample_forecast(hosts: int, link: str, grad_comm: str, *, shard_optimizer: bool = False) -> dict[str, Any]:
    """Returns a forecast with plausible numbers, for a model of 124 million parameters on hosts of eight workers."""
    workers, (byte_count, slower) = 8 * hosts, CODECS[grad_comm]
    alone_ms, per_host_ms = 1120.0, 1e3 * 124e6 * 8 * byte_count / (LINKS[link] * 1e9)
    parts = {
        "data": 0.2, "forward and backward": slower * alone_ms * 8 / workers,
        "exposed communication": 2.1 + 0.55 * per_host_ms * (hosts - 1) / hosts + 0.4 * math.log2(workers),
        "waiting for the slowest": 0.6 * math.log2(workers), "update": 2.2 if shard_optimizer else 7.8, "other": 1.4,
    }  # fmt: skip
    step_ms = sum(parts.values())
    spread = 0.03 + 0.035 * math.log2(hosts)
    memory = {
        "weights": 473.0, "gradients": 473.0, "buckets": 30.0 + (473.0 if grad_comm == "int8" else 0.0),
        "optimizer": 946.0 / (workers if shard_optimizer else 1), "graphs": 0.0, "activations": 64_000.0 / workers,
        "rest": 620.0,
    }  # fmt: skip
    total = sum(memory.values())
    hours = 120_000 * step_ms / 3.6e6
    name = f"{hosts} host{'s' * (hosts > 1)} x 8 workers, hierarchy, {link}, {grad_comm}"
    return {
        "name": name + ", sharded optimizer" * shard_optimizer,
        "workers": workers, "hosts": hosts, "workers_per_host": 8, "link": link, "backend": "hierarchy",
        "grad_comm": grad_comm, "shard_optimizer": shard_optimizer, "redundancy": 0, "global_batch_size": 512,
        "shards": 64, "bucket_mib": 25,
        "step_ms": {"low": step_ms * (1 - spread), "mid": step_ms, "high": step_ms * (1 + 1.3 * spread)},
        "samples_per_s": 512e3 / step_ms, "efficiency": alone_ms * 8 / workers / step_ms,
        "parts_ms": parts, "memory_mib": memory, "memory_total_mib": total, "memory_limit_mib": 8192.0,
        "fits": total < 8192, "does_not_fit_by": "" if total < 8192 else "activations",
        "hours": hours, "cost": 3 * workers * hours, "checkpoint_every_s": 1800.0,
        "goodput": {"recovery_in_place": 1 - 5e-6 * workers, "restart": 1 - 0.011 * math.sqrt(workers / 64)},
        "is_best": False, "is_pareto": False, "is_extrapolated": hosts > 1,
    }  # fmt: skip


def sample_plan() -> dict[str, Any]:
    """Returns a plan in which every part of the page has data."""
    forecasts = [
        sample_forecast(hosts, link, grad_comm, shard_optimizer=shard_optimizer)
        for link in LINKS
        for grad_comm in CODECS
        for shard_optimizer in ((False, True) if link == "100GbE" else (False,))
        for hosts in (1, 2, 4, 8)
    ]
    fitting = [one for one in forecasts if one["fits"]]
    for one in fitting:
        faster = [other for other in fitting if other["hours"] < one["hours"] and other["cost"] <= one["cost"]]
        one["is_pareto"] = not faster
    best = min(fitting, key=lambda one: one["step_ms"]["mid"] * one["workers"] ** 0.5)
    best["is_best"] = True
    in_place = [{"workers": n, "recovery_in_place": 1 - 5e-6 * n} for n in (8, 16, 32, 64, 128, 256, 512)]
    restart = [{"restart": 1 - 0.011 * math.sqrt(one["workers"] / 64)} for one in in_place]
    every = [{"checkpoint_every_s": 14_400 / math.sqrt(one["workers"])} for one in in_place]
    batches = (64, 128, 256, 512, 1024, 2048, 4096)
    return {
        "program": "train.py", "measured_on": "2 cores, torch 2.13.0, cpu",
        "made": "2026-11-18 04:10 UTC", "version": "0.1.0", "question": "64 gpus, 100 Gbit/s, 3 $/h", "currency": "$",
        "headline": f"Take {best['hosts']} hosts of 8 workers over {best['link']}: a step takes "
        f"{best['step_ms']['mid']:.0f} ms, at {100 * best['efficiency']:.0f} % efficiency. "
        f"With `grad_comm=\"{best['grad_comm']}\"` most of the communication is hidden behind the backward pass.",
        "notes": ["Compute times were measured on this machine.", "Times on more than one host are extrapolated."],
        "links": [{"name": name, "gbit_per_s": s, "latency_us": 20.0, "source": "preset"} for name, s in LINKS.items()],
        "target": {"loss": 2.5, "steps": 120_000},
        "forecasts": forecasts,
        "failures": {
            "mtbf_hours": 1000, "notes": ["Failures are assumed to be independent."],
            "curve": [one | two | three for one, two, three in zip(in_place, restart, every, strict=True)],
        },
        "batch": {
            "noise_scale": 1234.0, "advice": "Batches above 1,234 samples need more samples for the same loss.",
            "curve": [{"global_batch_size": n, "steps": 6e3 + 7.4e6 / n, "samples": 6e3 * n + 7.4e6} for n in batches],
        },
        "checked": [
            check_of("1 worker, shm", 1120.0, 1131.0), check_of("2 workers, shm", 571.0, 560.0),
            check_of("2 hosts x 1 worker, hierarchy", 583.0, 640.0),
        ],
    }  # fmt: skip


def check_of(name: str, mid: float, measured: float) -> dict[str, Any]:
    predicted = {"name": name, "predicted_ms": {"low": (low := 0.95 * mid), "mid": mid, "high": (high := 1.06 * mid)}}
    return predicted | {"measured_ms": measured, "error": measured / mid - 1, "inside": low <= measured <= high}


def with_nulls(plan: dict[str, Any]) -> dict[str, Any]:
    """Changes a plan, and returns it: everything that may be null or empty is."""
    for one in plan["forecasts"]:
        one |= dict.fromkeys(("memory_limit_mib", "fits", "hours", "cost", "goodput", "checkpoint_every_s"))
    nulls = dict.fromkeys(("target", "failures", "batch"))
    return plan | nulls | {"question": "", "notes": [], "links": [], "checked": []}


def many_forecasts(count: int) -> list[dict[str, Any]]:
    """Returns forecasts with different settings; the last one is the best."""
    made = []
    for n in range(count):
        one = sample_forecast(1 + n % 8, list(LINKS)[n % 3], list(CODECS)[n % 2])
        one |= {"name": f"{one['name']}, variant {n}", "bucket_mib": 1 + n, "is_best": n == count - 1}
        one["memory_mib"]["buckets"] += n  # so that no two share a bar
        made.append(one)
    return made


# ---- without a browser -----------------------------------------------------------------------------------------------


def poison(value: Any) -> Any:
    """Returns a copy in which every string is followed by markup."""
    if isinstance(value, dict):
        return {key: poison(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poison(one) for one in value]
    return value + EVIL if isinstance(value, str) else value


def test_hostile_strings_are_escaped() -> None:
    clean = render_plan(sample_plan(), "text")
    page = render_plan(poison(sample_plan()), "text" + EVIL)
    assert page.count("<img") == page.count("<!--") == 0
    assert re.findall(r"</?script", page) == re.findall(r"</?script", clean)
    assert len(re.findall(r"<\w", page)) - len(re.findall(r"<\w", clean)) == page.count("<code>a</code>")
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found.group(1))["program"] == "train.py" + EVIL


def test_the_policy_allows_its_own_script_only() -> None:
    page = render_plan(sample_plan(), "text")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "http" not in policy
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_a_browser_without_scripts_shows_the_text() -> None:
    page = render_plan(sample_plan(), "workers  <step>\n     16  96 ms")
    assert "<pre>workers  &lt;step&gt;\n     16  96 ms</pre></noscript>" in page
    assert '<p class="advice"></p>' in render_plan({"headline": "Take 2.5 GiB of version 2.13. now"}, "text")


def test_many_forecasts_stay_below_a_megabyte() -> None:
    for total, left_out in ((500, 0), (1500, 1000)):
        page = render_plan(sample_plan() | {"forecasts": many_forecasts(total)}, "text")
        assert len(page.encode()) < 1_000_000
        assert f'"forecasts_left_out":{left_out}' in page


def test_the_best_and_the_pareto_front_are_never_left_out() -> None:
    forecasts = many_forecasts(MOST_FORECASTS + 20)
    forecasts[-7]["is_pareto"] = True
    kept = select_forecasts(forecasts)
    assert kept == [*forecasts[: MOST_FORECASTS - 2], forecasts[-7], forecasts[-1]]


def test_names_that_are_not_utf8_and_numbers_that_are_none() -> None:
    plan = sample_plan() | {"program": "caf\udce9.py", "headline": ""}
    plan["forecasts"][0] |= {"efficiency": math.nan, "step_ms": {"low": math.inf}}
    page = render_plan(plan, "text \udcff")
    assert "<b>caf?.py</b>" in page
    assert "NaN" not in page.partition('id="data">')[2].partition("</script>")[0]


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    return browser


def visit(page: Page, folder: Path, plan: dict[str, Any]) -> Path:
    (path := folder / "plan.html").write_text(render_plan(plan, "text"), encoding="utf-8")
    page.open(path)
    return path


def shown_sections(page: Page) -> list[str]:
    return list(page.ask("[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.id)"))


def texts(page: Page, selector: str) -> list[str]:
    found = page.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return [text.replace("\u00a0", " ") for text in found]


def count(page: Page, selector: str) -> int:
    return len(texts(page, selector))


def rectangle(page: Page, selector: str) -> dict[str, float]:
    element = f"document.querySelector({json.dumps(selector)})"
    page.ask(f"{element}.scrollIntoView({{block: 'center'}})")
    page.settle()
    return dict(page.ask(f"{element}.getBoundingClientRect().toJSON()"))


def test_it_draws_everything_without_an_error_or_a_request(page: Page, tmp_path: Path) -> None:
    path = visit(page, tmp_path, sample_plan())
    assert shown_sections(page) == PARTS
    assert texts(page, "h1") == ["Take 8 hosts of 8 workers over 100GbE: a step takes 159 ms, at 88 % efficiency."]
    assert texts(page, ".advice code") == ['grad_comm="int8"']
    figures = ["64", "159 ms", "3211", "88 %", "5.32 h", "$1021", "3.01 GiB", "99.97 %"]
    assert texts(page, ".tile .figure") == figures
    assert texts(page, ".tile .more")[1] == "90 % interval: 138 to 187 ms"
    assert count(page, "#recommended .stack i") == 6 + 6  # CUDA graphs take no memory here
    assert count(page, "#recommended b.interval") == count(page, "#recommended b.limit") == 1
    assert count(page, "#efficiency .plot path.series") == count(page, "#efficiency path.band") == 8
    assert count(page, "#efficiency path.band.on") == count(page, "#efficiency .plot circle.best") == 1
    assert count(page, "#money .plot path.series") == 1
    assert count(page, "#memory .row") == count(page, "#memory b.limit") == 16
    assert count(page, "#goodput .plot path.series") == 2
    assert count(page, "#batch .plot path.series") == count(page, "#batch .plot line.level") == 2
    assert count(page, "#forecasts tbody tr") == 32
    is_empty = "s => !s.hidden && s.innerText.trim().split('\\n').length < 2"
    assert page.ask(f"[...document.querySelectorAll('section')].filter({is_empty}).length") == 0
    for axis in (
        "workers (log scale)",
        "efficiency, % of linear scaling",
        "time, hours",
        "cost, $",
        "global batch size",
    ):
        assert any(text.startswith(axis) for text in texts(page, "svg text.axis-name")), axis
    assert page.errors == []
    assert page.requests == [path.as_uri()]


def test_the_interval_and_the_limit_are_where_they_belong(page: Page, tmp_path: Path) -> None:
    plan = sample_plan()
    visit(page, tmp_path, plan)
    (best,) = (one for one in plan["forecasts"] if one["is_best"])
    stack, interval = rectangle(page, "#recommended .stack"), rectangle(page, "#recommended b.interval")
    per_ms = stack["width"] / best["step_ms"]["mid"]
    assert interval["left"] - stack["left"] == pytest.approx(best["step_ms"]["low"] * per_ms, abs=2)
    assert interval["right"] - stack["left"] == pytest.approx(best["step_ms"]["high"] * per_ms, abs=2)
    stack, limit = rectangle(page, "#memory .stack"), rectangle(page, "#memory b.limit")
    per_mib = stack["width"] / plan["forecasts"][0]["memory_total_mib"]
    assert limit["left"] - stack["left"] == pytest.approx(8192 * per_mib, abs=2)
    assert "does not fit: activations" in texts(page, "#memory .end")[0]
    best["memory_limit_mib"] = 80_000.0  # would leave nothing to see of the bar
    visit(page, tmp_path, plan)
    assert "The limit of 78.1 GiB is beyond the right edge." in texts(page, "#recommended .note")
    assert count(page, "#recommended b.limit") == 0


def test_a_line_goes_from_one_host_to_many_with_a_shard_per_worker(page: Page, tmp_path: Path) -> None:
    plan = sample_plan()
    plan["forecasts"] = [one | {"shards": one["workers"]} for one in plan["forecasts"] if not one["shard_optimizer"]]
    alone = [one | {"link": "", "backend": "shm"} for one in plan["forecasts"] if one["hosts"] == 1]
    several = [one for one in plan["forecasts"] if one["hosts"] > 1 and one["grad_comm"] == "int8"]
    plan["forecasts"] = [*(one for one in alone if one["grad_comm"] == "int8"), *several]
    visit(page, tmp_path, plan)
    assert count(page, "#efficiency .plot path.series") == len({one["link"] for one in several}) > 1
    assert count(page, "#efficiency path.band") == count(page, "#efficiency .plot path.series")


def test_at_most_eight_lines_and_24_bars(page: Page, tmp_path: Path) -> None:
    forecasts = many_forecasts(40)
    for n, one in enumerate(forecasts):
        one |= {"workers": 64 if n % 2 else 8, "efficiency": 0.5 + n / 100, "link": f"link {n}"}
    visit(page, tmp_path, sample_plan() | {"forecasts": forecasts})
    names = [text.partition(",")[0] for text in texts(page, "#efficiency .key")]
    assert names[:8] == [f"link {n}" for n in (39, 37, 35, 33, 31, 29, 27, 25)]
    assert "Shown are the 8 of 40 lines" in texts(page, "#efficiency-lead")[0]
    assert "32 are left out" in texts(page, "#efficiency-lead")[0]
    assert count(page, "#memory .row") == 24
    assert "Shown are 24 of 40 bars; 16 are left out." in texts(page, "#memory-lead")[0]
    assert texts(page, "#memory .label b")[0].endswith("variant 39"), "the recommended one is always there"
    assert page.errors == []


def test_what_has_no_data_is_left_out_with_its_heading(page: Page, tmp_path: Path) -> None:
    visit(page, tmp_path, with_nulls(sample_plan()))
    assert shown_sections(page) == ["recommended", "efficiency", "memory", "forecasts"]
    assert texts(page, "b.limit") == []
    assert not {"time", "cost", "goodput", "batch"} & set(texts(page, "#forecasts thead th"))
    visit(page, tmp_path, with_nulls(sample_plan()) | {"forecasts": []})
    assert shown_sections(page) == []
    assert page.ask("document.getElementById('tiles').hidden")
    visit(page, tmp_path, with_nulls(sample_plan()) | {"forecasts": sample_plan()["forecasts"][:1]})
    assert shown_sections(page) == ["efficiency", "money", "memory", "forecasts"]
    assert page.errors == []


def test_the_table_sorts_by_click_and_by_keyboard(page: Page, tmp_path: Path) -> None:
    plan = sample_plan()
    plan["forecasts"][5]["cost"] = None
    visit(page, tmp_path, plan)

    def column(name: str) -> list[str]:
        place = texts(page, "#forecasts thead th").index(name) + 1
        return texts(page, f"#forecasts tbody tr > :nth-child({place})")

    def head(name: str) -> str:
        return f"[...document.querySelectorAll('#forecasts thead button')].find(b => b.textContent === '{name}')"

    costs = [one["cost"] for one in plan["forecasts"] if one["cost"] is not None]
    page.ask(f"{head('cost')}.scrollIntoView({{block: 'center', inline: 'center'}})")
    box = page.ask(f"{head('cost')}.getBoundingClientRect().toJSON()")
    for direction, ordered in (("ascending", sorted(costs)), ("descending", sorted(costs, reverse=True))):
        page.mouse("mousePressed", box["x"] + 5, box["y"] + 5, button="left", buttons=1, clickCount=1)
        page.mouse("mouseReleased", box["x"] + 5, box["y"] + 5, button="left", clickCount=1)
        assert page.ask(f"{head('cost')}.parentNode.getAttribute('aria-sort')") == direction
        shown = column("cost")
        assert [float(text.lstrip("$")) for text in shown[:-1]] == pytest.approx(ordered, rel=0.006)
        assert shown[-1] == "\u2013", "unknown values come last in both directions"
    page.ask(f"{head('workers')}.focus()")
    page.key("Enter", "\r")
    assert column("workers") == [str(n) for n in (8, 16, 32, 64) for _ in range(8)]
    page.key(" ", " ")
    assert column("workers")[0] == "64"
    assert count(page, "#forecasts th[aria-sort]") == 1
    assert texts(page, "#live") == ["sorted by workers, descending"]
    assert count(page, "#forecasts tbody tr") == 32


def test_tooltips_for_mouse_and_keyboard(page: Page, tmp_path: Path) -> None:
    visit(page, tmp_path, sample_plan())
    assert page.ask("document.getElementById('tip').hidden")
    ring = rectangle(page, "#efficiency .plot circle.best")
    page.mouse("mouseMoved", ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
    (tip,) = texts(page, "#tip")
    assert tip.startswith("8 hosts x 8 workers, hierarchy, 100GbE, int8, sharded optimizer\n88 % on 64 workers\n159 ms")
    page.mouse("mouseMoved", 3, 3)
    assert page.ask("document.getElementById('tip').hidden")
    page.ask("document.querySelector('#goodput .plot').focus()")
    page.key("ArrowRight")
    assert texts(page, "#live")[0].startswith(
        "8 workers\nrecovery in place: 99.996 %\nrestart from a checkpoint: 99.6 %"
    )
    page.key("End")
    assert texts(page, "#tip")[0].startswith("512 workers")
    assert count(page, "#goodput .plot circle.chosen") == 1
    page.ask("document.activeElement.blur()")
    page.settle()
    assert page.ask("document.getElementById('tip').hidden")
    assert count(page, "circle.chosen") == 0
    box = rectangle(page, "#recommended .stack i.c-exposed")
    page.mouse("mouseMoved", box["x"] + 3, box["y"] + 2)
    assert texts(page, "#tip")[0].startswith("exposed communication")


def test_predictions_beside_measurements(page: Page, tmp_path: Path) -> None:
    visit(page, tmp_path, sample_plan())
    assert texts(page, "#checked-lead")[0].startswith("2 of 3 measured step times are inside")
    assert texts(page, "#checked .end") == ["1.13 s+1.0 %", "560 ms\u22121.9 %", "640 ms+9.8 %, outside"]
    inside = page.ask("""[...document.querySelectorAll('#checked .row:not(.foot) .track')].map(t => {
      const [range, dot] = ['range', 'measured'].map(c => t.querySelector('.' + c).getBoundingClientRect());
      const at = (dot.left + dot.right) / 2; return at >= range.left && at <= range.right; })""")
    assert inside == [True, True, False]
    assert count(page, "#checked table tbody tr") == 3


@pytest.mark.parametrize("plan", [sample_plan(), poison(sample_plan())], ids=["sample", "evil"])
def test_it_fits_a_phone(page: Page, tmp_path: Path, plan: dict[str, Any]) -> None:
    page.resize(380, 740)
    path = visit(page, tmp_path, plan)
    assert page.ask("document.documentElement.scrollWidth") == 380
    may_be_wide = "'.wide, .sr, #tip, noscript, script, svg'"
    is_wide = f"e => !e.closest({may_be_wide}) && e.getBoundingClientRect().right > 381"
    found = f"[...document.querySelectorAll('body *')].filter({is_wide}).map(e => e.outerHTML.slice(0, 80))"
    assert page.ask(found) == []
    assert page.ask("document.title") == f"{plan['program']}: Lockstep plan", "hostile names run nothing"
    assert count(page, "img") == 0
    assert page.errors == []
    assert page.requests == [path.as_uri()]


CONTRAST = """(() => {
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const under = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const bad = [],
    texts = 'h1, h2, h3, p, small, td, th, span, i, dt, dd, b, button, summary, li, svg text, svg .series';
  for (const e of document.querySelectorAll(texts)) {
    const isLine = e.matches('.series'), style = getComputedStyle(e);
    if (!isLine && (!e.textContent.trim() || !e.getClientRects().length || e.closest('.sr, .tight'))) continue;
    const color = isLine ? style.stroke : e.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(parse(color)), light(under(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (isLine ? 3 : 4.5)) bad.push(e.outerHTML.slice(0, 90) + ' ' + contrast.toFixed(2));
  }
  return bad; })()"""


def test_light_and_dark_have_enough_contrast(page: Page, tmp_path: Path) -> None:
    """As WCAG's AA asks for: 4.5 to 1 of text, and 3 to 1 of lines, on what lies under them."""
    visit(page, tmp_path, sample_plan())
    assert page.ask(CONTRAST) == []
    light = page.ask("getComputedStyle(document.body).backgroundColor")
    page.resize(1280, 900, dark=True)
    assert page.ask("getComputedStyle(document.body).backgroundColor") != light
    assert page.ask(CONTRAST) == []


def test_odd_numbers_are_drawn_without_errors(page: Page, tmp_path: Path) -> None:
    """Any number may be null, which is what a NaN becomes, or extreme."""
    chance = random.Random(5)

    def spoil(value: Any, share: float) -> Any:
        if isinstance(value, dict):
            return {key: spoil(one, share) for key, one in value.items()}
        if isinstance(value, list):
            return [spoil(one, share) for one in value]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        odd = [None, math.nan, math.inf, 0, -1, 1e308, 1e-300]
        return chance.choice(odd) if is_number and chance.random() < share else value

    for share in (0.05, 0.3, 0.6, 1.0):
        visit(page, tmp_path, spoil(sample_plan(), share))
        drawn = page.ask("document.body.innerHTML.replace(/<script[\\s\\S]*<\\/script>/, '')")
        assert not [word for word in ("NaN", "undefined", "Infinity") if word in drawn], share
        assert page.ask("document.documentElement.scrollWidth") == 1280
        assert page.errors == [], share
