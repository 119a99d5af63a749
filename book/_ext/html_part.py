"""A doctree node that writes an HTML opening and closing around its children.

in: strings of HTML and child nodes -> out: the same HTML in the page, nothing in other builders.
Lets a directive keep real nodes (links, math, code) inside hand-written markup. No verl counterpart.
"""

import re
from html import escape

from docutils import nodes
from sphinx import addnodes


class HtmlPart(nodes.General, nodes.TextElement):
    """Attributes `open` and `close` are escaped HTML. A TextElement, since a link must stand in one."""


def part(tag: str, *children: nodes.Node | str, **attributes: str | bool | None) -> HtmlPart:
    """An element; `class_` and `for_` lose their underscore, other underscores become hyphens.

    A string child is text (escaped). An attribute that is None or False is left out; True stands bare.
    """
    shown = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        shown.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    node = HtmlPart("", "", open=f"<{tag}{''.join(shown)}>", close=f"</{tag}>")
    node += [nodes.Text(child) if isinstance(child, str) else child for child in children]
    return node


def may_break(escaped: str, after: str = ".") -> str:
    """A long name in a table may break after any of these characters, and nowhere else.

    Underscores that begin or end a name stay with it: RayPPOTrainer.|_balance_|batch, but __getitem__.
    """
    return re.sub(rf"(?<![._])([{re.escape(after)}])(?!(?<=_)_|$)", r"\1<wbr>", escaped)


def raw(html: str) -> nodes.raw:
    return nodes.raw("", html, format="html")


def doc_link(docname: str, *children: nodes.Node | str, from_doc: str) -> addnodes.pending_xref:
    """A link to another page that Sphinx resolves and checks."""
    inner = nodes.inline("", "", *[nodes.Text(c) if isinstance(c, str) else c for c in children])
    return addnodes.pending_xref(
        "", inner, refdomain="std", reftype="doc", reftarget="/" + docname, refexplicit=True, refdoc=from_doc,
        refwarn=True,
    )  # fmt: skip


def label_link(docname: str, label: str, *children: nodes.Node, from_doc: str) -> addnodes.pending_xref:
    """A link to `(label)=` on another page that keeps its markup; a missing one is a warning."""
    inner = nodes.inline("", "", *children)
    return addnodes.pending_xref(
        "", inner, refdomain="doc", reftype="myst", reftarget=docname, reftargetid=label, refexplicit=True,
        refdoc=from_doc,
    )  # fmt: skip


def _visit(self, node: HtmlPart) -> None:
    self.body.append(node["open"])


def _depart(self, node: HtmlPart) -> None:
    self.body.append(node["close"])


def _nothing(self, node: HtmlPart) -> None:
    pass


def setup(app):
    others = {builder: (_nothing, _nothing) for builder in ("latex", "text", "man", "texinfo")}
    app.add_node(HtmlPart, html=(_visit, _depart), **others)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
