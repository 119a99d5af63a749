"""Search answers in Chinese, in parts of names, offline and as a file."""

import time

import pytest

pytestmark = pytest.mark.site


def results(page, root: str, query: str) -> list[str]:
    page.goto(f"{root}/search.html?q={query}")
    page.wait_for_function(
        "document.querySelector('#search-results h2, #search-results p.search-summary')?.textContent"
    )
    page.wait_for_timeout(300)
    return page.locator("#search-results ul.search li > a").evaluate_all("links => links.map((a) => a.href)")


@pytest.mark.parametrize("query", ["优势函数", "奖励函数", "old_log_probs", "对数概率"])
def test_a_query_finds_the_pages_that_have_the_words(page, address, built, query):
    found = results(page, address, query)
    assert found, query
    for href in found:
        path = built / href.split("#")[0].split("?")[0].removeprefix(f"{address}/")
        text = path.read_text(encoding="utf-8").lower()
        pairs = [query[i : i + 2] for i in range(len(query) - 1)] if ord(query[0]) > 0x3400 else [query]
        assert all(pair in text for pair in pairs), (query, href)


def test_a_word_that_stands_nowhere_finds_nothing(page, address):
    assert results(page, address, "鲲鹏展翅") == []


def test_part_of_a_key_finds_it(page, address):
    assert results(page, address, "probs")


def test_search_works_on_a_page_opened_as_a_file(page, built):
    assert results(page, built.as_uri(), "优势函数")


def test_the_index_answers_within_200_ms(page, address):
    results(page, address, "优势函数")
    start = time.perf_counter()
    page.evaluate("Search.performSearch('优势函数')")
    assert time.perf_counter() - start < 0.2
