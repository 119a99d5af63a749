"""The quiz in a browser: answer, retry, give up, keep, drop, export, import; by keyboard; without scripts."""

import json
import re

import pytest
from built_site import HTML, ROOT, pages
from playwright.sync_api import Page, expect
from quiz_schema import KINDS, Question, load_quiz

pytestmark = pytest.mark.site
KEY = "verl-course.quiz.v1"
FORMAT = "verl-course-progress"


def chapters() -> dict[str, str]:
    """Chapter stem -> the page that shows its quiz."""
    found = {}
    for name in pages():
        for stem in re.findall(
            r'class="quiz" data-chapter="(\w+)"', (HTML / name).read_text(encoding="utf-8")
        ):
            found[stem] = name
    return found


def any_question(kind: str) -> tuple[str, Question]:
    for stem in chapters():
        for question in load_quiz(ROOT / "data" / "quiz" / f"{stem}.yml").questions:
            if question.kind == kind:
                return stem, question
    pytest.fail(f"no page of the book has a question of kind {kind}")


def open_question(page: Page, address: str, kind: str):
    stem, question = any_question(kind)
    page.goto(f"{address}/{chapters()[stem]}")
    return stem, question, page.locator(f"#q-{stem}-{question.id}")


def answer(form, question: Question, right: bool) -> None:
    """Fill in the right answer, or one that is not."""
    if question.kind in ("single", "multi"):
        for option in question.options:
            box = form.locator(f"input[value='{option['key']}']")
            want = option["correct"] if right else not option["correct"]
            if question.kind == "single":
                if want:
                    box.check()
                    return
            else:
                box.set_checked(want)
    elif question.kind == "order":
        keys = [item["key"] for item in question.items]
        move_to(form, keys if right else keys[::-1])
    else:
        form.locator(".quiz-typed input").fill(str(question.answer) if right else "987654321")


def move_to(form, keys: list[str]) -> None:
    for place, key in enumerate(keys):
        while (
            form.locator(".quiz-order li").evaluate_all("l => l.map((e) => e.dataset.key)").index(key) > place
        ):
            form.locator(f"li[data-key='{key}'] .quiz-up").click()


def stored(page: Page) -> dict:
    return json.loads(page.evaluate(f"localStorage.getItem('{KEY}')") or "{}")


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_then_retry_then_right(page, address, kind):
    stem, question, form = open_question(page, address, kind)
    feedback = form.locator(".quiz-feedback")
    expect(form.locator(".quiz-solution")).to_be_hidden()
    answer(form, question, right=False)
    form.locator(".quiz-check").click()
    expect(feedback).to_contain_text("不对")
    expect(form.locator(".quiz-solution")).to_be_hidden()
    assert stored(page)[stem][question.id]["s"] == "wrong"
    form.locator(".quiz-retry").click()
    expect(feedback).to_be_empty()
    answer(form, question, right=True)
    form.locator(".quiz-check").click()
    expect(feedback).to_contain_text("对。")
    expect(form.locator(".quiz-explain")).to_be_visible()
    expect(form.locator(".quiz-review a, .quiz-review span").first).to_be_visible()
    assert stored(page)[stem][question.id] == {
        "h": question.digest, "s": "right", "a": stored(page)[stem][question.id]["a"],
    }  # fmt: skip


def test_a_wrong_option_shows_its_own_reason(page, address):
    _, question, form = open_question(page, address, "single")
    wrong = next(option for option in question.options if not option["correct"])
    form.locator(f"input[value='{wrong['key']}']").check()
    form.locator(".quiz-check").click()
    plain = re.sub(r"[`*$]|\\\w+", "", wrong["reason"])[:6]
    expect(form.locator(".quiz-why")).to_contain_text(plain)


def test_giving_up_shows_the_answer_and_is_remembered_as_unknown(page, address):
    stem, question, form = open_question(page, address, "single")
    form.locator(".quiz-unknown").click()
    expect(form.locator(".quiz-explain")).to_be_visible()
    assert stored(page)[stem][question.id]["s"] == "unknown"
    page.reload()
    expect(form.locator(".quiz-explain")).to_be_visible()


def test_checking_without_an_answer_records_nothing(page, address):
    _, _, form = open_question(page, address, "single")
    form.locator(".quiz-check").click()
    expect(form.locator(".quiz-feedback")).to_contain_text("先作答")
    assert stored(page) == {}


def test_a_number_may_be_typed_full_width(page, address):
    _, question, form = open_question(page, address, "number")
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in str(question.answer))
    form.locator(".quiz-typed input").fill(f" {wide} ")
    form.locator(".quiz-check").click()
    expect(form).to_have_class(re.compile("is-right"))


def test_a_text_may_be_typed_with_backticks_and_capitals(page, address):
    _, question, form = open_question(page, address, "text")
    form.locator(".quiz-typed input").fill(f"`{question.answer.upper()}`")
    form.locator(".quiz-check").click()
    expect(form).to_have_class(re.compile("is-right"))


def test_answers_come_back_after_a_reload_and_count_on_the_home_page(page, address):
    stem, question, form = open_question(page, address, "multi")
    answer(form, question, right=True)
    form.locator(".quiz-check").click()
    page.reload()
    expect(form).to_have_class(re.compile("is-right"))
    for option in question.options:
        box = form.locator(f"input[value='{option['key']}']")
        assert box.is_checked() == option["correct"]
    total = len(load_quiz(ROOT / "data" / "quiz" / f"{stem}.yml").questions)
    expect(page.locator(".quiz-progress")).to_contain_text(f"共 {total} 题，答对 1")
    page.goto(f"{address}/book/index.html")
    expect(page.locator(f".route-progress[data-chapter={stem}]")).to_have_text(f"检查题 1/{total}")


def test_an_answer_to_a_question_that_changed_is_dropped(page, address):
    stem, question, form = open_question(page, address, "single")
    old = {
        stem: {
            question.id: {"h": "0123456789", "s": "right", "a": "a"},
            "gone": {"h": "0123456789", "s": "right", "a": "a"},
        }
    }
    page.evaluate(f"localStorage.setItem('{KEY}', '{json.dumps(old)}')")
    page.reload()
    expect(form).not_to_have_class(re.compile("is-right"))
    assert stored(page)[stem] == {}
    page.goto(f"{address}/book/index.html")
    expect(page.locator(f".route-progress[data-chapter={stem}]")).to_contain_text("检查题 0/")


def test_progress_is_exported_reset_and_imported(page, address, tmp_path):
    stem, question, form = open_question(page, address, "single")
    answer(form, question, right=True)
    form.locator(".quiz-check").click()
    before = stored(page)
    page.goto(f"{address}/book/index.html")
    with page.expect_download() as waiting:
        page.locator(".progress-export").click()
    file = tmp_path / "progress.json"
    waiting.value.save_as(file)
    assert json.loads(file.read_text())["quiz"] == before

    reset = page.locator(".progress-reset")
    reset.click()
    assert stored(page) == before, "one press must not be enough"
    reset.click()
    assert stored(page) == {}
    page.locator(".progress-import input").set_input_files(file)
    expect(page.locator(".progress-status")).to_contain_text("导入了 1 条")
    assert stored(page) == before
    expect(page.locator(f".route-progress[data-chapter={stem}]")).to_contain_text("检查题 1/")


ENTRY = {"h": "0123456789", "s": "right", "a": "a"}


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        json.dumps({"format": "other", "version": 1, "quiz": {}}),
        json.dumps({"format": FORMAT, "version": 2, "quiz": {}}),
        json.dumps({"format": FORMAT, "version": 1, "quiz": {"c": {"q": ENTRY | {"h": "<script>"}}}}),
        json.dumps({"format": FORMAT, "version": 1, "quiz": {"c": {"q": ENTRY | {"s": "best"}}}}),
        json.dumps({"format": FORMAT, "version": 1, "quiz": {"c": {"q": ENTRY | {"a": {"x": 1}}}}}),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(page, address, tmp_path, body):
    page.goto(f"{address}/book/index.html")
    file = tmp_path / "bad.json"
    file.write_text(body)
    page.locator(".progress-import input").set_input_files(file)
    expect(page.locator(".progress-status")).to_contain_text("没有导入")
    assert stored(page) == {}


def test_a_choice_is_answered_by_keyboard_alone(page, address):
    _, question, form = open_question(page, address, "single")
    form.locator("input").first.focus()
    for option in question.options:
        if option["correct"]:
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    expect(form).to_have_class(re.compile("is-right"))


def test_an_item_is_moved_by_keyboard_and_keeps_the_focus(page, address):
    _, question, form = open_question(page, address, "order")
    items = form.locator(".quiz-order li")
    first = items.first.get_attribute("data-key")
    form.locator(f"li[data-key='{first}'] .quiz-down").focus()
    page.keyboard.press("Enter")
    assert items.nth(1).get_attribute("data-key") == first
    assert page.evaluate("document.activeElement.closest('li').dataset.key") == first
    expect(form.locator(".quiz-feedback")).to_contain_text("移到第 2 位")


def test_an_order_is_never_shown_solved(built):
    for stem in chapters():
        for question in load_quiz(ROOT / "data" / "quiz" / f"{stem}.yml").questions:
            if question.kind == "order":
                text = (HTML / chapters()[stem]).read_text(encoding="utf-8")
                form = text[text.index(f'id="q-{stem}-{question.id}"') :].partition("</form>")[0]
                shown = re.findall(r'<li data-key="(\w+)"', form)[: len(question.items)]
                assert shown != [item["key"] for item in question.items], question.id


def test_without_scripts_every_answer_can_be_read(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    stem = next(iter(chapters()))
    page.goto(f"{address}/{chapters()[stem]}")
    for question in load_quiz(ROOT / "data" / "quiz" / f"{stem}.yml").questions:
        form = page.locator(f"#q-{stem}-{question.id}")
        form.locator("summary").click()
        expect(form.locator(".quiz-explain")).to_be_visible()
        expect(form.locator(".quiz-check")).to_be_hidden()
    expect(page.locator("figure.src").first).to_be_visible()
    context.close()


def test_inputs_have_labels_and_feedback_is_announced(page, address):
    stem = next(iter(chapters()))
    page.goto(f"{address}/{chapters()[stem]}")
    unlabelled = page.evaluate(
        "[...document.querySelectorAll('.quiz input')].filter((e) => !e.labels.length).map((e) => e.id)"
    )
    assert unlabelled == []
    questions = page.locator(".quiz-question").count()
    assert page.locator(".quiz-feedback[role=status]").count() == questions
    assert page.locator(".quiz fieldset > legend").count() == questions
