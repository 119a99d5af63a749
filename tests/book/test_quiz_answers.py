"""Every answer of data/quiz is computed by tests/book/quiz_answers/<chapter>.py, a function per question."""

import importlib.util
from collections import Counter

import pytest
from built_site import ROOT
from quiz_schema import Question, load_quiz

FILES = sorted((ROOT / "data" / "quiz").glob("*.yml"))
ANSWERS = ROOT / "tests" / "book" / "quiz_answers"
QUESTIONS = [(path.stem, question) for path in FILES for question in load_quiz(path).questions]


def answers_of(stem: str):
    path = ANSWERS / f"{stem}.py"
    assert path.is_file(), (
        f"{path.relative_to(ROOT)} is missing: it computes the answers of data/quiz/{stem}.yml"
    )
    spec = importlib.util.spec_from_file_location(f"quiz_answers_{stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function_name(question: Question) -> str:
    return "q_" + question.id.replace("-", "_")


@pytest.mark.oracle
@pytest.mark.parametrize(("stem", "question"), QUESTIONS, ids=lambda value: getattr(value, "id", value))
def test_the_answer_of_the_file_is_the_computed_one(stem, question):
    compute = getattr(answers_of(stem), function_name(question), None)
    assert compute is not None, f"{stem}.py lacks {function_name(question)}()"
    got = compute()
    if question.kind == "multi":
        got = set(got)
    if question.kind == "number":
        assert got == pytest.approx(question.answer, abs=question.tolerance + 1e-9)
    else:
        assert got == question.right


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_answer_function_is_left_over(path):
    asked = {function_name(question) for question in load_quiz(path).questions}
    written = {name for name in vars(answers_of(path.stem)) if name.startswith("q_")}
    assert written == asked


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_chapter_has_enough_questions_and_shows_its_quiz(path):
    quiz = load_quiz(path)
    page = next(iter((ROOT / "book").glob(f"week*/{path.stem}.md")), None)
    assert page is not None, f"no chapter {path.stem}.md shows this quiz"
    assert f"```{{quiz}} {path.stem}" in page.read_text(encoding="utf-8")
    assert 6 <= len(quiz.questions) <= 15


CHOICES = [question for _, question in QUESTIONS if question.kind == "single"]


def test_the_right_option_cannot_be_guessed_by_its_letter():
    places = Counter([option["correct"] for option in question.shown].index(True) for question in CHOICES)
    assert max(places.values()) < 0.4 * len(CHOICES), places


def test_the_right_option_is_rarely_the_longest():
    longest = [q for q in CHOICES if max(q.options, key=lambda option: len(option["text"]))["correct"]]
    assert len(longest) < 0.4 * len(CHOICES), [q.id for q in longest]
