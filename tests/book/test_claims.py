"""Every claim of book/**/*.claims.yml: its symbol exists, its texts stand there, its test exists."""

import ast
from functools import lru_cache

import pytest
import yaml
from built_site import ROOT
from quiz_schema import load_quiz

from minirl.pin import find_symbol

FILES = sorted((ROOT / "book").rglob("*.claims.yml"))
CLAIMS = [
    (path.name.split(".")[0], claim) for path in FILES for claim in yaml.safe_load(path.read_text("utf-8"))
]
FIELDS = {"source": {"contains"}, "run": {"by"}, "eye": set()}


def name(value) -> str:
    return value if isinstance(value, str) else value["claim"][:24]


@pytest.mark.parametrize(("stem", "claim"), CLAIMS, ids=name)
def test_claim_holds(stem, claim):
    assert claim["check"] in FIELDS, f"check: {claim['check']!r}"
    assert FIELDS[claim["check"]] <= set(claim), f"check {claim['check']} needs {FIELDS[claim['check']]}"
    symbol = find_symbol(claim["symbol"])
    source = "\n".join(symbol.lines)
    for text in claim.get("contains", []):
        assert text in source, f"{claim['symbol']} does not contain {text!r}"
    if claim["check"] == "run":
        assert named_test_exists(claim["by"]), f"by: {claim['by']} does not exist"


def named_test_exists(by: str) -> bool:
    """`quiz:<id>` of the same book, or `tests/file.py::test_name[...]`."""
    if by.startswith("quiz:"):
        return by.removeprefix("quiz:") in quiz_ids()
    path, _, function = by.partition("::")
    file = ROOT / path
    return file.is_file() and function.split("[")[0] in functions(file)


@lru_cache
def quiz_ids() -> frozenset[str]:
    quizzes = [load_quiz(path) for path in (ROOT / "data" / "quiz").glob("*.yml")]
    return frozenset(question.id for quiz in quizzes for question in quiz.questions)


@lru_cache
def functions(path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_chapter_has_claims():
    chapters = {path.stem for path in (ROOT / "book").glob("week*/*.md")}
    assert chapters == {path.name.split(".")[0] for path in FILES}
