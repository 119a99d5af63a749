"""Launch scripts are read as text: quotes, comments and variables, and nothing is run."""

from pathlib import Path

from minirl.explain.shell_words import shell_words


def words(text: str) -> list[str]:
    return [word for word, _ in shell_words(text)]


def test_quotes_are_removed_and_keep_spaces_together():
    assert words("""a.b="['x', 'y']" c.d='e f'""") == ["a.b=['x', 'y']", "c.d=e f"]


def test_a_backslash_joins_lines_and_a_comment_ends_at_its_line():
    assert words("python3 x \\\n  a.b=1 # c.d=2\n") == ["python3", "x", "a.b=1"]


def test_a_hash_inside_a_word_is_no_comment():
    assert words("a.b=x#y") == ["a.b=x#y"]


def test_a_variable_of_the_script_is_filled_in_and_a_foreign_one_stays():
    assert words('N=5\npython3 a.b=$N c.d="${N}" e.f=$HOME/x')[2:] == ["a.b=5", "c.d=5", "e.f=$HOME/x"]


def test_the_default_of_a_parameter_counts_where_the_script_sets_none():
    assert words("N=${N:-1024}\npython3 a.b=${N} c.d=${M:-7} e.f=${M:-}")[2:] == ["a.b=1024", "c.d=7", "e.f="]


def test_single_quotes_keep_a_dollar_as_it_is():
    assert words("N=5\npython3 a.b='$N'")[2:] == ["a.b=$N"]


def test_the_words_of_an_array_are_words():
    assert [w for w in words("DATA=(\n  a.b=1\n  c.d=2\n)\n") if "." in w] == ["a.b=1", "c.d=2"]


def test_a_command_substitution_is_not_run(tmp_path: Path):
    mark = tmp_path / "was-run"
    text = f"python3 a.b=$(touch {mark}) c.d=`touch {mark}`\ntouch {mark}\n"
    assert words(text)[1:3] == [f"a.b=$(touch {mark})", f"c.d=`touch {mark}`"]
    assert not mark.exists()


def test_the_environment_is_not_read(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    assert "s3cret" not in " ".join(words("python3 a.b=$SECRET c.d=${SECRET} e.f=${SECRET:-x}"))


def test_an_unclosed_quote_or_bracket_ends_with_the_text():
    assert words("a.b='x y") == ["a.b=x y"]
    assert words("a.b=${x") == ["a.b=${x"] and words('a.b="x') == ["a.b=x"]
