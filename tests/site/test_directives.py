"""The extensions by themselves: what they show, and that a mistake on a page stops the build by name."""

import io

import plain_yaml
import pytest
from built_site import EXTENSIONS, ROOT
from chinese_search import BigramSearch
from chinese_strings import mend
from data_tables import default_of
from excerpt import AnchorError, cut, drift
from html_part import may_break
from katex_math import KATEX, Katex, TexError
from phone_tables import stand_up
from quiz_schema import QuizError, load_quiz, normalise
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from minirl.pin import LATER, PIN, find_symbol

GEN_BATCH = "verl.trainer.ppo.ray_trainer:RayPPOTrainer._get_gen_batch"


# ---- excerpts ----


def test_an_anchor_is_bound_to_the_line_of_the_file():
    excerpt = cut(GEN_BATCH, PIN, None, None, ["reward_keys = set(", "gen_batch = batch.pop("])
    lines = find_symbol(GEN_BATCH).path.read_text(encoding="utf-8").split("\n")
    assert [lines[mark - 1].strip()[:14] for mark in excerpt.marks] == ["reward_keys = ", "gen_batch = ba"]
    assert len(excerpt.lines) == excerpt.last - excerpt.first + 1


@pytest.mark.parametrize(
    ("anchors", "said"),
    [
        (["no such text"], "hits no line"),
        (["batch_keys_to_pop"], "hits 4 lines"),
        (["gen_batch = batch.pop(", "reward_keys = set("], "must stand below"),
    ],
)
def test_a_lost_ambiguous_or_misordered_anchor_is_an_error_that_names_it(anchors, said):
    with pytest.raises(AnchorError, match=said) as error:
        cut(GEN_BATCH, PIN, None, None, anchors)
    assert GEN_BATCH in str(error.value) and anchors[-1] in str(error.value)


def test_from_and_to_cut_the_range_in_which_anchors_are_looked_for():
    excerpt = cut(GEN_BATCH, PIN, "# pop those keys", "gen_batch = batch.pop(", [])
    assert excerpt.lines[0].strip().startswith("# pop those") and "batch.pop(" in excerpt.lines[-1]
    with pytest.raises(AnchorError, match="hits no line"):
        cut(GEN_BATCH, PIN, "# pop those keys", None, ["reward_keys = set("])


def test_drift_says_same_changed_and_gone_as_the_two_versions_say():
    assert drift(cut(GEN_BATCH, PIN, None, None, [])).state == "same"
    fit = "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"
    assert find_symbol(fit, PIN).lines != find_symbol(fit, LATER).lines
    changed = drift(cut(fit, PIN, None, None, []))
    assert changed.state == "changed" and "\n-" in changed.diff and "\n+" in changed.diff
    assert not changed.excerpt_same
    assert drift(
        cut(fit, PIN, "gen_batch = self._get_gen_batch", "gen_batch = self._get_gen", [])
    ).excerpt_same
    gone = drift(cut("verl.trainer.main_ppo_sync:TaskRunner", PIN, None, None, []))
    assert gone.state in ("gone", "moved")


# ---- quiz files ----

GOOD = {
    "id": "uid-container", "family": "container", "kind": "single", "prompt": "在哪里？", "explain": "因为。",
    "review": "day3_ppo.md#x",
    "options": [
        {"key": "a", "text": "batch", "reason": "不是张量"},
        {"key": "b", "text": "non_tensor_batch", "correct": True, "reason": "对象数组"},
    ],
}  # fmt: skip


def quiz_file(folder, *questions):
    import yaml

    path = folder / "chapter_x.yml"
    path.write_text(
        yaml.safe_dump({"chapter": "chapter_x", "questions": list(questions)}, allow_unicode=True)
    )
    return path


def test_a_good_question_is_read_with_its_answer(tmp_path):
    quiz = load_quiz(quiz_file(tmp_path, GOOD))
    assert quiz.questions[0].right == "b"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "essay"}, "kind"),
        ({"id": "UID"}, "id"),
        ({"family": "other"}, "family"),
        ({"explain": " "}, "explain"),
        ({"review": "see day 3"}, "review"),
        ({"options": [GOOD["options"][0]]}, "options"),
        ({"options": [GOOD["options"][0], {"key": "b", "text": "x", "reason": "y"}]}, "options"),
        ({"options": [GOOD["options"][1], {"key": "b", "text": "x", "reason": "y"}]}, "options"),
        ({"options": [GOOD["options"][1], {"key": "c", "text": "x"}]}, "options"),
        ({"family": "predict"}, "code"),
        ({"surprise": 1}, "surprise"),
        ({"kind": "number", "options": None}, "answer"),
        ({"kind": "order", "options": None}, "items"),
    ],
)
def test_a_schema_error_names_file_question_and_field(tmp_path, change, field):
    question = {key: value for key, value in (GOOD | change).items() if value is not None}
    with pytest.raises(QuizError) as error:
        load_quiz(quiz_file(tmp_path, question))
    name = change.get("id", GOOD["id"])
    assert str(error.value).startswith(f"chapter_x.yml: question {name}: field '{field}':")


def test_two_questions_of_one_id_are_refused(tmp_path):
    with pytest.raises(QuizError, match="stands twice"):
        load_quiz(quiz_file(tmp_path, GOOD, GOOD))


def test_the_digest_follows_the_question_and_its_answer_but_not_the_explanation(tmp_path):
    def digest(**change):
        return load_quiz(quiz_file(tmp_path, GOOD | change)).questions[0].digest

    other = [GOOD["options"][0] | {"correct": True}, GOOD["options"][1] | {"correct": False}]
    assert digest(explain="换一种说法。") == digest()
    assert len({digest(), digest(prompt="在哪个容器？"), digest(options=other)}) == 3


@pytest.mark.parametrize(
    "typed", ["old_log_probs", " `old_log_probs` ", "OLD_LOG_PROBS", "ｏｌｄ＿ｌｏｇ＿ｐｒｏｂｓ"]
)
def test_typed_answers_are_compared_without_width_case_and_quotes(typed):
    assert normalise(typed) == "old_log_probs"


# ---- small parts ----


@pytest.mark.parametrize(
    "line",
    [
        "`uid` 开头",
        "见 #12 与 # 号",
        "键: 值, 还有: 一个",
        "[B, R] 的张量",
        "@register(...)",
        'a["b"] = 1',
        "- 减号",
    ],
)
def test_a_one_line_note_is_taken_as_it_stands(line):
    assert plain_yaml.load(f"- at: {line}\n  note: {line}") == [{"at": line, "note": line}]


def test_quoted_folded_and_continued_values_are_left_to_yaml():
    text = "- at: 'x: y'\n  note: |\n    两\n    行\n- at: z\n  note: 接着\n    写"
    assert plain_yaml.load(text) == [{"at": "x: y", "note": "两\n行\n"}, {"at": "z", "note": "接着 写"}]


def test_chinese_is_indexed_in_pairs_and_names_also_in_parts():
    search = BigramSearch({})
    assert search.split("优势函数") == ["优势", "势函", "函数"]
    assert search.split("键 old_log_probs") == ["键", "old_log_probs", "old", "log", "probs"]


def test_strings_of_the_theme_are_mended_and_the_article_is_left_alone():
    page = '<button title="Toggle primary sidebar">Search</button><article><p>Search</p></article><i>Dark</i>'
    assert mend(page) == (
        '<button title="展开或收起目录">搜索</button><article><p>Search</p></article><i>深色</i>'
    )


def test_bad_tex_is_an_error_and_good_tex_is_html_with_mathml():
    katex = Katex(ROOT / KATEX)
    try:
        assert "<math" in katex.render(r"\frac{a}{b}", display=True)
        with pytest.raises(TexError):
            katex.render(r"\frac{a", display=False)
    finally:
        katex.close()


def test_defaults_come_from_the_pins_yaml():
    assert default_of("algorithm.adv_estimator") == "gae"
    with pytest.raises(KeyError, match="algorithm.adv_estimater"):
        default_of("algorithm.adv_estimater")


# ---- a page with a mistake stops the build ----

EXTENSION_NAMES = [
    "myst_parser",
    "book_directive",
    "html_part",
    "annotated_source",
    "quiz_block",
    "chapter_card",
]
CONF = f"""
import sys
sys.path.insert(0, {str(EXTENSIONS)!r})
extensions = {EXTENSION_NAMES!r}
root_doc = "index"
"""


def build(folder, page: str) -> str:
    """Builds a book of one page; returns its HTML."""
    (folder / "conf.py").write_text(CONF)
    (folder / "index.md").write_text(page, encoding="utf-8")
    quiet = io.StringIO()
    app = Sphinx(folder, folder, folder / "out", folder / "trees", "html", status=quiet, warning=quiet)
    app.build()
    return (folder / "out" / "index.html").read_text(encoding="utf-8")


SOURCE = f"# 页\n\n```{{source}} {GEN_BATCH}\n- at: %s\n  note: 这里是 `uid`，见 [页](index.md)。\n```\n"


def test_a_source_block_shows_lines_numbers_note_badge_and_licence(tmp_path):
    html = build(tmp_path, SOURCE % "reward_keys = set(")
    symbol = find_symbol(GEN_BATCH)
    assert f'data-no="{symbol.start}"' in html and f'data-no="{symbol.end}"' in html
    assert "<code" in html and "uid" in html and "0.9.1 未变" in html and "Apache-2.0" in html
    assert f"/blob/v{PIN}/{symbol.file}#L{symbol.start}-L{symbol.end}" in html


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (SOURCE % "no such line", r"index\.md:3: \{source\}.*`at: no such line` hits no line of verl/"),
        ("# 页\n\n```{source} verl.protocol:DataProto.nothing\n```\n", r"no 'nothing' in verl/protocol\.py"),
        ("# 页\n\n```{quiz} nowhere\n```\n", r"index\.md:3: \{quiz\} nowhere\.yml"),
        (
            "# 页\n\n```{chapter}\n:outcome: 能\n:minutes: 5\n:stations: load elsewhere\n```\n",
            r"\{chapter\} no station 'elsewhere'",
        ),
        (
            "# 页\n\n```{chapter}\n:outcome: 能\n:minutes: 5\n:stations: load\n:reads: verl/none.py\n```\n",
            r"verl/none\.py is not in verl",
        ),
    ],
)
def test_a_mistake_on_a_page_stops_the_build_and_is_named(tmp_path, page, said):
    with pytest.raises(ExtensionError, match=said):
        build(tmp_path, page)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ExtensionError) as error:
        build(tmp_path, SOURCE % "first lost" + SOURCE % "second lost")
    assert "first lost" in str(error.value) and "second lost" in str(error.value)


# ---- tables on a phone ----


def table(cell: str) -> str:
    head = "<thead><tr><th><p>键</p></th><th>形状</th><th>说明</th></tr></thead>"
    return f"<table>{head}<tbody><tr><td>uid</td><td>[B]</td><td>{cell}</td></tr></tbody></table>"


def test_a_table_with_a_sentence_gets_its_column_names_into_its_cells():
    stacked = stand_up(table("同一条提示词的 <code>n</code> 条响应共用一个"))
    assert stacked.startswith('<table class="stack">')
    assert [stacked.count(f'<td data-label="{name}">') for name in ("键", "形状", "说明")] == [1, 1, 1]


def test_a_table_of_short_values_stays_as_it_is():
    assert stand_up(table("0.25")) == table("0.25")


def test_a_long_name_in_the_first_column_may_break_at_its_dots_and_nowhere_else():
    code = '<code><span class="pre">{}</span></code>'
    long, short = "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "data.train_files"
    rows = table("同一条提示词的 <code>n</code> 条响应共用一个" + code.format(long))
    stacked = stand_up(rows.replace("<td>uid", "<td>" + code.format(long) + code.format(short)))
    first, _, last = stacked.partition('data-label="形状"')
    assert long.replace(".", ".<wbr>") in first and short in first
    assert long in last and "<wbr>" not in last


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("RayPPOTrainer._balance_batch", "RayPPOTrainer.|_balance_|batch"),
        ("RLHFDataset.__getitem__", "RLHFDataset.|__getitem__"),
        ("__do_sample__", "__do_|sample__"),
    ],
)
def test_a_name_keeps_the_underscores_it_begins_or_ends_with(name, broken):
    assert may_break(name, after="._") == broken.replace("|", "<wbr>")
