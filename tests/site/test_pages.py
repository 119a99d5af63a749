"""Every page: nothing asked outside, no error, no overflow, light, accessible, no English left."""

import gzip
import re
from pathlib import Path

import pytest
from built_site import HTML, ROOT, pages
from fontTools.ttLib import TTFont

pytestmark = pytest.mark.site

BUDGET_KB = 250
AXE = ROOT / ".cache" / "node" / "node_modules" / "axe-core" / "axe.min.js"
ENGLISH = re.compile(
    r"^(Toggle|Download|Print|Show|Hide|Search|Skip|Back|Link|Permalink|Copy|Click|previous|next)\b", re.I
)


def watch(page) -> dict[str, list]:
    """What a page does wrong while it loads."""
    seen = {"outside": [], "failed": [], "errors": [], "bytes": []}

    def request(sent):
        if not sent.url.startswith(("http://127.0.0.1", "file:", "data:", "blob:")):
            seen["outside"].append(sent.url)

    page.on("request", request)
    # a request that the next page cuts short has not failed
    page.on(
        "requestfailed",
        lambda lost: seen["failed"].append(lost.url) if lost.failure != "net::ERR_ABORTED" else None,
    )
    page.on("response", lambda got: seen["failed"].append(got.url) if got.status >= 400 else None)
    page.on("console", lambda said: seen["errors"].append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    return seen


def test_the_book_has_pages(built):
    assert "book/index.html" in pages() and len(pages()) > 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_no_page_overflows_or_asks_outside_or_throws(browser, address, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    page = context.new_page()
    problems = []
    for name in pages():
        seen = watch(page)
        page.goto(f"{address}/{name}")
        over = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        theme = page.evaluate("document.documentElement.dataset.theme")
        if over > 0:
            problems.append(f"{name}: {over} px wider than the window")
        if theme != scheme:
            problems.append(f"{name}: shown {theme}, the system asks for {scheme}")
        problems += [
            f"{name}: {kind}: {seen[kind]}" for kind in ("outside", "failed", "errors") if seen[kind]
        ]
    context.close()
    assert not problems, "\n".join(problems)


def test_on_a_desktop_a_reference_table_shows_all_its_columns(browser, address):
    page = browser.new_page(viewport={"width": 1400, "height": 850})
    over = "[...document.querySelectorAll('.wide-table')].map(table => table.scrollWidth - table.clientWidth)"
    tools = [name for name in pages() if name.startswith("book/tools/")]
    assert len(tools) >= 4
    for name in tools:
        page.goto(f"{address}/{name}")
        widths = page.evaluate(over)
        assert widths and max(widths) <= 0, f"{name}: columns cut off: {widths}"
    page.close()


def test_the_icon_font_has_every_icon_that_the_styles_name(built):
    static = built / "_static"
    sheets = [sheet.read_text(encoding="utf-8") for sheet in static.rglob("*.css")]
    named = {int(code, 16) for text in sheets for code in re.findall(r'"\\([ef][0-9a-f]{3})"', text)}
    named |= {ord(char) for text in sheets for char in re.findall("[\ue000-\uf8ff]", text)}
    fonts = [TTFont(path) for path in (static / "vendor" / "fontawesome" / "webfonts").glob("*.ttf")]
    missing = named - {code for font in fonts for code in font.getBestCmap()}
    assert named and not missing, sorted(map(hex, missing))


def test_on_a_phone_every_cell_of_a_table_with_sentences_is_in_sight(browser, address):
    context = browser.new_context(viewport={"width": 390, "height": 850})
    page = context.new_page()
    hidden = """cells => cells.filter(cell => cell.textContent.trim()
        && (cell.getBoundingClientRect().right > innerWidth
            || (cell.scrollWidth > cell.clientWidth + 1 && !cell.querySelector(".katex"))))
        .map(cell => cell.textContent.trim().slice(0, 40))"""
    stacked, problems = 0, []
    for name in pages():
        page.goto(f"{address}/{name}")
        cells = page.locator("table.stack > tbody > tr > :is(td, th)")
        stacked += cells.count()
        problems += [f"{name}: {text}" for text in cells.evaluate_all(hidden)]
    context.close()
    assert stacked and not problems, "\n".join(problems)


def test_a_page_opens_as_a_file_without_errors(page, built):
    seen = watch(page)
    page.goto((built / "book" / "index.html").as_uri())
    assert page.locator("h1").first.inner_text().startswith("学习路线")
    assert not seen["outside"] and not seen["failed"] and not seen["errors"], seen


def test_a_dark_page_has_a_dark_background_and_light_text(browser, address):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(f"{address}/book/index.html")
    lightness = (
        "e => { const [r, g, b] = getComputedStyle(e)[%r].match(/[\\d.]+/g); return (+r + +g + +b) / 3 }"
    )
    assert page.locator("body").evaluate(lightness % "backgroundColor") < 60
    assert page.locator(".bd-article p").first.evaluate(lightness % "color") > 150
    context.close()


def first_load_kb(name: str, browser, address: str) -> float:
    """What a first visit transfers from a server that compresses text: fonts and images as they are."""
    context = browser.new_context()
    page = context.new_page()
    total = 0

    def count(response):
        nonlocal total
        body = response.body()
        kind = response.headers.get("content-type", "")
        text = kind.startswith("image/svg")  # plots are SVG: text, which a server compresses
        packed = kind.startswith(("image/", "font/")) or response.url.endswith((".woff2", ".png"))
        packed = packed and not text
        total += len(body) if packed else len(gzip.compress(body, 6))

    responses = []
    page.on("response", lambda response: responses.append(response))
    page.goto(f"{address}/{name}", wait_until="load")
    for response in responses:
        count(response)
    context.close()
    return total / 1024


def test_first_load_stays_within_the_budget(browser, address):
    sizes = {name: first_load_kb(name, browser, address) for name in pages()}
    heavy = {name: round(size) for name, size in sizes.items() if size > BUDGET_KB}
    assert not heavy, f"over {BUDGET_KB} KB: {heavy}"


KINDS = (
    "book/index.html",
    "book/week1/day4_grpo.html",
    "notebooks/day6a_reward.html",
    "book/tools/glossary.html",
)


@pytest.mark.parametrize("which", [KINDS, pytest.param(None, marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_axe_finds_nothing_serious(browser, address, which):
    """One page of each kind, in both modes; all pages by `make test-slow`: axe is slow on large ones."""
    if not AXE.is_file():
        pytest.fail(f"{AXE.relative_to(ROOT)} is missing: run `make test` or the npm line of the Makefile")
    script = AXE.read_text(encoding="utf-8")
    problems = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1400, "height": 900})
        page = context.new_page()
        for name in which or pages():
            page.goto(f"{address}/{name}")
            page.wait_for_timeout(200)  # colours that fade in are measured when they have arrived
            page.evaluate(script)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
            for rule in found:
                if rule["impact"] in ("serious", "critical"):
                    where = rule["nodes"][0]["html"][:140]
                    problems.append(f"{name} ({scheme}): {rule['id']} × {len(rule['nodes'])}: {where}")
        context.close()
    assert not problems, "\n".join(problems)


def test_no_string_of_the_theme_is_left_in_english(page, address):
    left = set()
    for name in pages()[:6]:
        page.goto(f"{address}/{name}")
        shown = page.evaluate(
            """[...document.querySelectorAll("*")].flatMap((e) =>
                 ["title", "aria-label", "placeholder"].map((a) => e.getAttribute(a)).filter(Boolean))"""
        )
        left |= {text for text in shown if ENGLISH.match(text)}
    assert not left, left


def test_every_local_link_leads_to_a_file_and_an_anchor(built):
    ids, broken = {}, []
    link = re.compile(r'<a\b[^>]*?\bhref="([^"]*)"')

    def anchors(path: Path) -> set[str]:
        if path not in ids:
            ids[path] = set(re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")))
        return ids[path]

    for name in pages():
        here = HTML / name
        for href in set(link.findall(here.read_text(encoding="utf-8"))):
            if re.match(r"(https?:|mailto:|javascript:|data:)", href):
                continue
            target, _, anchor = href.partition("#")
            path = (here.parent / target.split("?")[0]).resolve() if target else here
            if not path.is_file():
                broken.append(f"{name}: {href}: no such file")
            elif anchor and path.suffix == ".html" and anchor not in anchors(path):
                broken.append(f"{name}: {href}: no such anchor")
    assert not broken, "\n".join(broken)


def test_every_page_names_the_pins_and_the_device(built):
    for name in pages():
        text = (HTML / name).read_text(encoding="utf-8")
        assert re.search(r'class="pins">.*verl 0\.8\.0.*笔记本运行于.*构建于 \d{4}-\d\d-\d\d', text), name


def test_a_notebook_page_offers_its_notebook(built):
    notebooks = [name for name in pages() if name.startswith("notebooks/")]
    assert notebooks, "no notebook is in the book"
    for name in notebooks:
        text = (HTML / name).read_text(encoding="utf-8")
        source = f"_sources/{name.removesuffix('.html')}.ipynb"
        assert f"../{source}" in text and (HTML / source).is_file(), name


def test_pages_carry_no_thebe_and_no_katex_script(built):
    for name in pages():
        text = (HTML / name).read_text(encoding="utf-8")
        assert not re.search(r"thebe|katex\.min\.js|mathjax\.js|MathJax-script", text), name
