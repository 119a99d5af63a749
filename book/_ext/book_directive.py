"""The base of our directives: mistakes on pages stop the build, as one list, once all pages are read.

in: a directive that raises ValueError -> out: `page:line: {name} message`, all of them in one ExtensionError.
Nothing is written and no page is remembered as read, so the next build meets the same mistakes again.
"""

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective


class BookDirective(SphinxDirective):
    """Subclasses write `build`; a ValueError from it is a mistake on the page."""

    def run(self) -> list[nodes.Node]:
        try:
            return self.build()
        except ValueError as error:
            page = self.env.doc2path(self.env.docname, base=False)
            self.env.app.book_mistakes.append(f"{page}:{self.lineno}: {{{self.name}}} {error}")
            return []

    def build(self) -> list[nodes.Node]:
        raise NotImplementedError

    def phrase(self, text: str) -> list[nodes.Node]:
        """Markdown of one paragraph, without the paragraph: it goes into a label, a cell or a list entry."""
        parsed = self.parse_text_to_nodes(str(text))
        single = len(parsed) == 1 and isinstance(parsed[0], nodes.paragraph)
        return parsed[0].children if single else parsed


def stop_on_mistakes(app, env) -> None:
    if app.book_mistakes:
        raise ExtensionError("\n".join(app.book_mistakes))


def setup(app):
    app.book_mistakes = []
    app.connect("env-updated", stop_on_mistakes)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
