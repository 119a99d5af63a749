"""Chinese search: Sphinx's own index with runs of Chinese split into overlapping pairs.

in: page text, and in the browser the query -> out: index terms. 优势函数 -> 优势 势函 函数, all on one page.
Latin words, names with underscores and their parts (old_log_probs -> old, log, probs) stay words.
"""

import re

from sphinx.search import SearchLanguage

_TOKEN = re.compile(r"[\u3400-\u9fff]+|[A-Za-z0-9_]+")

_SPLIT_IN_BROWSER = r"""
function splitQuery(query) {
  const terms = [];
  for (const run of query.match(/[\u3400-\u9fff]+|[A-Za-z0-9_]+/g) || []) {
    if (!/[\u3400-\u9fff]/.test(run)) { terms.push(run); continue; }
    if (run.length === 1) { terms.push(run); continue; }
    for (let i = 0; i + 1 < run.length; i++) terms.push(run.slice(i, i + 2));
  }
  return terms;
}
"""


class BigramSearch(SearchLanguage):
    lang = "zh_CN"
    language_name = "Chinese"
    js_splitter_code = _SPLIT_IN_BROWSER
    js_stemmer_code = "var Stemmer = function () { this.stemWord = (word) => word; };"
    stopwords = frozenset()

    def split(self, text: str) -> list[str]:
        terms = []
        for run in _TOKEN.findall(text):
            if "\u3400" <= run[0] <= "\u9fff":
                terms += [run[i : i + 2] for i in range(len(run) - 1)] or [run]
            else:
                terms.append(run)
                terms += [piece for piece in run.split("_") if piece and piece != run]
        return terms

    def stem(self, word: str) -> str:
        return word.lower()

    def word_filter(self, word: str) -> bool:
        return len(word) > 1 or "\u3400" <= word <= "\u9fff"


def setup(app):
    app.add_search_language(BigramSearch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
