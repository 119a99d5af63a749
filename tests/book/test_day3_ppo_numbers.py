"""The numbers printed in book/week1/day3_ppo.md, recomputed with verl 0.8.0's own functions.

Those of the one real token come from the notebook's own batch: one step of the tiny task, three seconds.
"""

import re
from pathlib import Path

import pytest
import torch
from runs import full

from minirl import presets
from minirl.pin import find_symbol, use_verl
from minirl.trace import trace
from minirl.trainer import PPOTrainer

use_verl()

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

PAGE = Path(__file__).parents[2] / "book" / "week1" / "day3_ppo.md"
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.5, 0.6, 0.4, 0.7, 0.9]])
MASK = torch.ones(1, 5)
LAST_DIGIT = 5.01e-4  # three decimals, rounded from the unrounded number
OLD = torch.tensor([[-0.2, -0.3, -0.6, -0.1, -1.6]])
NEW = torch.tensor([[-0.1, -0.7, -0.3, -0.15, -0.3]])
REF = torch.tensor([[-0.7, -0.3, -0.8, -0.05, -1.6]])


def _page() -> str:
    return PAGE.read_text(encoding="utf-8").replace("−", "-")


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table whose header holds `heading`, one list per row."""
    lines = _page().split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and heading in line)
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def _column(heading: str, column: int) -> list[float]:
    return [float(row[column]) for row in _rows(heading)]


def _actor_config(**clip: float) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clip)


def _loss(log_ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    """verl's loss of one token whose old log-prob is 0."""
    return core_algos.compute_policy_loss_vanilla(
        torch.zeros(1, 1),
        log_ratio,
        torch.tensor([[advantage]]),
        torch.ones(1, 1),
        "token-mean",
        _actor_config(),
    )[0]


def test_gae_table_is_what_verl_computes():
    advantages, returns = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    table = "$\\hat A_t=\\delta_t+0.5"
    assert _column(table, 2) == REWARDS[0].tolist()
    assert _column(table, 3) == pytest.approx(VALUES[0].tolist())
    one_step, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.0)
    deltas = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.0)[1] - VALUES
    assert one_step.shape == deltas.shape == (1, 5)
    assert _column(table, 4) == pytest.approx(deltas[0].tolist(), abs=1e-6)
    assert _column(table, 5) == pytest.approx((returns - VALUES)[0].tolist(), abs=1e-6)
    assert _column(table, 6) == pytest.approx(returns[0].tolist(), abs=1e-6)
    assert _column(table, 7) == pytest.approx(advantages[0].tolist(), abs=LAST_DIGIT)


def test_lambda_one_makes_the_critic_a_baseline():
    _, returns = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 1.0)
    assert (returns - VALUES)[0].tolist() == pytest.approx([0.5, 0.4, 0.6, 0.3, 0.1])
    deltas = [
        float(number)
        for number in re.search(r"\\hat A_0=([^=]*)=0.5=1-V_0", _page())[1].replace("-", "+-").split("+")
    ]
    assert deltas == pytest.approx(_column("$\\hat A_t=\\delta_t+0.5", 4)) and sum(deltas) == pytest.approx(
        0.5
    )


def test_five_token_loss_table_is_what_verl_computes():
    advantages, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    new = NEW.clone().requires_grad_()
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        OLD, new, advantages, MASK, "token-mean", _actor_config()
    )
    loss.backward()

    table = "| loss | 梯度 |"
    assert _column(table, 2) == pytest.approx(OLD[0].tolist())
    assert _column(table, 3) == pytest.approx(NEW[0].tolist())
    ratio = (NEW - OLD).exp()
    assert _column(table, 4) == pytest.approx(ratio[0].tolist(), abs=LAST_DIGIT)
    assert _column(table, 5) == pytest.approx((-advantages * ratio)[0].tolist(), abs=LAST_DIGIT)
    assert _column(table, 6) == pytest.approx(
        (-advantages * ratio.clamp(0.8, 1.2))[0].tolist(), abs=LAST_DIGIT
    )
    per_token = []
    for t in range(5):  # one token at a time: the mean over one token is its loss
        only = torch.zeros(1, 5)
        only[0, t] = 1
        per_token.append(
            core_algos.compute_policy_loss_vanilla(OLD, NEW, advantages, only, "token-mean", _actor_config())[
                0
            ].item()
        )
    assert _column(table, 7) == pytest.approx(per_token, abs=LAST_DIGIT)
    gradients = [float(row[8].split("：")[0]) for row in _rows(table)]
    assert gradients == pytest.approx(new.grad[0].tolist(), abs=LAST_DIGIT)
    assert [g == 0 for g in gradients] == [g == 0 for g in new.grad[0].tolist()]
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.4)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.25)


def test_before_the_first_update_every_token_has_a_gradient():
    advantages, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    old = OLD.clone().requires_grad_()
    core_algos.compute_policy_loss_vanilla(OLD, old, advantages, MASK, "token-mean", _actor_config())[
        0
    ].backward()
    printed = re.search(r"五个都有：([^。]*[0-9])。", _page())[1].split("、")
    assert old.grad[0].tolist() == pytest.approx([float(n) for n in printed], abs=LAST_DIGIT)
    uncapped = -advantages[0, 4] * (NEW - OLD).exp()[0, 4] / 5
    assert uncapped.item() == pytest.approx(float(re.search(r"此刻是 ([0-9.]+)", _page())[1]), abs=LAST_DIGIT)


def test_the_dots_of_the_clip_figure_lie_on_verls_loss():
    """Pixels: rho starts at x = 40, 145 or 72.5 to the unit; loss / |A| is drawn 110 or 50 to the unit."""
    advantages, _ = core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK, 1.0, 0.5)
    ratio = (NEW - OLD).exp()
    drawn = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', _page())
    tokens = [3, 2, 0, 1, 4]  # in the order drawn: = and 3 on the left; 2, + and 5 on the right
    assert len(drawn) == len(tokens)
    for (x, y), t in zip(drawn, tokens, strict=True):
        A = advantages[0, t].item()
        loss = _loss((NEW - OLD)[:, t : t + 1], A).item() / abs(A)
        across, zero, down = (145, 60, -110) if A > 0 else (72.5, 210, -50)
        assert float(x) == pytest.approx(40 + across * ratio[0, t].item(), abs=0.1)
        assert float(y) == pytest.approx(zero + down * loss, abs=0.1)


@pytest.fixture(scope="module")
def one_step():
    """The batch of section 4 of the notebook, on the CPU: rows in the order of generation."""
    config = full(*presets.get("cpu").overrides, "trainer.total_epochs=100", steps=1)
    trainer = PPOTrainer(config)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    with trace(trainer, samples=range(rows)) as ppo:
        trainer.fit()
    keys = ["responses", "response_mask", "token_level_scores", "old_log_probs", "values"]
    keys += ["returns", "advantages"]
    batch = {key: torch.tensor([ppo.steps[0].row(i, key) for i in range(rows)]) for key in keys}
    return batch, trainer.tokenizer


def test_the_token_of_the_bridge_is_token_14_of_trajectory_0(one_step):
    batch, tokenizer = one_step
    mask = batch["response_mask"][0].bool()
    text = tokenizer.decode(batch["responses"][0][mask][:-1])
    written = re.search(r"响应写成 `([^`]*)`", _page())[1]
    assert text.replace("\n", "⏎") == written
    assert tokenizer.decode(batch["responses"][0, 14:15]) == "4" and batch["token_level_scores"][0].sum() == 0

    value, after = batch["values"][0, 14:16].tolist()
    A, old = batch["advantages"][0, 14].item(), batch["old_log_probs"][0, 14].exp().item()
    said = {
        "critic 估 0.63": value,
        "\\hat A=0-0.63=-0.63": value,
        "0.71-0.63=+0.08": after - value,
        "A=-1.73": -A,
        "概率是 21.8%": 100 * old,
        "成了 19.7%": 90 * old,
        "写 218 次": 1000 * old,
        "会写 197 次": 900 * old,
    }
    for words, number in said.items():
        assert words in _page(), words
        digits = re.findall(r"[\d.]+", words)[-1]
        half = 0.5 * 10 ** -len(digits.partition(".")[2])
        assert number == pytest.approx(float(digits), abs=1.01 * half), words
    assert batch["returns"][0, 14] == 0 and f"{after:.2f}" == "0.71"

    whitened, _ = core_algos.compute_gae_advantage_return(
        batch["token_level_scores"], batch["values"], batch["response_mask"], 1.0, 1.0
    )
    assert whitened[0, 14].item() == pytest.approx(A, abs=1e-4)

    table = "| 还推吗 |"
    for row in _rows(table):
        rho = float(row[0])
        log_prob = torch.tensor([[rho]]).log().requires_grad_()
        loss = _loss(log_prob, A)
        loss.backward()
        expected = [-A * rho, -A * min(max(rho, 0.8), 1.2), loss.item()]
        assert [float(cell) for cell in row[1:4]] == pytest.approx(expected, abs=5.5e-3), rho
        assert row[4].startswith("推") == (log_prob.grad.item() != 0), rho
    assert [row[4].split("：")[0] for row in _rows(table)] == ["推", "推", "不推", "推", "不推"]


def test_the_ratio_gives_the_gradient_of_day_one_before_the_first_update():
    log_prob = torch.zeros(1, 1, requires_grad=True)  # old = new, as in _loss
    _loss(log_prob, -1.73).backward()
    day_one = torch.zeros(1, 1, requires_grad=True)
    core_algos.compute_policy_loss_gpg(
        day_one, day_one, torch.tensor([[-1.73]]), torch.ones(1, 1), "token-mean", _actor_config()
    )[0].backward()
    assert log_prob.grad.item() == pytest.approx(day_one.grad.item()) == pytest.approx(1.73)


def test_in_the_notebooks_batch_every_token_of_a_right_response_is_pushed_up(one_step):
    batch, _ = one_step
    right = batch["token_level_scores"].sum(1) > 0
    rows, correct = re.search(r"那批 (\d+) 条只对了 (\d+) 条", _page()).groups()
    assert (len(right), int(right.sum())) == (int(rows), int(correct))
    assert (batch["advantages"][right][batch["response_mask"][right].bool()] > 0).all()


def test_the_critic_knows_most_once_the_answer_is_written(one_step):
    """Explained variance of the last cell (the answer stands, the end follows) and of the one before it."""
    batch, tokenizer = one_step
    length = batch["response_mask"].sum(1)
    rows = torch.arange(len(length))
    ends = batch["responses"][rows, length - 1]
    assert (ends == tokenizer.eos_token_id).all()

    def explained(back: int) -> float:
        values, returns = (batch[key][rows, length - back] for key in ("values", "returns"))
        return (1 - (returns - values).var() / (returns.var() + 1e-5)).item()

    assert explained(1) > 0.65
    assert all(0.2 < explained(back) < 0.5 for back in range(2, 9))


def test_gradients_of_the_kl_estimates_as_a_loss():
    """Expectation over the whole vocabulary of three, through the logits of the policy."""
    policy, ref = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])

    def gradient(loss) -> list[float]:
        logits = policy.log().requires_grad_()
        return torch.autograd.grad(loss(logits.log_softmax(0)), logits)[0].tolist()

    def estimate(kind: str) -> list[float]:
        return gradient(lambda log_prob: (policy * core_algos.kl_penalty(log_prob, ref.log(), kind)).sum())

    true = gradient(lambda log_prob: (log_prob.exp() * (log_prob - ref.log())).sum())
    reverse = gradient(lambda log_prob: (ref * (ref.log() - log_prob)).sum())
    expected = {"真 KL": true} | {kind: estimate(kind) for kind in ("k1", "k2", "k3")}
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in _rows("| 当 loss 用 |")}
    assert rows.keys() == expected.keys()
    for kind, numbers in expected.items():
        assert rows[kind] == pytest.approx(numbers, abs=5.1e-5), kind
    assert estimate("k2") == pytest.approx(true, abs=1e-6)
    assert estimate("k3") == pytest.approx(reverse, abs=1e-6)
    assert estimate("k3") == pytest.approx((policy - ref).tolist(), abs=1e-6)
    assert estimate("k3+") == pytest.approx(true, abs=1e-6)
    values = [core_algos.kl_penalty(policy.log(), ref.log(), kind) for kind in ("k3", "k3+")]
    torch.testing.assert_close(*values)


def test_kl_in_the_reward_gives_every_token_a_reward():
    kl = core_algos.kl_penalty(OLD, REF, "kl")
    assert kl[0].tolist() == pytest.approx([0.5, 0.0, 0.2, -0.05, 0.0], abs=1e-6)
    assert (REWARDS - 0.1 * kl)[0].tolist() == pytest.approx([-0.05, 0.0, -0.02, 0.005, 1.0], abs=1e-6)


def test_adaptive_kl_changes_by_at_most_two_percent_at_1024_rows():
    far, near = (core_algos.AdaptiveKLController(1.0, 0.1, 10000) for _ in range(2))
    far.update(1.0, 1024)
    near.update(0.12, 1024)
    assert far.value == pytest.approx(near.value) == pytest.approx(1.02048)
    zero = core_algos.AdaptiveKLController(0.0, 0.1, 10000)
    zero.update(1.0, 1024)
    assert zero.value == 0


def test_agg_loss_table_is_what_verl_computes():
    losses = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    rows = _rows("`loss_agg_mode`")
    assert len(rows) == 4
    for mode, _, result in rows:
        name = re.match(r"`([\w-]+)`", mode)[1]
        assert core_algos.agg_loss(losses, mask, name).item() == pytest.approx(
            float(result), abs=LAST_DIGIT
        ), name


def test_value_clip_example_has_no_gradient():
    vpreds = torch.tensor([[0.9]], requires_grad=True)
    loss, clipfrac = core_algos.compute_value_loss(
        vpreds, torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1), cliprange_value=0.5
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.25) and clipfrac == 1 and vpreds.grad.item() == 0


def test_value_loss_gradient_grows_with_the_number_of_micro_batches():
    """0.8.0 divides each micro-batch by its own tokens; the policy loss, told the global count, does not."""
    returns, values, mask = torch.ones(4, 3), torch.zeros(4, 3), torch.ones(4, 3)

    def gradient(rows: int) -> float:
        vpreds = torch.full((4, 3), 0.2, requires_grad=True)
        for part in vpreds.split(rows):
            k = part.shape[0]
            core_algos.compute_value_loss(part, returns[:k], values[:k], mask[:k], cliprange_value=0.5)[
                0
            ].backward()
        return vpreds.grad.abs().sum().item()

    assert gradient(2) == pytest.approx(2 * gradient(4))


def test_tool_output_is_stepped_over():
    values = torch.tensor([[0.5, 0.6, 0.0, 0.0, 0.8]])
    for mask, first_two in (([1, 1, 0, 0, 1], [0.25, 0.3]), ([1, 1, 1, 1, 1], [-0.0875, -0.375])):
        mask = torch.tensor([mask])
        _, returns = core_algos.compute_gae_advantage_return(REWARDS, values, mask, 1.0, 0.5)
        assert (returns - values)[0, :2].tolist() == pytest.approx(first_two, abs=1e-6)


def test_reward_on_a_masked_token_is_lost_to_gae_and_counted_by_grpo():
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    rewarded = core_algos.compute_gae_advantage_return(REWARDS, VALUES, mask, 1.0, 1.0)[1]
    unrewarded = core_algos.compute_gae_advantage_return(torch.zeros(1, 5), VALUES, mask, 1.0, 1.0)[1]
    assert torch.equal(rewarded[:, :4], unrewarded[:, :4])
    advantages, _ = core_algos.compute_grpo_outcome_advantage(REWARDS, mask, ["a"])
    assert advantages[0, 0].item() == pytest.approx(1.0, abs=1e-5)


def test_what_whitening_leaves_under_a_zero_of_the_mask_can_be_huge():
    """Every generated token has a = 1, so the spread is 0 and the padding's a = 0 becomes (0 - 1) / 1e-4."""
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[1, 1, 1, 0]])
    advantages, _ = core_algos.compute_gae_advantage_return(rewards, torch.zeros(1, 4), mask, 1.0, 1.0)
    assert advantages[0, 3].item() == pytest.approx(-10_000, rel=1e-3)


def test_gae_takes_no_bool_mask():
    with pytest.raises(RuntimeError, match="bool"):
        core_algos.compute_gae_advantage_return(REWARDS, VALUES, MASK.bool(), 1.0, 1.0)


def test_k3_is_never_negative_and_k1_can_be():
    log_prob, ref = torch.randn(1000), torch.randn(1000)
    assert core_algos.kl_penalty(log_prob, ref, "k3").min() >= 0
    assert core_algos.kl_penalty(log_prob, ref, "k1").min() < 0
    with pytest.raises(NotImplementedError):
        core_algos.kl_penalty(log_prob, ref, "full")


def test_kl_in_the_reward_carries_no_gradient_and_uses_old_log_probs():
    source = "\n".join(find_symbol("verl.trainer.ppo.ray_trainer:apply_kl_penalty").lines)
    assert 'data.batch["old_log_probs"], data.batch["ref_log_prob"]' in source
    rewards = REWARDS - 0.1 * core_algos.kl_penalty(OLD, REF, "kl")
    values = VALUES.clone().requires_grad_()
    advantages, _ = core_algos.compute_gae_advantage_return(rewards, values, MASK, 1.0, 1.0)
    assert not advantages.requires_grad
