"""Where the built site lies and which pages it has; makes the book's extensions importable for the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
EXTENSIONS = ROOT / "book" / "_ext"
if str(EXTENSIONS) not in sys.path:
    sys.path.insert(0, str(EXTENSIONS))


def pages() -> list[str]:
    """Every page of the book, as paths under the site's root; known only once it is built."""
    found = [*HTML.glob("book/**/*.html"), *HTML.glob("notebooks/*.html")]
    return sorted(path.relative_to(HTML).as_posix() for path in found)
