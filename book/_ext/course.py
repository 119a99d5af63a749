"""The course as data: the rows of the two routes, and which of their pages exist.

in: data/routes.yml, the `{chapter}` heads of the pages, data/quiz/*.yml -> out: `Chapter`s.
A chapter that has no page yet is shown as 编写中; nothing is a stub. No Sphinx here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from quiz_schema import Quiz, load_quiz

_HEAD = re.compile(r"^```\{chapter\}[ \t]*\n(.*?)^```", re.S | re.M)
_OPTION = re.compile(r"^:(\w+):[ \t]*(.*)$", re.M)


@dataclass(frozen=True)
class Chapter:
    stem: str
    week: int
    day: str
    title: str
    learn: str
    outcome: str
    page: str | None  # docname, None while it is being written
    notebook: str | None
    minutes: str | None
    stations: tuple[str, ...]
    quiz: Quiz | None


def load_course(root: Path) -> list[Chapter]:
    """Raises ValueError naming the row of data/routes.yml that lacks a field."""
    rows = yaml.safe_load((root / "data" / "routes.yml").read_text(encoding="utf-8"))
    return [_chapter(root, week, row) for week, key in ((1, "week1"), (2, "week2")) for row in rows[key]]


def _chapter(root: Path, week: int, row: dict) -> Chapter:
    missing = {"stem", "title", "learn", "outcome"} - set(row)
    if missing:
        raise ValueError(f"data/routes.yml: row {row.get('stem')}: lacks {', '.join(sorted(missing))}")
    stem = row["stem"]
    page = root / "book" / f"week{week}" / f"{stem}.md"
    notebook = root / "notebooks" / f"{stem}.ipynb"
    quiz = root / "data" / "quiz" / f"{stem}.yml"
    head = chapter_head(page) if page.is_file() else {}
    return Chapter(
        stem=stem,
        week=week,
        day=row.get("day", ""),
        title=row["title"],
        learn=row["learn"],
        outcome=row["outcome"],
        page=f"book/week{week}/{stem}" if page.is_file() else None,
        notebook=f"notebooks/{stem}" if notebook.is_file() else None,
        minutes=head.get("minutes"),
        stations=tuple(head.get("stations", "").split()),
        quiz=load_quiz(quiz) if quiz.is_file() else None,
    )


def chapter_head(page: Path) -> dict[str, str]:
    """The options of the page's `{chapter}` block, empty when it has none."""
    found = _HEAD.search(page.read_text(encoding="utf-8"))
    return dict(_OPTION.findall(found[1])) if found else {}
