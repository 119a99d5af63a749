"""Every metric equals verl's on random batches; verl's own metric tests pass on minirl.metrics."""

import ast
import unittest

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import minirl.metrics as ours
from minirl.pin import use_verl, verl_root
from minirl.protocol import DataProto

use_verl()
from verl.protocol import DataProto as VerlDataProto  # noqa: E402
from verl.trainer.ppo import metric_utils as theirs  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.utils.debug import metrics as their_debug  # noqa: E402
from verl.utils.logger.aggregate_logger import concat_dict_to_str  # noqa: E402
from verl.utils.metric import utils as their_reduce  # noqa: E402

pytestmark = pytest.mark.oracle

SUITE = "tests/trainer/ppo/test_metric_utils_on_cpu.py"
SWAPPED = ("verl.trainer.ppo.metric_utils", "verl.utils.metric", "verl.utils.metric.utils")


def random_batch(seed: int, aborted: int = 0, weights: bool = False):
    g = torch.Generator().manual_seed(seed)
    rows, prompt, width = 12, 7, 9
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[:aborted] = 0
    prompt_lengths = torch.randint(1, prompt + 1, (rows,), generator=g)
    response_attention = (torch.arange(width) < lengths[:, None]).long()
    prompt_attention = (torch.arange(prompt) >= prompt - prompt_lengths[:, None]).long()
    response_mask = response_attention * (torch.rand(rows, width, generator=g) > 0.2)
    tensors = {
        "prompts": torch.zeros(rows, prompt, dtype=torch.long),
        "responses": torch.zeros(rows, width, dtype=torch.long),
        "attention_mask": torch.cat([prompt_attention, response_attention], dim=1),
        "response_mask": response_mask,
    }
    for key in ("token_level_scores", "token_level_rewards", "advantages", "returns", "values"):
        tensors[key] = torch.randn(rows, width, generator=g)
    for key in ("old_log_probs", "rollout_log_probs"):
        tensors[key] = -torch.rand(rows, width, generator=g) * 3
    tensors["sum_pi_squared"] = torch.rand(rows, width, generator=g)
    if weights:
        tensors["rollout_is_weights"] = torch.rand(rows, width, generator=g) * 2
        tensors["rollout_is_weights"][torch.rand(rows, width, generator=g) < 0.2] = 0.0
    columns = {"__num_turns__": np.arange(rows, dtype=np.int32), "tool_call_counts": np.arange(rows) * 2}
    meta = {"global_token_num": tensors["attention_mask"].sum(-1).tolist()}
    pair = []
    for cls in (DataProto, VerlDataProto):
        copied = {key: value.clone() for key, value in tensors.items()}
        pair.append(cls(TensorDict(copied, batch_size=[rows]), dict(columns), dict(meta)))
    return pair


def assert_same(mine: dict, verls: dict) -> None:
    assert list(sorted(mine)) == list(sorted(verls))
    for key in mine:
        assert mine[key] == pytest.approx(verls[key], rel=1e-5, abs=1e-6, nan_ok=True), key


@pytest.mark.parametrize("aborted", [0, 3, 12])
@pytest.mark.parametrize("use_critic", [True, False])
def test_data_metrics_are_verls(aborted, use_critic):
    mine, verls = random_batch(aborted, aborted)
    assert_same(ours.compute_data_metrics(mine, use_critic), theirs.compute_data_metrics(verls, use_critic))


def test_timing_and_throughput_metrics_are_verls():
    mine, verls = random_batch(1)
    timing = {
        "gen": 0.5,
        "ref": 0.1,
        "values": 0.2,
        "adv": 0.01,
        "update_actor": 1.0,
        "step": 2.5,
        "testing": 3.0,
    }
    assert_same(ours.compute_timing_metrics(mine, timing), theirs.compute_timing_metrics(verls, timing))
    assert_same(
        ours.compute_throughout_metrics(mine, timing, 3), theirs.compute_throughout_metrics(verls, timing, 3)
    )


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("gradient_norm", [None, 0.3, 30.0])
def test_variance_proxy_metrics_are_verls(weights, gradient_norm):
    mine, verls = random_batch(2, weights=weights)
    assert_same(
        ours.compute_variance_proxy_metrics(mine, gradient_norm),
        theirs.compute_variance_proxy_metrics(verls, gradient_norm),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_debug_metrics_are_verls(masked):
    mine, verls = random_batch(3)
    if masked:
        for data in (mine, verls):
            data.batch["response_mask"] = torch.zeros_like(data.batch["response_mask"])
    assert_same(ours.calculate_debug_metrics(mine), their_debug.calculate_debug_metrics(verls))


def validation_input(seed: int, n: int):
    rng = np.random.default_rng(seed)
    prompts = 5
    uids = np.repeat([f"u{i}" for i in range(prompts)], n)
    sources = np.repeat(["openai/gsm8k", "other", "openai/gsm8k", "other", "other"], n)
    rows = prompts * n
    infos = {
        "reward": rng.normal(size=rows).tolist(),
        "acc": (rng.random(rows) > 0.5).tolist(),
        "pred": [str(x) for x in rng.integers(0, 3, rows)],
        "text": ["a"] * rows,
    }
    return sources, uids, infos


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", [42, 7])
def test_validation_metrics_are_verls_bootstrap_included(n, seed):
    sources, uids, infos = validation_input(n, n)
    mine = ours.process_validation_metrics(sources, uids, infos, seed=seed)
    verls = theirs.process_validation_metrics(sources, uids, infos, seed=seed)
    assert set(mine) == set(verls)
    for source in mine:
        assert set(mine[source]) == set(verls[source]) == {"reward", "acc"}
        for variable in mine[source]:
            assert_same(mine[source][variable], verls[source][variable])


@pytest.mark.parametrize("with_acc", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_logged_validation_names_and_values_are_verls(with_acc, n):
    sources, uids, infos = validation_input(3, n)
    if not with_acc:
        del infos["acc"]
    turns = [np.array([2, 2, 4], dtype=np.int32), np.array([6], dtype=np.int32)]
    trainer = object.__new__(RayPPOTrainer)
    assert_same(
        ours.val_metrics_update(sources, uids, infos, turns),
        trainer._val_metrics_update(sources, uids, infos, turns),
    )


def test_reduced_metrics_are_verls():
    lists = {"loss": [1.0, 2.5], "grad_max": [1, 5], "x/min": [3, 2], "minmax": [1, 2, 9], "admin": [4, 8]}
    assert_same(ours.reduce_metrics(lists), their_reduce.reduce_metrics(dict(lists)))


def test_log_line_is_verls_for_plain_numbers():
    metrics = {
        "a/b": 0.1,
        "lr": 1e-06,
        "n": 3,
        "flag": True,
        "nan": float("nan"),
        "text": "no",
        "t": torch.ones(1),
    }
    assert ours.format_log_line(metrics, 12) == concat_dict_to_str(metrics, 12)


# ---- verl's own tests, read from the installed wheel ---------------------------------


class SwapToOurs(ast.NodeTransformer):
    """`from verl.... import X` takes X from minirl.metrics, and so does the name that a test patches."""

    def visit_ImportFrom(self, node):
        if node.module in SWAPPED:
            node.module = "minirl.metrics"
        return node

    def visit_Constant(self, node):
        if node.value == "verl.trainer.ppo.metric_utils._compute_response_info":
            return ast.copy_location(ast.Constant("minirl.metrics._compute_response_info"), node)
        return node


def swapped_suite() -> unittest.TestSuite:
    tree = ast.parse((verl_root() / SUITE).read_text(encoding="utf-8"))
    tree = ast.fix_missing_locations(SwapToOurs().visit(tree))
    namespace = {"__name__": "verl_metric_suite_on_minirl"}
    exec(compile(tree, SUITE, "exec"), namespace)
    assert (
        namespace["Metric"] is ours.Metric and namespace["compute_data_metrics"] is ours.compute_data_metrics
    )
    loader = unittest.TestLoader()
    cases = [c for c in namespace.values() if isinstance(c, type) and issubclass(c, unittest.TestCase)]
    return unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)


TESTS = [test for case in swapped_suite() for test in case]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.id().split(".", 1)[1])
def test_verls_own_metric_test_passes_on_minirl(test):
    result = unittest.TestResult()
    test.run(result)
    assert result.testsRun == 1 and result.wasSuccessful(), result.errors + result.failures


def test_the_whole_suite_is_run():
    source = (verl_root() / SUITE).read_text(encoding="utf-8")
    assert len(TESTS) == source.count("    def test_") == 35
