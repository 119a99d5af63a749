"""The numbers and the runnable claims of book/week1/day1_prerequisites.md."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minirl.pin import use_verl, verl_root

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book/week1/day1_prerequisites.md").read_text(encoding="utf-8")


def _cells(first: str) -> list[str]:
    found = re.findall(rf"^\| {re.escape(first)} \|.*$", PAGE, re.M)
    assert len(found) == 1, (first, found)
    return [cell.strip() for cell in found[0].strip("|").split("|")][1:]


START = torch.tensor([1.0, 1.0, 0.0, 0.0])  # logits of the answers 4, 6, 8, 10
SCORES = torch.tensor([1.0, 0.0, 0.0, 0.0])


def _after_one_step(loss) -> torch.Tensor:
    logits = START.clone().requires_grad_()
    loss(logits.log_softmax(0)).backward()
    return (logits - logits.grad).detach().softmax(0)


def _sft(log_pi):
    return -log_pi[0]


def _dpo(log_pi):
    ref = START.log_softmax(0)
    return -F.logsigmoid((log_pi[0] - ref[0]) - (log_pi[1] - ref[1]))


def _policy_gradient(log_pi):
    advantages = (SCORES - SCORES.mean()) / SCORES.std()
    return -(advantages * log_pi).mean()


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ("现在的概率", None),
        ("SFT 推一步后", _sft),
        ("DPO 推一步后", _dpo),
        ("策略梯度推一步后", _policy_gradient),
    ],
)
def test_probabilities_after_one_step_of_each_loss(row, loss):
    pi = START.softmax(0) if loss is None else _after_one_step(loss)
    assert _cells(row) == [f"{100 * p:.1f}%" for p in pi.tolist()]


@pytest.mark.parametrize(("row", "loss"), [("SFT", _sft), ("DPO", _dpo), ("策略梯度", _policy_gradient)])
def test_what_each_loss_adds_to_the_logits(row, loss):
    logits = START.clone().requires_grad_()
    loss(logits.log_softmax(0)).backward()
    shown = [float(cell.replace("−", "-")) for cell in _cells(row)[:4]]
    assert shown == pytest.approx((-logits.grad).tolist(), abs=5.1e-4)


def test_the_advantages_by_hand():
    mean, std = SCORES.mean().item(), SCORES.std().item()  # std over n - 1
    for score, shown in ((1, "(1 − 0.25) / 0.5 = +1.5"), (0, "(0 − 0.25) / 0.5 = −0.5")):
        assert f"({score} − {mean:g}) / {std:g} = {(score - mean) / std:+g}".replace("-", "−") == shown
        assert shown in PAGE


def test_dpo_leaves_the_other_logits_alone():
    logits = START.clone().requires_grad_()
    _dpo(logits.log_softmax(0)).backward()
    assert logits.grad[2:].abs().max() < 1e-6 < logits.grad[1]


def test_all_wrong_gives_no_policy_gradient():
    logits = START.clone().requires_grad_()
    scores = torch.zeros(4)
    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
    (-(advantages * logits.log_softmax(0)).mean()).backward()
    assert not logits.grad.any()


def test_sft_is_the_policy_gradient_with_every_advantage_one():
    log_pi = START.log_softmax(0)
    assert torch.equal(-(torch.ones(4) * log_pi).mean(), -log_pi.mean())


@pytest.mark.oracle
def test_advantages_add_up_per_prefix_and_token():
    """The two tables of 从一个 token 到一整条响应, with verl's own advantages."""
    use_verl()
    import numpy as np
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    responses = {k: [cell.strip("`") for cell in _cells(str(k))] for k in (1, 2, 3, 4)}
    rewards = torch.tensor([[0.0, float(row[2])] for row in responses.values()])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 2), np.array(["q"] * 4))
    pushes = Counter()
    for (first, second, _, shown), row in zip(responses.values(), advantages.tolist(), strict=True):
        assert [float(shown.replace("−", "-"))] * 2 == pytest.approx(row, abs=1e-4)
        pushes["题目", first] += row[0]
        pushes[f"题目，`{first}`", second] += row[1]
    section = PAGE.split("| 前面 | 这里写 |")[1].split("\n\n")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    shown = {(before, here.strip("`")): float(push.replace("−", "-")) for before, here, _, push in table}
    assert shown == pytest.approx(pushes, abs=1e-4)


@pytest.mark.oracle
def test_gpg_is_the_plain_policy_gradient_of_the_page():
    use_verl()
    from types import SimpleNamespace

    from verl.trainer.ppo.core_algos import compute_policy_loss_gpg

    log_prob = torch.tensor([[-0.5, -1.0], [-2.0, 0.0]])
    advantages, mask = torch.tensor([[1.5], [-0.5]]).expand(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    config = SimpleNamespace(global_batch_info={})
    by_hand = -(mask * advantages * log_prob).sum() / mask.sum()
    for old in (torch.zeros(2, 2), torch.randn(2, 2)):  # the old log-probs are not read
        loss, metrics = compute_policy_loss_gpg(old, log_prob, advantages, mask, config=config)
        assert loss.item() == pytest.approx(by_hand.item()) and metrics == {}


@pytest.mark.oracle
def test_the_kl_table_is_what_verl_computes():
    use_verl()
    from verl.trainer.ppo.core_algos import kl_penalty_forward

    pi, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    columns = [kl_penalty_forward(pi.log(), ref.log(), name) for name in ("k1", "k2", "k3")]
    for i, token in enumerate("xyz"):
        shown = [float(c.replace("−", "-")) for c in _cells(token)]
        expected = [pi[i].item(), ref[i].item(), *(c[i].item() for c in columns)]
        assert shown == pytest.approx(expected, abs=5.1e-5)
    means = [float(c) for c in _cells("按 $\\pi_\\theta$ 平均") if c]
    assert means == pytest.approx([(pi * c).sum().item() for c in columns], abs=5.1e-5)
    spreads = [((pi * c * c).sum() - (pi * c).sum() ** 2).sqrt().item() for c in columns]
    assert [float(c) for c in _cells("单格的标准差") if c] == pytest.approx(spreads, abs=5.1e-5)
    truth = (pi * (pi / ref).log()).sum().item()
    assert [(pi * columns[i]).sum().item() for i in (0, 2)] == pytest.approx([truth, truth], abs=1e-6)


@pytest.mark.oracle
def test_the_log_prob_by_hand():
    use_verl()
    from verl.utils.torch_functional import logprobs_from_logits, logprobs_from_logits_naive

    logits, label = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    value = logprobs_from_logits_naive(logits, label)
    assert f"{value.item():.4f}" == "-0.4076" and "-0.4076" in PAGE
    assert f"{100 * value.exp().item():.1f}%" == "66.5%" and "66.5%" in PAGE
    assert torch.allclose(logprobs_from_logits(logits, label), value)


@pytest.mark.oracle
def test_response_log_probs_come_from_one_position_to_the_left():
    use_verl()
    from tensordict import TensorDict
    from verl.workers.utils.padding import no_padding_2_padding

    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])  # responses of 2 and 1 tokens
    data = TensorDict(
        {"prompts": mask[:, :3], "responses": mask[:, 3:], "attention_mask": mask}, batch_size=2
    )
    assert no_padding_2_padding(torch.arange(9.0), data).tolist() == [[2.0, 3.0], [7.0, 0.0]]
    assert "第 0 行 [2, 4)，第 1 行 [7, 8)" in PAGE


@pytest.mark.oracle
def test_defaults_named_on_the_page():
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(verl_root() / "verl/trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"])
    assert config.algorithm.kl_penalty == "kl"
    assert config.actor_rollout_ref.actor.kl_loss_type == "low_var_kl"
    assert config.critic.enable is None and config.reward.reward_model.enable is False


@pytest.mark.oracle
def test_role_names():
    use_verl()
    from verl.trainer.ppo.utils import Role

    assert str(Role.RefPolicy) == "ref" and str(Role.ActorRollout) == "actor_rollout"
    assert str(Role.Env) == "env"  # not in the table: the lower-case name


@pytest.mark.oracle
def test_the_package_has_sft_but_no_dpo():
    package = verl_root() / "verl"
    assert (package / "trainer/sft_trainer.py").is_file()
    word = re.compile(r"\bdpo\b", re.I)
    hits = [p for p in package.rglob("*.py") if word.search(p.read_text(encoding="utf-8", errors="ignore"))]
    assert not hits, hits
