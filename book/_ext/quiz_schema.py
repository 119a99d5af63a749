"""The schema of data/quiz/*.yml, checked by hand so that an error names file, question and field.

in: a path -> out: a `Quiz`. No Sphinx here: the directive, the home page and the tests read it.
"""

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import yaml

FAMILIES = {
    "container": "容器",
    "shape": "形状",
    "critic": "critic 与基线",
    "dispatch": "分派",
    "consumer": "谁用它",
    "concept": "概念",
    "arithmetic": "算一算",
    "predict": "预测输出",
}
KINDS = ("single", "multi", "number", "text", "order")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_REQUIRED = {"id", "family", "kind", "prompt", "explain", "review"}
_BY_KIND = {
    "single": ({"options"}, set()),
    "multi": ({"options"}, set()),
    "number": ({"answer"}, {"tolerance", "wrong"}),
    "text": ({"answer"}, {"accept", "wrong"}),
    "order": ({"items"}, set()),
}


class QuizError(ValueError):
    """Names the file, the question's id and the field."""


@dataclass(frozen=True)
class Question:
    id: str
    family: str
    kind: str
    prompt: str
    explain: str
    review: str
    code: str | None = None
    options: tuple[dict, ...] = ()
    items: tuple[dict, ...] = ()
    answer: float | int | str | None = None
    tolerance: float = 0
    accept: tuple[str, ...] = ()
    wrong: tuple[dict, ...] = ()

    @property
    def digest(self) -> str:
        """Changes when what is asked or what is right changes: a stored answer is then dropped."""
        asked = [self.kind, self.prompt, self.code, self.answer, self.tolerance, list(self.accept)]
        asked += [[o["key"], o["text"], o.get("correct")] for o in self.options]
        asked += [[i["key"], i["text"]] for i in self.items]
        return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()[:10]

    @property
    def shown(self) -> list[dict]:
        """The options or items in the order of the page: by hash, for an author puts the right one second.

        Items are never shown in the right order.
        """
        given = [*self.options, *self.items]
        mixed = sorted(given, key=lambda e: hashlib.sha256((self.id + e["key"]).encode()).digest())
        return mixed[1:] + mixed[:1] if self.kind == "order" and mixed == given else mixed

    @property
    def right(self) -> str | set[str] | list[str] | float | int:
        """The answer in the form in which tests/book/quiz_answers computes it."""
        if self.kind == "single":
            return next(o["key"] for o in self.options if o["correct"])
        if self.kind == "multi":
            return {o["key"] for o in self.options if o["correct"]}
        if self.kind == "order":
            return [item["key"] for item in self.items]
        return self.answer


@dataclass(frozen=True)
class Quiz:
    chapter: str
    path: Path
    questions: tuple[Question, ...] = field(default_factory=tuple)


def normalise(text: str) -> str:
    """What a typed answer is compared as; quiz.js does the same."""
    text = unicodedata.normalize("NFKC", text).strip().strip("`'\"“”‘’").strip()
    return re.sub(r"\s+", " ", text).lower()


def load_quiz(path: Path) -> Quiz:
    """Raises QuizError naming the file, the question and the field."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise QuizError(f"{path.name}: {error}") from error
    if not isinstance(data, dict) or set(data) != {"chapter", "questions"}:
        raise QuizError(f"{path.name}: needs exactly the fields 'chapter' and 'questions'")
    if data["chapter"] != path.stem:
        raise QuizError(f"{path.name}: field 'chapter' is {data['chapter']!r}, not the file's {path.stem!r}")
    if not isinstance(data["questions"], list) or not data["questions"]:
        raise QuizError(f"{path.name}: field 'questions' must be a list with at least one question")
    questions, seen = [], set()
    for number, entry in enumerate(data["questions"], 1):
        name = entry.get("id", f"#{number}") if isinstance(entry, dict) else f"#{number}"

        def wrong(field_name: str, why: str, name=name):
            raise QuizError(f"{path.name}: question {name}: field {field_name!r}: {why}")

        if not isinstance(entry, dict):
            wrong("(all)", "a question is a mapping")
        question = _question(entry, wrong)
        if question.id in seen:
            wrong("id", "stands twice in this file")
        seen.add(question.id)
        questions.append(question)
    return Quiz(data["chapter"], path, tuple(questions))


def _question(entry: dict, wrong) -> Question:
    kind = entry.get("kind")
    if kind not in KINDS:
        wrong("kind", f"{kind!r} is not one of {', '.join(KINDS)}")
    needs, may = _BY_KIND[kind]
    for name in sorted((_REQUIRED | needs) - set(entry)):
        wrong(name, f"is missing (kind {kind})")
    for name in sorted(set(entry) - _REQUIRED - needs - may - {"code"}):
        wrong(name, f"is not a field of kind {kind}")
    if not _ID.fullmatch(str(entry["id"])):
        wrong("id", "must be kebab-case: a-z, 0-9 and hyphens")
    if entry["family"] not in FAMILIES:
        wrong("family", f"{entry['family']!r} is not one of {', '.join(FAMILIES)}")
    if entry["family"] == "predict" and not entry.get("code"):
        wrong("code", "a 'predict' question shows code")
    for name in ("prompt", "explain", "review"):
        if not isinstance(entry[name], str) or not entry[name].strip():
            wrong(name, "must be a text that is not empty")
    if not re.fullmatch(r"[\w/.-]+\.(md|ipynb)(#[\w.:-]+)?", entry["review"]):
        wrong("review", f"{entry['review']!r}: write a page, as day3_ppo.md or day3_ppo.md#anchor")
    if kind in ("single", "multi"):
        _options(entry["options"], kind, wrong)
    if kind == "order":
        _keyed(entry["items"], "items", {"key", "text"}, wrong)
        if len(entry["items"]) < 3:
            wrong("items", "an order needs at least three items")
    if kind == "number" and type(entry["answer"]) not in (int, float):
        wrong("answer", f"{entry['answer']!r} is not a number")
    if kind == "text" and not (isinstance(entry["answer"], str) and normalise(entry["answer"])):
        wrong("answer", f"{entry['answer']!r} is not a text (quote it)")
    for slip in entry.get("wrong", []):
        if not isinstance(slip, dict) or set(slip) != {"value", "reason"}:
            wrong("wrong", "each entry has exactly 'value' and 'reason'")
        if slip["value"] == entry["answer"]:
            wrong("wrong", f"{slip['value']!r} is the right answer")
    known = {name: entry[name] for name in Question.__dataclass_fields__ if name in entry}
    for name in ("options", "items", "accept", "wrong"):
        if name in known:
            known[name] = tuple(known[name])
    return Question(**known)


def _options(options, kind: str, wrong) -> None:
    _keyed(options, "options", {"key", "text", "correct", "reason"}, wrong, optional={"correct"})
    if len(options) < 2:
        wrong("options", "needs at least two options")
    for option in options:
        option.setdefault("correct", False)
        if not isinstance(option["correct"], bool):
            wrong("options", f"option {option['key']}: 'correct' must be true or false")
    right = sum(option["correct"] for option in options)
    if kind == "single" and right != 1:
        wrong("options", f"a single choice has one correct option, here {right}")
    if kind == "multi" and right < 1:
        wrong("options", "no option is correct")


def _keyed(entries, name: str, fields: set[str], wrong, optional: set[str] = frozenset()) -> None:
    if not isinstance(entries, list) or not entries:
        wrong(name, "must be a list")
    keys = []
    for entry in entries:
        if not isinstance(entry, dict) or not fields - optional <= set(entry) <= fields:
            wrong(name, f"each entry has {', '.join(sorted(fields))}; got {entry!r}")
        for text in sorted({"text", "reason"} & fields):
            if not isinstance(entry[text], str) or not entry[text].strip():
                wrong(name, f"entry {entry['key']}: {text!r} must be a text that is not empty (quote it)")
        keys.append(str(entry["key"]))
    if len(set(keys)) != len(keys):
        wrong(name, f"keys stand twice: {keys}")
