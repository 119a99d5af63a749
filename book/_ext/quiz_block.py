"""The directive `{quiz}`: the questions of data/quiz/<chapter>.yml as forms.

in: a chapter's stem -> out: forms that quiz.js makes live; without scripts each answer is in a folded block.
A schema error stops the build with file, question and field.
"""

import json
import posixpath
import string
from collections.abc import Iterator
from html import escape
from pathlib import Path

from book_directive import BookDirective
from docutils import nodes
from html_part import part, raw
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from quiz_schema import FAMILIES, Question, load_quiz
from sphinx import addnodes


class QuizDirective(BookDirective):
    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        stem = self.arguments[0]
        path = Path(self.env.srcdir) / "data" / "quiz" / f"{stem}.yml"
        quiz = load_quiz(path)
        self.env.note_dependency(str(path))
        block = part("div", class_="quiz", data_chapter=stem)
        block += part("p", f"共 {len(quiz.questions)} 题。", class_="quiz-progress", role="status")
        for number, question in enumerate(quiz.questions, 1):
            block += self._form(stem, number, question)
        return [block]

    def _form(self, stem: str, number: int, question: Question) -> nodes.Node:
        base = f"q-{stem}-{question.id}"
        form = part(
            "form",
            id=base,
            class_="quiz-question",
            data_id=question.id,
            data_hash=question.digest,
            data_kind=question.kind,
            data_answer=self._answer_for_script(question),
            data_wrong=json.dumps([slip["value"] for slip in question.wrong]) if question.wrong else None,
            autocomplete="off",
        )
        fieldset = part("fieldset", aria_describedby=f"{base}-prompt")
        legend = f"第 {number} 题"
        fieldset += part(
            "legend", part("span", legend), part("span", FAMILIES[question.family], class_="quiz-family")
        )
        fieldset += part(
            "div", *self.parse_text_to_nodes(question.prompt), class_="quiz-prompt", id=f"{base}-prompt"
        )
        if question.code:
            fieldset += raw(_code(question.code))
        fieldset += self._answering(base, question)
        fieldset += raw(
            '<div class="quiz-actions"><button type="submit" class="quiz-check">检查</button>'
            '<button type="button" class="quiz-unknown">不知道</button>'
            '<button type="button" class="quiz-retry" hidden>再做一次</button></div>'
        )
        fieldset += part("div", class_="quiz-feedback", role="status", aria_live="polite")
        form += fieldset
        form += self._solution(question)
        return form

    def _answer_for_script(self, question: Question) -> str:
        if question.kind == "multi":
            return json.dumps(sorted(question.right))
        if question.kind == "number":
            return json.dumps({"value": question.answer, "tolerance": question.tolerance})
        if question.kind == "text":
            return json.dumps([question.answer, *question.accept], ensure_ascii=False)
        return json.dumps(question.right)

    def _answering(self, base: str, question: Question) -> nodes.Node:
        if question.kind in ("single", "multi"):
            kind = "radio" if question.kind == "single" else "checkbox"
            box = part("div", class_="quiz-options")
            for letter, option in _lettered(question):
                ident = f"{base}-{option['key']}"
                field = raw(
                    f'<input type="{kind}" name="{base}" id="{ident}" value="{escape(option["key"])}">'
                )
                label = part("label", part("span", f"{letter}.", class_="quiz-key"), for_=ident)
                label += part("span", *self.phrase(option["text"]), class_="quiz-option-text")
                box += part("div", field, label, class_="quiz-option")
            return box
        if question.kind == "order":
            listing = part("ol", class_="quiz-order", aria_label="用上移、下移按钮排好顺序")
            for item in question.shown:
                text = part("span", *self.phrase(item["text"]), class_="quiz-item-text")
                buttons = raw(
                    '<span class="quiz-moves">'
                    '<button type="button" class="quiz-up" aria-label="上移">↑</button>'
                    '<button type="button" class="quiz-down" aria-label="下移">↓</button></span>'
                )
                listing += part("li", text, buttons, data_key=item["key"])
            return listing
        mode = "decimal" if question.kind == "number" else "text"
        return raw(
            f'<div class="quiz-typed"><label for="{base}-typed">你的答案</label>'
            f'<input type="text" inputmode="{mode}" id="{base}-typed" name="{base}" spellcheck="false" '
            'autocapitalize="off"></div>'
        )

    def _solution(self, question: Question) -> nodes.Node:
        """Folded, complete and readable without scripts; quiz.js takes its reasons from here."""
        solution = part("details", raw("<summary>答案与理由</summary>"), class_="quiz-solution")
        if question.kind in ("single", "multi"):
            listing = part("ul", class_="quiz-reasons")
            for letter, option in _lettered(question):
                mark = "对" if option["correct"] else "不对"
                entry = part(
                    "li", data_key=option["key"], class_="is-right" if option["correct"] else "is-wrong"
                )
                entry += part("b", f"{letter} {mark}：")
                entry += part("span", *self.phrase(option["reason"]), class_="quiz-reason")
                listing += entry
            solution += listing
        elif question.kind == "order":
            listing = part("ol", class_="quiz-reasons")
            for item in question.items:
                listing += part("li", *self.phrase(item["text"]))
            solution += listing
        else:
            solution += part("p", "答案：", part("code", str(question.answer)), class_="quiz-right")
            if question.wrong:
                listing = part("ul", class_="quiz-reasons")
                for i, slip in enumerate(question.wrong):
                    entry = part(
                        "li", part("b", f"若答 {slip['value']}："), data_key=str(i), class_="is-wrong"
                    )
                    entry += part("span", *self.phrase(str(slip["reason"])), class_="quiz-reason")
                    listing += entry
                solution += listing
        solution += part("div", *self.parse_text_to_nodes(question.explain), class_="quiz-explain")
        solution += part("p", "回看：", self._review(question.review), class_="quiz-review")
        return solution

    def _review(self, review: str) -> nodes.Node:
        """`day3_ppo.md` is relative to this page; `#x` is a label or a heading's anchor."""
        page, _, anchor = review.partition("#")
        here = posixpath.dirname(self.env.docname)
        docname = posixpath.normpath(posixpath.join(here, page.rsplit(".", 1)[0]))
        target = f"{page}#{anchor}" if anchor else page
        text = nodes.inline("", "")
        link = addnodes.pending_xref(
            "", text, refdomain="doc", reftype="myst", reftarget=docname, reftargetid=anchor or None,
            refexplicit=False, refdoc=self.env.docname, refwarn=True,
        )  # fmt: skip
        if docname not in self.env.found_docs:
            return part("span", f"{page}（编写中）", title=target)
        return link


def _lettered(question: Question) -> Iterator[tuple[str, dict]]:
    """The options as shown. The letter is only for the eye: answers are kept by the option's key."""
    return zip(string.ascii_lowercase, question.shown, strict=False)


def _code(code: str) -> str:
    html = highlight(code.rstrip("\n"), PythonLexer(), HtmlFormatter(nowrap=True))
    return f'<div class="highlight quiz-code"><pre tabindex="0">{html}</pre></div>'


def setup(app):
    app.setup_extension("html_part")
    app.setup_extension("book_directive")
    app.add_directive("quiz", QuizDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
