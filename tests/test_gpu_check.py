"""`make gpu-check`, as far as a machine without a GPU can show: the whole script on a CPU, its refusals."""

import json

import pytest
import torch

from benchmarks import gpu_check


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "record.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: PyTorch sees no GPU") and not list(tmp_path.iterdir())


def test_a_function_that_differs_from_the_cpu_is_named(monkeypatch):
    calls = {
        "right": lambda device: [torch.ones(2)],
        "wrong": lambda device: [torch.ones(2) + (0.01 if device == "cuda" else 0)],
        "broken": lambda device: [torch.full((2,), torch.nan if device == "cuda" else 1.0)],
    }
    monkeypatch.setattr(gpu_check, "_calls", lambda: calls)
    with pytest.raises(ArithmeticError, match="wrong, broken$"):
        gpu_check.algorithms("cuda")


def test_a_part_that_fails_is_recorded_and_the_others_still_run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "algorithms", lambda device: 1 / 0)
    monkeypatch.setattr(gpu_check, "placements", lambda device: {})
    monkeypatch.setattr(gpu_check, "traced_step", lambda device: {"load": {}})
    monkeypatch.setattr(gpu_check, "throughput", lambda device, folder: {})
    out = tmp_path / "record.json"
    assert gpu_check.main(["--device", "cpu", "--out", str(out)]) == 1
    record = json.loads(out.read_text())
    assert record["parts"]["algorithms"]["error"] == "ZeroDivisionError: division by zero"
    assert "load" in record["parts"]["trace"] and record["ok"] is False


@pytest.mark.slow
def test_the_whole_script_runs_on_a_cpu_and_its_record_says_so(tmp_path, ray_cluster):
    out = tmp_path / "record.json"
    assert gpu_check.main(["--device", "cpu", "--steps", "3", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["device"]["kind"] == "cpu" and record["versions"]["torch"] == torch.__version__
    parts = record["parts"]
    assert list(parts) == [
        "algorithms", "placement local, builtin", "placement ray, builtin", "trace", "throughput",
    ]  # fmt: skip
    assert parts["algorithms"]["functions"] >= 39 and max(parts["algorithms"]["differences"].values()) == 0
    assert parts["placement local, builtin"]["reward_last"] == parts["placement ray, builtin"]["reward_last"]
    assert parts["trace"]["rollout"]["devices"] == ["cpu"]
    assert parts["throughput"]["update_tokens_per_s"] > 0
