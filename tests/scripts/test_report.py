"""The report: the page in an installed browser, light and dark, at phone and desktop size; CSV and PNG."""

import csv
import html
import io
import json
import re
import struct
import subprocess
import sys

import pytest

from speculative.bench import saved_result
from speculative.bench.reporting import charts
from speculative.bench.reporting.page import html_text
from speculative.pair.engines import engine_id
from tests.support.page_checks import BEYOND, CONTRAST
from tests.support.paths import DRAFT, ROOT

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">"' & \ud800"""
PHONE, DESK = 390, 1280

# Input data: not measured, chosen so that every part of the page has something to show.
ROWS = [
    {"name": "GenAI, main alone", "engine": "GenAI", "draft_length": 0, "temperature": 0.0, "throughput": 30.0,
     "throughputs": [29.0, 31.0], "speedup": 1.0, "speedup_range": [1.0, 1.0], "acceptance_rate": None,
     "position_acceptance": [], "block_efficiency": 1.0, "ttft": 0.05, "tpot": 0.033, "repetition": 0.0},
    {"name": "GenAI, K = 2", "engine": "GenAI", "draft_length": 2, "temperature": 0.0, "throughput": 45.0,
     "throughputs": [44.0, 46.0], "speedup": 1.5, "speedup_range": [1.4, 1.6], "acceptance_rate": 0.8,
     "position_acceptance": [0.9, 0.7], "block_efficiency": 2.6, "ttft": 0.05, "tpot": 0.022, "repetition": 0.0},
    {"name": "GenAI, K = 4", "engine": "GenAI", "draft_length": 4, "temperature": 0.0, "throughput": 60.0,
     "throughputs": [50.0, 70.0], "speedup": 2.0, "speedup_range": [1.7, 2.3], "acceptance_rate": 0.7,
     "position_acceptance": [0.9, 0.7, 0.6, 0.5], "block_efficiency": 3.8, "ttft": 0.05, "tpot": 0.016},
    {"name": "ours, adaptive", "engine": "ours", "draft_length": "adaptive", "temperature": 0.0, "throughput": 66.0,
     "throughputs": [65.0, 67.0], "speedup": 2.2, "speedup_range": [2.1, 2.3], "acceptance_rate": 0.75,
     "position_acceptance": [0.9, 0.8, 0.7, 0.6, 0.5], "block_efficiency": 4.1, "ttft": 0.05, "tpot": 0.015},
]  # fmt: skip
SWEEP = [
    {"temperature": t, "k": k, "engine": engine, "speedup": 1 + k / 5 - t / 2,
     "speedup_range": [0.9 + k / 5 - t / 2, 2.5], "predicted": 1.1 + k / 5 - t / 2, "forward_speedup": 1 + k / 2,
     "acceptance_rate": 0.9 - k / 20, "best": k == 5}
    for t in (0, 0.7, 1) for engine in ("GenAI", "ours") for k in range(1, 6)
]  # fmt: skip
NO_GPU = "OpenVINO finds no GPU on this machine"
CELLS = [
    {"main_device": "CPU", "draft_device": "none", "status": "ok", "throughput": 30.0, "speedup": 1.0,
     "same_text": True},
    {"main_device": "CPU", "draft_device": "CPU", "status": "ok", "throughput": 60.0, "speedup": 2.0,
     "same_text": True},
    {"main_device": "CPU", "draft_device": "GPU", "status": "absent", "reason": NO_GPU},
    {"main_device": "GPU", "draft_device": "none", "status": "absent", "reason": NO_GPU},
    {"main_device": "GPU", "draft_device": "CPU", "status": "failed", "reason": "the process was killed by signal 9"},
    {"main_device": "GPU", "draft_device": "GPU", "status": "emulated", "throughput": 90.0, "speedup": 0.8,
     "same_text": False, "first_difference": 17},
]  # fmt: skip
CANDIDATES = [
    {"settings": {"draft_length": 4, "engine": "ours"}, "throughput": 60.0, "speedup": 2.0, "spread": [1.9, 2.1],
     "agreement": 0.99, "mean_kl": 0.001, "dropped_in_round": None},
    {"settings": {"draft_length": 2, "engine": "ours"}, "throughput": 50.0, "speedup": 1.6, "spread": [1.5, 1.7],
     "agreement": 1.0, "mean_kl": 0.0, "dropped_in_round": "draft length 1"},
    {"name": "a device", "failed": "no such device"},
]  # fmt: skip
TOKENS = {
    "prompt": "def f(x):\n",
    "steps": [{"accepted": ["    ", "return"], "rejected": [" y", "\n"], "main": " x"},
              {"accepted": [" + 1"], "rejected": [], "main": "\n"}],
}  # fmt: skip
MINIMAL = {
    "program": "benchmark",
    "summary": ["The draft makes it 2.00x as fast.", "The second sentence."],
    "environment": {
        "main": "pair/main",
        "draft": "pair/draft",
        "cores": 2,
        "other_load": 0.25,
        "properties": {"A": "B"},
    },
}
PARTS = {
    "rows": ROWS,
    "sweep": SWEEP,
    "iteration": [{"name": "ours, K = 4", "draft_length": 4, "draft_ms": 2.0, "verify_ms": 6.0, "overhead_ms": 0.5}],
    "categories": [{"category": "code", "name": "K = 4", "speedup": 2.0, "acceptance_rate": 0.7, "prompts": 3}],
    "matrix": {"main_devices": ["CPU", "GPU"], "draft_devices": ["none", "CPU", "GPU"], "cells": CELLS},
    "token_view": TOKENS,
    "candidates": CANDIDATES,
    "recommendation": {"best": "ours", "settings": {"ours": {"draft_length": 4, "speedup": 2.0}}, "sentences": ["no"]},
}
SHOWN = {
    "rows": {"speedup", "acceptance", "tables"},
    "sweep": {"speedup", "tables"},
    "iteration": {"iteration", "tables"},
    "categories": {"categories"},
    "matrix": {"devices"},
    "token_view": {"tokens"},
    "candidates": {"candidates", "tables"},
    "recommendation": {"recommendation"},
}
ALL = {**MINIMAL, **PARTS, "prediction_error": 0.064}
LONG = {
    **ALL,
    "summary": ["A/very/long/path/without/any/space" * 9],
    "environment": {"main": "x" * 300, "command": "y " * 300},
}


@pytest.fixture
def draw(run_here, tmp_path):
    """The page of a result, by the command."""

    def draw(result):
        saved, page = tmp_path / "result.json", tmp_path / "page.html"
        saved.write_text(json.dumps(result), encoding="utf-8")
        process = run_here("scripts/report.py", saved, page)
        assert process.returncode == 0, process.stderr
        return page

    return draw


@pytest.fixture(scope="module")
def window(browser):
    """One browser window for all tests: each further one would start processes of its own."""
    return browser.new_page()


@pytest.fixture
def show(window):
    """Open a page in place of the last one; any console message and any network request fails the test."""
    messages, requested, shown = [], [], []
    listeners = {
        "console": lambda message: messages.append(message.text),
        "pageerror": lambda error: messages.append(str(error)),
        "request": lambda request: requested.append(request.url),
    }
    for event, listener in listeners.items():
        window.on(event, listener)

    def show(page, width=DESK, scheme="light"):
        window.set_viewport_size({"width": width, "height": 800})
        window.emulate_media(color_scheme=scheme)
        window.goto(page.as_uri())
        shown.append(page.as_uri())
        return window

    yield show
    window.goto("about:blank")  # actions of the last page are still recorded
    for event, listener in listeners.items():
        window.remove_listener(event, listener)
    assert messages == [] and [one for one in requested if one != "about:blank"] == shown


def sections(shown):
    return set(shown.eval_on_selector_all("section, header", "all => all.map(one => one.id)"))


# ---- the page in a browser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("result", [ALL, LONG], ids=["all", "long words"])
def test_layout_does_not_overflow_and_contrast_is_sufficient(draw, show, result, width, scheme):
    shown = show(draw(result), width, scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.evaluate(BEYOND) == []
    shown.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    contrast = shown.evaluate(CONTRAST)
    assert len(contrast["texts"]) > 150 and len(contrast["marks"]) > 50
    assert [one for one in contrast["texts"] if one[0] < 4.5] == []
    assert [one for one in contrast["marks"] if one[0] < 3] == []
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 600) == (scheme == "light")


def test_summary_is_shown_first(draw, show):
    words = show(draw(ALL)).inner_text("body")
    title, first, second = words.split("\n\n")[:3] if "\n\n" in words[:200] else words.splitlines()[:3]
    assert title.strip() == "Speedup of speculative decoding: pair/main with pair/draft"
    assert (first.strip(), second.strip()) == tuple(MINIMAL["summary"])


def test_program_lines_in_summary_are_code_blocks(draw, show):
    result = {
        **MINIMAL,
        "summary": ["Use it.", "Run it: python a b", "In Python:", "    import a", "    if a:", "        b()"],
    }
    shown = show(draw(result))
    assert shown.locator("#summary pre").all_inner_texts() == ["python a b", "import a\nif a:\n    b()"]
    assert shown.locator("#summary p").all_inner_texts() == ["Use it.", "Run it:", "In Python:"]


@pytest.mark.parametrize("key", PARTS)
def test_section_is_shown_only_if_result_has_its_data(draw, show, key):
    alone = sections(show(draw({**MINIMAL, key: PARTS[key]})))
    assert alone == {"summary", "environment"} | SHOWN[key]
    for empty in ({}, []) if key != "matrix" else ({},):
        assert sections(show(draw({**MINIMAL, key: empty}))) == {"summary", "environment"}


def test_all_text_is_escaped(draw, show):
    def hostile(value):
        if isinstance(value, dict):
            return {key if key in KEPT else key + HOSTILE: hostile(part) for key, part in value.items()}
        if isinstance(value, list):
            return [hostile(part) for part in value]
        return value + HOSTILE if isinstance(value, str) and value not in ("ok", "adaptive") else value

    KEPT = {
        key for one in (MINIMAL, PARTS, *ROWS, *SWEEP, *CELLS, *CANDIDATES, TOKENS, *TOKENS["steps"]) for key in one
    }
    KEPT |= {"main_devices", "draft_devices", "cells", "draft_ms", "verify_ms", "overhead_ms", "category", "prompts"}
    KEPT |= set(PARTS["recommendation"])
    shown = show(draw({key: hostile(value) for key, value in ALL.items()}))
    assert shown.evaluate("[document.scripts.length, document.images.length, window.hacked]") == [0, 0, None]
    assert sections(shown) == {"summary", "environment"} | set().union(*SHOWN.values())
    words = shown.inner_text("body")
    assert words.count('<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">"\' & ?') > 40


def test_speedup_is_plotted_against_draft_length(draw, show):
    shown = show(draw({**MINIMAL, "sweep": SWEEP, "prediction_error": 0.064}))
    panels = shown.locator("#speedup figure")
    assert [panels.nth(i).locator("h3").inner_text() for i in range(panels.count())] == [
        "Greedy", "Temperature 0.7", "Temperature 1",
    ]  # fmt: skip
    greedy = panels.nth(0)
    assert greedy.locator(".marker > title").count() == 10 and greedy.locator(".spread").count() == 10
    assert greedy.locator("svg[role=img] > .dashed").count() == 2  # predicted, of each engine
    assert "6.4%" in shown.inner_text("#speedup .how")
    axes = greedy.locator(".axis").all_text_contents()
    assert axes == ["draft length K (tokens)", "speedup (x)"]
    places = {}
    for marker in greedy.locator("svg[role=img] > .marker").all():
        title = marker.locator("title").text_content()
        x, y = re.search(r"\((\S+) (\S+)\)", marker.get_attribute("transform")).groups()
        places[title] = float(x), float(y)
    one, two, five = (next(v for title, v in places.items() if f"ours, K = {k}:" in title) for k in (1, 2, 5))
    assert two[0] - one[0] == pytest.approx((five[0] - one[0]) / 4, abs=0.2)  # evenly along both axes
    assert one[1] - two[1] == pytest.approx((one[1] - five[1]) / 4, abs=0.2) and one[1] > five[1]


def test_benchmark_rows_are_plotted(draw, show):
    shown = show(draw({**MINIMAL, "rows": ROWS}))
    assert shown.locator("#speedup svg[role=img] > .marker").count() == 2  # K = 2 and 4
    assert "ours, adaptive: 2.20x" in shown.inner_text("#speedup .legend")
    assert shown.locator("#speedup .note-text").text_content() == "2.00x"  # the best K
    assert shown.locator("#acceptance .legend li").all_inner_texts() == ["GenAI, K = 4", "ours, adaptive"]
    marked = shown.locator("#acceptance svg[role=img] > .marker")
    assert marked.count() == 4 + 5
    shapes = {one.get_attribute("d") for one in marked.all()}
    assert len(shapes) == 2  # not by colour alone


def with_ids(rows):
    """The rows with engine ids; earlier versions recorded the names shown instead."""
    return [{**row, "engine": engine_id(row["engine"])} for row in rows]


@pytest.mark.parametrize("parts", [("rows",), ("sweep",), ("rows", "sweep")], ids=str)
def test_current_and_former_engine_ids_render_alike(parts):
    assert {row["engine"] for row in with_ids(ROWS)} == {"genai", "native"}
    former, present = (html_text({**MINIMAL, **{part: ids(PARTS[part]) for part in parts}}) for ids in (list, with_ids))
    assert former == present and "GenAI, measured" in former


def test_recommended_candidate_is_found_by_current_and_former_ids():
    candidates = [{"settings": {**one["settings"], "engine": "native"}} for one in CANDIDATES[:2]]
    best = {"draft_length": 4, "speedup": 2.0}
    present = {"best": "native", "settings": {"native": best}}
    former = PARTS["recommendation"]
    assert charts.chosen({"candidates": CANDIDATES, "recommendation": former}) is CANDIDATES[0]
    assert charts.chosen({"candidates": candidates, "recommendation": present}) is candidates[0]
    assert charts.chosen({"candidates": CANDIDATES, "recommendation": present}) is CANDIDATES[0]
    alone = {"best": "alone", "settings": {"alone": {"device": "CPU"}}}
    for engine in ("GenAI", "genai"):
        candidate = {"settings": {"device": "CPU", "engine": engine}}
        assert charts.chosen({"candidates": [*candidates, candidate], "recommendation": alone}) is candidate
    suffix = {"best": "suffix", "settings": {"suffix": {"device": "CPU", "max_ngram_size": 16}}}
    candidate = {"settings": {"device": "CPU", "max_ngram_size": 16, "engine": "native"}}
    assert charts.chosen({"candidates": [*candidates, candidate], "recommendation": suffix}) is candidate
    assert charts.chosen({"candidates": candidates}) is None


def test_recommended_draft_is_found_among_several_with_the_same_settings():
    drafts = [{"settings": {"draft_length": 4, "engine": "native"}, "throughput": value} for value in (20.0, 30.0)]
    best = {"draft_length": 4, "throughput": 30.0}
    recommendation = {"best": "native", "settings": {"native": best}}
    assert charts.chosen({"candidates": drafts, "recommendation": recommendation}) is drafts[1]


def test_axis_of_shares_ends_at_100_percent():
    assert charts.percent_axis("agreement", 1.0, 1.0).labels[-1] == "100"


def test_iteration_time_is_split_into_parts(draw, show):
    shown = show(draw({**MINIMAL, "iteration": PARTS["iteration"]}))
    width = {}
    for part in (1, 2, 3):
        bar = shown.locator(f"#iteration svg[role=img] > .part{part}")
        width[bar.locator("title").text_content()] = float(bar.get_attribute("width"))
    parts = ["draft 2.00 ms", "verify 6.00 ms", "overhead 0.50 ms"]
    assert list(width) == [f"ours, K = 4: {one}" for one in parts]
    draft, verify, overhead = width.values()
    assert verify / draft == pytest.approx(3, rel=0.01) and draft / overhead == pytest.approx(4, rel=0.02)
    fills = shown.eval_on_selector_all(
        "#iteration svg[role=img] > .part", "all => all.map(one => getComputedStyle(one).fill)"
    )
    assert len(set(fills)) == 3 and sum("url(" in fill for fill in fills) == 2  # patterns


def test_device_matrix_is_a_heat_map(draw, show):
    shown = show(draw({**MINIMAL, "matrix": PARTS["matrix"]}))
    cell = {}
    for row in shown.locator("#devices tbody tr").all():
        for name, one in zip(("none", "CPU", "GPU"), row.locator("td").all(), strict=True):
            cell[row.locator("th").inner_text(), name] = one
    assert cell["CPU", "none"].inner_text().split() == ["30.0"]
    assert cell["CPU", "CPU"].inner_text().split() == ["60.0", "2.00x"]
    assert cell["CPU", "GPU"].inner_text() == "absent [1]" and cell["GPU", "CPU"].inner_text() == "failed [2]"
    assert shown.locator("#devices li").all_inner_texts() == [
        NO_GPU, "the process was killed by signal 9",
    ]  # fmt: skip
    other = cell["GPU", "GPU"].inner_text()
    assert "0.80x, slower than alone" in other and "text differs from token 17" in other and "emulated" in other
    colours = [cell[name].evaluate("one => getComputedStyle(one).backgroundColor") for name in list(cell)[:2]]
    assert colours[0] != colours[1]
    best = shown.locator("#devices .best")
    assert best.count() == 1 and "60.0" in best.inner_text()  # an emulated cell is never the best


def test_tokens_differ_by_more_than_colour(draw, show):
    shown = show(draw({**MINIMAL, "token_view": TOKENS}))
    text = shown.locator("#tokens .text")
    assert text.text_content() == "def f(x):\n    return y\u21b5 x + 1\u21b5\n"
    style = "one => [getComputedStyle(one).textDecorationLine, Number(getComputedStyle(one).fontWeight) > 600]"
    looks = {name: text.locator(name).first.evaluate(style) for name in ("u", "del", "b")}
    assert looks == {"u": ["underline", False], "del": ["line-through", False], "b": ["none", True]}
    assert "3 draft tokens accepted, 2 rejected" in shown.inner_text("#tokens")


def test_candidates_are_plotted_by_speed_and_agreement(draw, show):
    shown = show(draw({**MINIMAL, "candidates": CANDIDATES, "recommendation": PARTS["recommendation"]}))
    titles = shown.locator("#candidates svg[role=img] > .marker > title").all_text_contents()
    assert titles == [
        "1: draft_length = 4, engine = ours: 60.0 tokens/s, agreement 99.0%",
        "2: draft_length = 2, engine = ours: 50.0 tokens/s, agreement 100.0%",
    ]
    assert "recommended: 1: draft_length = 4" in shown.inner_text("#candidates")
    assert "1 of 3" in shown.inner_text("#candidates") and "no such device" in shown.inner_text("#tables")


def test_page_is_accessible_to_screen_readers(draw, show):
    shown = show(draw(ALL))
    assert shown.get_attribute("html", "lang") == "en" and shown.locator("h1").count() == 1
    pictures = shown.locator("svg[role=img]")
    assert pictures.count() == 3 + 1 + 1 + 1  # speedup, acceptance, iteration, candidates
    for picture in pictures.all():
        names = picture.evaluate("one => [...one.children].slice(0, 2).map(part => part.tagName)")
        assert names == ["title", "desc"] and len(picture.get_attribute("aria-label")) > 20
        axes = picture.locator(".axis").all_text_contents()
        assert axes and all(re.search(r"\(.+\)", axis) for axis in axes), axes  # with units
    assert shown.locator("svg:not([role=img]):not([aria-hidden=true])").count() == 0
    assert shown.locator("table").count() == shown.locator("table > caption").count() > 5
    assert shown.locator("th:not([scope])").count() == 0


def test_benchmark_writes_a_page_of_its_results(run_here, show, tmp_path):
    page, saved, rows = (tmp_path / name for name in ("page.html", "result.json", "rows.csv"))
    process = run_here(
        "scripts/benchmark.py", DRAFT, DRAFT, "-k", "2,3", "--rounds", "1", "--max-prompts", "1", "--paths", "engine",
        "--max-new-tokens", "12", "--no-starts", "--html", page, "--json", saved, "--csv", rows,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = json.loads(saved.read_text(encoding="utf-8"))
    shown = show(page, PHONE)
    assert shown.evaluate("document.documentElement.scrollWidth") == PHONE
    assert {"speedup", "acceptance", "iteration", "tables", "environment"} <= sections(shown)
    words = shown.inner_text("body")
    assert all(sentence in words for sentence in result["summary"])
    for row in result["rows"]:
        assert f"{row['throughput']:.1f}" in shown.inner_text("#tables")
    with rows.open(encoding="utf-8", newline="") as file:
        assert [float(row["throughput"]) for row in csv.DictReader(file)] == [
            row["throughput"] for row in result["rows"]
        ]


@pytest.mark.parametrize(
    "part",
    [
        {"rows": [{**ROWS[1], "speedup": 0.0, "speedup_range": [0.0, 0.0], "position_acceptance": [0.0]}]},
        {"rows": [{**ROWS[1], "speedup": None, "speedup_range": None, "throughput": float("nan")}]},
        {"rows": [{**ROWS[3], "position_acceptance": [0.5] * 64}]},
        {"rows": [{**ROWS[1], "draft_length": k, "speedup": 100.0 * k, "speedup_range": None} for k in range(1, 65)]},
        {"iteration": [{"name": "x" * 200, "draft_ms": 0.0, "verify_ms": 0.0, "overhead_ms": 0.0}]},
        {"candidates": [{**CANDIDATES[0], "settings": {}, "agreement": 1.0}]},
        {"categories": [{"category": "", "name": "x", "speedup": 0.0, "acceptance_rate": None}]},
        {"token_view": {"prompt": "", "steps": []}},
        {"matrix": {"main_devices": ["CPU"], "draft_devices": ["none"], "cells": []}},
    ],
    ids=lambda part: next(iter(part)),
)
def test_extreme_values_are_drawn_inside_the_charts(draw, show, part):
    page = draw({**MINIMAL, **part})
    shown = show(page, PHONE)
    assert shown.evaluate(BEYOND) == [] and "nan" not in page.read_text(encoding="utf-8")
    outside = """all => all.filter(one => {
        const [a, b] = [one, one.closest('svg')].map(some => some.getBoundingClientRect());
        return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
    }).map(one => one.outerHTML)"""
    assert shown.eval_on_selector_all("svg[role=img] > :not(title, desc)", outside) == []


# ---- the command, CSV and PNG: without a browser --------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "docs/figures").glob("*.json")), ids=lambda file: file.stem)
def test_recorded_result_of_every_program_is_drawn(file):
    result = saved_result.read(file)
    if "program" not in result:
        pytest.skip("this program's results are not drawn")
    page = html.unescape(html_text(result)).replace("\u00a0", " ")
    assert all(part.get("source", "") in page for part in result.get("categories", []))


def test_capacity_plan_is_drawn():
    row = {"rate": 5.0, "replicas": 2, "with_draft": True, "ttft": 0.2, "tpot": 0.01, "throughput": 640.0}
    page = html_text({"program": "plan_capacity.py", "summary": ["2 replicas."], "environment": {}, "rows": [row]})
    assert "5 requests/s, 2 replicas, with the draft" in page


def test_last_line_of_saved_output_is_read(run, tmp_path):
    saved = tmp_path / "output.txt"
    saved.write_text(f"way   speedup\nours  2.0\n{json.dumps({**MINIMAL, 'rows': ROWS})}\n", encoding="utf-8")
    files = [tmp_path / name for name in ("page.html", "rows.csv", "speedup.png")]
    process = run("scripts/report.py", saved, *files)
    assert process.returncode == 0 and process.stdout.splitlines() == [str(file) for file in files]
    assert "2.00x" in files[0].read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt", "page.html", "rows.csv", "speedup.png"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_output_saved_by_windows_powershell_is_read(encoding, tmp_path):
    saved = tmp_path / "output.txt"
    saved.write_text(f"a table\n{json.dumps(MINIMAL)}\n", encoding)
    assert saved_result.read(saved) == MINIMAL


def test_load_results_of_earlier_versions_are_read(run_here, tmp_path):
    recorded = json.loads((ROOT / "docs/figures/server-embedded.json").read_text(encoding="utf-8"))["result"]
    for name, key in (("present", "method"), ("former", "way")):
        content = json.dumps(recorded).replace('"method"', f'"{key}"')
        (tmp_path / f"{name}.json").write_text(content, encoding="utf-8")
        assert run_here("scripts/report.py", tmp_path / f"{name}.json", tmp_path / f"{name}.csv").returncode == 0
    assert (tmp_path / "former.csv").read_bytes() == (tmp_path / "present.csv").read_bytes()


@pytest.mark.parametrize(
    ("content", "file", "status", "word"),
    [
        (None, "page.html", 2, "result.json"),
        (b"\xff\xfe", "page.html", 2, "a file written by --json"),
        (b'{"summary": 1}', "page.html", 2, "a file written by --json"),
        (b'{"ok": true, "greedy": []}', "page.html", 2, "has no keys 'program' and 'summary', so it cannot be drawn"),
        (json.dumps(MINIMAL).encode(), "page.pdf", 2, ".html"),
        (json.dumps(MINIMAL).encode(), "no/folder/page.html", 2, "no/folder"),
        (json.dumps(MINIMAL).encode(), "speedup.png", 1, "draft length"),
        (json.dumps({**MINIMAL, "rows": 5}).encode(), "page.html", 1, "cannot be drawn"),
    ],
)
def test_bad_input_gives_one_sentence_error(run_here, tmp_path, content, file, status, word):
    saved = tmp_path / "result.json"
    if content is not None:
        saved.write_bytes(content)
    process = run_here("scripts/report.py", saved, tmp_path / file)
    assert process.returncode == status, process.stderr
    assert word in process.stderr and "Traceback" not in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == (["result.json"] if content is not None else [])


@pytest.mark.posix("a limit on the size of files stands for a full disk")
def test_full_disk_keeps_the_old_page(tmp_path):
    saved, page = tmp_path / "result.json", tmp_path / "page.html"
    saved.write_text(json.dumps(ALL), encoding="utf-8")
    page.write_text("the old page", encoding="utf-8")
    limited = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "runpy.run_path('scripts/report.py', run_name='__main__')\n"
    )
    process = subprocess.run(
        [sys.executable, "-B", "-c", limited, saved, page], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=100
    )
    assert process.returncode == 1 and "page.html was not written: File too large" in process.stderr
    assert page.read_text(encoding="utf-8") == "the old page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "result.json"]


def test_csv_flattens_nested_values_and_escapes_formulas(run_here, tmp_path):
    saved, rows = tmp_path / "result.json", tmp_path / "rows.csv"
    tricky = {**CANDIDATES[1], "settings": {"device": "=HYPERLINK(1)", "K": -1}, "note": 'comma, "quote"\nline'}
    saved.write_text(json.dumps({**MINIMAL, "candidates": [CANDIDATES[0], tricky]}), encoding="utf-8")
    assert run_here("scripts/report.py", saved, rows).returncode == 0
    one, two = csv.DictReader(io.StringIO(rows.read_bytes().decode(), newline=""))
    assert (one["settings.draft_length"], one["spread"], one["dropped_in_round"]) == ("4", "1.9 2.1", "")
    assert (two["settings.device"], two["settings.K"], two["note"]) == ("'=HYPERLINK(1)", "-1", tricky["note"])


def test_png_has_one_panel_per_temperature(run_here, tmp_path):
    sizes = []
    for temperatures in ((0,), (0, 0.7, 1)):
        saved, plot = tmp_path / "result.json", tmp_path / "speedup.png"
        points = [point for point in SWEEP if point["temperature"] in temperatures]
        saved.write_text(json.dumps({**MINIMAL, "sweep": points}), encoding="utf-8")
        assert run_here("scripts/report.py", saved, plot).returncode == 0
        data = plot.read_bytes()
        assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82") and len(data) > 10_000
        sizes.append(struct.unpack(">II", data[16:24]))
    assert sizes[0][0] < sizes[1][0] and sizes[0][1] == sizes[1][1]
