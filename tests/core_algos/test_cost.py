"""What the docstrings say of the cost: operations of size [B, R] are counted while each function runs."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minirl.config import compose
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage
from minirl.core_algos.agg_loss import LOSS_AGG_MODES, agg_loss
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY
from minirl.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from minirl.core_algos.value_loss import compute_value_loss

B, R = 12, 37
ACTOR = compose(["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"]).actor_rollout_ref.actor
STATED = re.compile(r"Cost: (\d+) passes over \[B, R\]")
VIEWS = frozenset("view expand unsqueeze squeeze permute transpose t select slice detach alias".split())


class CountPasses(TorchDispatchMode):
    """Counts the operations that read or write a tensor of at least B·R elements; a view costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if name not in VIEWS and any(tensor.numel() >= B * R for tensor in tensors):
            self.passes += 1
        return out


def random_batch():
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, R + 1, (B,), generator=rng)
    rewards = torch.zeros(B, R)
    rewards[torch.arange(B), lengths - 1] = torch.randint(0, 2, (B,), generator=rng).float()
    log_prob, old_log_prob, advantages, values = -torch.rand(4, B, R, generator=rng)
    return SimpleNamespace(
        mask=(torch.arange(R) < lengths.unsqueeze(-1)).long(),
        index=np.array([f"prompt {row // 4}" for row in range(B)], dtype=object),
        rewards=rewards,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages + 0.5,
        values=values,
    )


def assert_cost_is_as_stated(documented, run, *, stated=None):
    stated = stated or int(STATED.search(documented.__doc__)[1])
    with CountPasses() as counter:
        run()
    assert counter.passes == pytest.approx(stated, rel=0.1, abs=1), (documented.__name__, counter.passes)


@pytest.mark.parametrize("name", [n for n, fn in ADV_ESTIMATOR_REGISTRY.items() if STATED.search(fn.__doc__)])
def test_an_advantage_estimator_makes_as_many_passes_as_it_says(name):
    batch = random_batch()
    assert_cost_is_as_stated(
        ADV_ESTIMATOR_REGISTRY[name],
        lambda: estimate_advantage(
            name,
            token_level_rewards=batch.rewards,
            response_mask=batch.mask,
            index=batch.index,
            values=batch.values,
            gamma=1.0,
            lam=0.95,
            reward_baselines=torch.zeros(B),
            component_scores=torch.arange(2.0 * B).view(2, B),
            old_log_probs=batch.old_log_prob,
            sum_pi_squared=torch.full((B, R), 0.5),
        ),
    )


@pytest.mark.parametrize("name", [n for n, fn in POLICY_LOSS_REGISTRY.items() if n != "bypass_mode"])
def test_a_policy_loss_makes_as_many_passes_as_it_says(name):
    batch = random_batch()
    loss_fn = POLICY_LOSS_REGISTRY[name]
    assert_cost_is_as_stated(
        loss_fn,
        lambda: loss_fn(
            batch.old_log_prob,
            batch.log_prob,
            batch.advantages,
            batch.mask,
            loss_agg_mode="token-mean",
            config=ACTOR,
        ),
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_aggregation_makes_as_many_passes_as_it_says(mode):
    batch = random_batch()
    assert_cost_is_as_stated(agg_loss, lambda: agg_loss(batch.values, batch.mask, mode))


def test_the_value_loss_makes_as_many_passes_as_it_says():
    batch = random_batch()
    assert_cost_is_as_stated(
        compute_value_loss,
        lambda: compute_value_loss(
            batch.values, batch.rewards, batch.log_prob, batch.mask, cliprange_value=0.5
        ),
    )


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 1), ({"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, 4)],
)
def test_the_rollout_correction_costs_as_much_as_it_says(options, times):
    batch = random_batch()
    documented = compute_rollout_correction_and_rejection_mask
    assert_cost_is_as_stated(
        documented,
        lambda: documented(batch.old_log_prob, batch.log_prob, batch.mask, **options),
        stated=times * int(STATED.search(documented.__doc__)[1]),
    )
