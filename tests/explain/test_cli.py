"""`python -m minirl explain`: one report, or one line and exit code 2."""

from minirl.cli import main
from minirl.explain.catalogue import DATA


def test_explain_launch_prints_the_options(capsys):
    assert main(["explain", "launch", str(DATA / "launch" / "gsm8k_ppo.sh")]) == 0
    out = capsys.readouterr().out
    assert "45 个选项" in out and "不会建参考策略" in out


def test_explain_log_prints_the_metrics(capsys, tmp_path):
    path = tmp_path / "run.log"
    path.write_text("step:1 - actor/ppo_kl:0.5\n", encoding="utf-8")
    assert main(["explain", "log", str(path)]) == 0
    assert "! 第 1 步 actor/ppo_kl" in capsys.readouterr().out


def test_a_missing_file_or_another_kind_is_one_line(capsys, tmp_path):
    assert main(["explain", "log", str(tmp_path / "no.log")]) == 2
    assert main(["explain", "poem", "x"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
