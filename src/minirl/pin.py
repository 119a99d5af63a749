"""The pinned verl: where its source lies, and how a symbol of it is found without importing it.

in: a version, or a spec `verl.module:Qual.name` or `minirl.module:Qual.name` -> out: a folder, a `Symbol`.
Nothing here imports verl; `use_verl` only makes it importable.
"""

import ast
import hashlib
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PIN = "0.8.0"
LATER = "0.9.1"

_SRC = Path(__file__).resolve().parent.parent
_REPO = _SRC.parent
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Symbol:
    """A named piece of source. Lines are 1-based; `start` is the first decorator, `end` is inclusive."""

    spec: str
    version: str | None  # None for minirl's own symbols
    path: Path
    file: str  # relative to the folder on sys.path, e.g. "verl/protocol.py"
    start: int
    end: int
    lines: tuple[str, ...]
    sha: str  # first 16 hex digits of the sha256 of the lines


def verl_root(version: str = PIN) -> Path:
    """The folder holding this version's package `verl`: `$MINIRL_VERL_DIR/<version>` or `.verl/<version>`."""
    places = [_REPO / ".verl", Path.cwd() / ".verl"]
    if os.environ.get("MINIRL_VERL_DIR"):
        places.insert(0, Path(os.environ["MINIRL_VERL_DIR"]))
    for place in places:
        if (place / version / "verl" / "protocol.py").is_file():
            return place / version
    raise ValueError(
        f"verl {version} is not installed under .verl/{version}: run `make setup` (or set MINIRL_VERL_DIR)"
    )


def use_verl(version: str = PIN) -> Path:
    """Make `import verl` find this version; appended, as the wheel also has top-level `tests`, `scripts`."""
    root = verl_root(version)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return root


def find_symbol(spec: str, version: str = PIN) -> Symbol:
    """Find `module:Qual.name` in the source by its syntax tree: a function, class, method or assigned name.

    Raises ValueError that names the part which does not exist.
    """
    module, sep, qualname = spec.partition(":")
    if not (sep and module and qualname):
        raise ValueError(f"symbol {spec!r}: write it as 'package.module:Qual.name'")
    own = module.split(".")[0] == "minirl"
    root = _SRC if own else verl_root(version)
    path = _module_path(root, module)
    if path is None:
        raise ValueError(f"symbol {spec!r}: no module {module} in {'minirl' if own else 'verl ' + version}")
    lines, tree = _parse(path, path.stat().st_mtime_ns)

    node: ast.AST = tree
    for name in qualname.split("."):
        found = _member(node, name)
        if found is None:
            raise ValueError(f"symbol {spec!r}: no {name!r} in {path.relative_to(root)}")
        node = found
    decorators = node.decorator_list if isinstance(node, _DEFINITIONS) else []
    start = min([node.lineno, *(d.lineno for d in decorators)])
    shown = lines[start - 1 : node.end_lineno]
    sha = hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]
    file = str(path.relative_to(root))
    return Symbol(spec, None if own else version, path, file, start, node.end_lineno, tuple(shown), sha)


def _module_path(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=256)
def _parse(path: Path, _mtime: int) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.split("\n"), ast.parse(text)


def _member(scope: ast.AST, name: str) -> ast.stmt | None:
    """The first statement of this scope that binds `name`; looks inside if/try/with, not into definitions."""
    for node in _statements(scope):
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
    return None


def _statements(scope: ast.AST):
    for block in ("body", "orelse", "finalbody", "handlers"):
        for node in getattr(scope, block, []):
            if not isinstance(node, ast.ExceptHandler):
                yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.ExceptHandler):
                yield from _statements(node)
