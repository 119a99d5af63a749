import json
import subprocess
import sys

import pytest
import tiny_run
import yaml
from omegaconf import OmegaConf

from minirl import cli, errors, main_ppo
from minirl.config import compose


def test_config_prints_yaml_that_composes_to_itself(capsys):
    assert cli.main(["config", "--resolve", "data.train_batch_size=32", "algorithm.adv_estimator=grpo"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    expected = compose(["data.train_batch_size=32", "algorithm.adv_estimator=grpo"])
    assert printed == OmegaConf.to_container(expected, resolve=True)


def test_config_keeps_interpolations_unless_asked(capsys):
    cli.main(["config"])
    assert "${data.max_prompt_length}" in capsys.readouterr().out


def test_options_and_overrides_may_be_mixed(capsys):
    assert (
        cli.main(["config", "minirl.seed=3", "--preset", "cpu", "+data.gen_batch_size=32", "--resolve"]) == 0
    )
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["minirl"]["seed"] == 3 and printed["data"]["gen_batch_size"] == 32


def test_help_and_no_command_print_the_usage(capsys):
    assert cli.main(["--help"]) == 0 and "trace" in capsys.readouterr().out
    assert cli.main([]) == 2 and "trace" in capsys.readouterr().out


def failing(error: BaseException):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize("error", [ValueError("a\n b"), OSError("disk"), FloatingPointError("nan at step 3")])
def test_user_error_is_one_line_on_stderr_with_exit_code_2(error, capsys):
    assert errors.run(failing(error), []) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("MINIRL_DEBUG", "1")
    with pytest.raises(ValueError):
        errors.run(failing(ValueError("x")), [])


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        errors.run(failing(KeyError("x")), [])


def test_gpu_out_of_memory_says_what_to_lower(capsys):
    import torch

    assert errors.run(failing(torch.OutOfMemoryError("CUDA ...\n" * 9)), []) == 2
    assert "micro_batch_size_per_gpu" in capsys.readouterr().err


def test_interruption_is_not_a_traceback(capsys):
    assert errors.run(failing(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_trace_prints_every_station_of_one_step_and_saves_it(tmp_path, capsys):
    assert cli.main(["trace", "--json", str(tmp_path / "t.json"), *tiny_run.make(tmp_path)]) == 0
    out = capsys.readouterr().out
    for key in ("raw_prompt", "responses", "rm_scores", "old_log_probs", "values", "advantages"):
        assert key in out
    assert "step:" not in out  # no log lines between the table's rows
    assert len(json.loads((tmp_path / "t.json").read_text())["steps"]) == 1


@pytest.mark.parametrize("command", [["minirl", "config"], ["minirl", "trace"], ["minirl.main_ppo"]])
def test_misspelt_key_ends_every_command_with_one_line(command):
    done = subprocess.run(
        [sys.executable, "-m", *command, "algorithm.adv_estimater=grpo"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "did you mean algorithm.adv_estimator?" in done.stderr


def test_main_ppo_takes_options_that_argparse_does_not_know_as_a_user_error(capsys):
    assert main_ppo.main(["--precision", "fp16"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --precision; see --help\n"


def test_unread_pipe_is_no_error():
    script = "import sys; from minirl import cli; sys.exit(cli.main(['config']))"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
