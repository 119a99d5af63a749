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


def test_a_file_that_cannot_be_read_or_another_kind_is_one_line_with_the_remedy(capsys, tmp_path):
    packed = tmp_path / "run.log.gz"
    packed.write_bytes(b"\x1f\x8b")
    for argument, why in ((tmp_path / "no.log", "No such file"), (tmp_path, "directory"), (packed, "byte 1")):
        assert main(["explain", "log", str(argument)]) == 2
        err = capsys.readouterr().err
        assert f"FILE={argument} cannot be read" in err and why in err and err.count("\n") == 1
    assert main(["explain", "poem", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
