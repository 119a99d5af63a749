"""The directives `{metric-table}`, `{config-table}`, `{glossary-table}`, `{notebook-costs}`: tables of data/.

in: data/metrics.yml, config_keys.yml, glossary.yml, notebook_costs.json -> out: tables, checked row by row.
A config key's default is read from the pin's own yaml; a symbol or key that is not there stops the build.
"""

import json
from functools import lru_cache
from html import escape
from pathlib import Path

import yaml
from book_directive import BookDirective
from course import load_course
from docutils import nodes
from html_part import doc_link, may_break, part, raw
from ledger_table import symbol_link

from minirl.pin import PIN, verl_root

DEFAULTS = "verl/trainer/config/_generated_ppo_trainer.yaml"


@lru_cache(maxsize=2)
def defaults(version: str = PIN) -> dict:
    return yaml.safe_load((verl_root(version) / DEFAULTS).read_text(encoding="utf-8"))


def default_of(key: str):
    """The value at a dotted key in the pin's yaml. Raises KeyError with the part that is not there."""
    value = defaults()
    for i, name in enumerate(key.split(".")):
        if not isinstance(value, dict) or name not in value:
            raise KeyError(".".join(key.split(".")[: i + 1]))
        value = value[name]
    return value


class DataTable(BookDirective):
    """A table whose rows come from a YAML list; subclasses say which file, which fields, which cells."""

    file = ""
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    label = ""

    def build(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "data" / self.file
        if not path.is_file():
            raise ValueError(f"data/{self.file} is not there")
        self.env.note_dependency(str(path))
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = part("table", raw(f"<thead><tr>{_cells(self.head, 'col')}</tr></thead>"))
        body = part("tbody")
        for number, row in enumerate(rows, 1):
            body += self._checked(number, row)
        table += body
        return [part("div", table, class_="wide-table", tabindex="0", role="region", aria_label=self.label)]

    def _checked(self, number: int, row: dict) -> nodes.Node:
        where = f"data/{self.file}: row {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is not a mapping")
        where += f" ({row.get(self.fields[0])})"
        wrong = (set(self.fields) - set(self.optional) - set(row)) | (set(row) - set(self.fields))
        if wrong:
            raise ValueError(f"{where}: missing or unknown fields {', '.join(sorted(wrong))}")
        try:
            return self.row(row)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error

    def row(self, row: dict) -> nodes.Node:
        raise NotImplementedError

    def words(self, text: str) -> nodes.Node:
        return part("td", *self.phrase(text), class_="plain")

    def chapter(self, stem: str | None) -> nodes.Node:
        """A link to a chapter by its stem, its title alone while it is not in the book."""
        if not stem:
            return part("td")
        found = [c for c in load_course(Path(self.env.srcdir)) if c.stem == stem]
        if not found:
            raise ValueError(f"no chapter {stem!r} in data/routes.yml")
        if found[0].page not in self.env.found_docs:
            return part("td", found[0].title)
        return part("td", doc_link(found[0].page, found[0].title, from_doc=self.env.docname))


class MetricTable(DataTable):
    file, label = "metrics.yml", "指标表"
    fields = ("key", "formula", "symbol", "healthy", "bad", "chapter")
    optional = ("chapter",)
    head = ("指标", "怎么算", "正常的样子", "不正常时", "verl 符号", "章节")

    def row(self, row: dict) -> nodes.Node:
        name = raw(f'<th scope="row"><code>{may_break(escape(row["key"]), after="/,")}</code></th>')
        symbol = raw(f"<td>{symbol_link(row['symbol'])}</td>")
        return part(
            "tr", name, self.words(row["formula"]), self.words(row["healthy"]), self.words(row["bad"]),
            symbol, self.chapter(row.get("chapter")), id=f"metric-{row['key']}",
        )  # fmt: skip


class ConfigTable(DataTable):
    file, label = "config_keys.yml", "配置表"
    fields = ("key", "reader", "unit", "note", "chapter")
    optional = ("unit", "note", "chapter")
    head = ("配置", "说明", f"默认值（{PIN}）", "单位", "谁用它", "章节")

    def row(self, row: dict) -> nodes.Node:
        value = json.dumps(default_of(row["key"]), ensure_ascii=False)
        reader = row["reader"]
        used = raw(f"<td>{symbol_link(reader)}</td>") if ":" in reader else self.words(reader)
        name = raw(f'<th scope="row"><code>{may_break(escape(row["key"]))}</code></th>')
        default = raw(f"<td{' class=long' * (len(value) > 24)}><code>{escape(value)}</code></td>")
        return part(
            "tr", name, self.words(row.get("note", "")), default, part("td", row.get("unit", "")), used,
            self.chapter(row.get("chapter")), id=f"config-{row['key']}",
        )  # fmt: skip


class GlossaryTable(DataTable):
    file, label = "glossary.yml", "术语表"
    fields = ("zh", "en", "text", "chapter")
    optional = ("chapter",)
    head = ("中文", "英文", "一句话", "章节")

    def row(self, row: dict) -> nodes.Node:
        name = raw(f'<th scope="row">{escape(row["zh"])}</th>')
        ident = "term-" + "".join(c if c.isalnum() else "-" for c in row["en"].lower())
        return part(
            "tr",
            name,
            part("td", row["en"]),
            self.words(row["text"]),
            self.chapter(row.get("chapter")),
            id=ident,
        )


class NotebookCosts(BookDirective):
    """{machine: text, notebooks: {stem: {seconds: s, peak_mib: m}}} as a table; nothing if not measured."""

    def build(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "data" / "notebook_costs.json"
        if not path.is_file():
            return []
        self.env.note_dependency(str(path))
        costs = json.loads(path.read_text(encoding="utf-8"))
        body = part("tbody")
        for stem, cost in costs["notebooks"].items():
            docname = f"notebooks/{stem}"
            known = docname in self.env.found_docs
            name = doc_link(docname, stem, from_doc=self.env.docname) if known else nodes.Text(stem)
            body += part(
                "tr", part("th", name, scope="row"), part("td", f"{cost['seconds']:.0f} 秒", class_="num"),
                part("td", f"{cost['peak_mib']:.0f} MiB", class_="num"),
            )  # fmt: skip
        head = raw(f"<thead><tr>{_cells(('笔记本', '用时', '内存峰值'), 'col')}</tr></thead>")
        table = part("table", raw(f"<caption>{escape(costs['machine'])}</caption>"), head, body)
        return [part("div", table, class_="wide-table", tabindex="0", role="region", aria_label="笔记本用时")]


def _cells(names: tuple[str, ...], scope: str) -> str:
    return "".join(f'<th scope="{scope}">{escape(name)}</th>' for name in names)


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("metric-table", MetricTable)
    app.add_directive("config-table", ConfigTable)
    app.add_directive("glossary-table", GlossaryTable)
    app.add_directive("notebook-costs", NotebookCosts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
