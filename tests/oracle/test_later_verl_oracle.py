"""What we took from verl 0.9.1 because the pin lacks it or has it wrong, against verl 0.9.1 itself.

Also: which names 0.9.1 knows, and that whatever changed since the pin is among what is compared here.
"""

import ast
import inspect
from types import ModuleType

import pytest
import torch
from batches import DTYPES, assert_same, batches, check_on_batches
from hypothesis import strategies as st
from oracle.estimator_calls import run_ours, run_verl
from oracle.loss_calls import (
    GLOBAL,
    MASK_DTYPES,
    NO_GLOBAL,
    SETTINGS,
    aggregation_and_gradient,
    assert_same_losses,
    config_with,
    value_gradient_metrics,
    value_loss_gradient_clipfrac,
)
from oracle.verl_functions import core_algos, later_module, names_compared, rollout_corr_helper, verl_of

import minirl.core_algos.rollout_correction as rollout_correction
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY
from minirl.core_algos.agg_loss import LOSS_AGG_MODES, agg_loss
from minirl.core_algos.distillation import DISTILLATION_LOSS_REGISTRY
from minirl.core_algos.kl import KL_PENALTIES
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.value_loss import compute_value_loss
from minirl.pin import LATER

pytestmark = pytest.mark.oracle

LATER_ALGOS = later_module(core_algos.__name__)

# names of 0.9.1 that are not ours, with the reason
NOT_OURS = {("kl_penalty", "full"): "verl lists the name and raises NotImplementedError for it"}

# functions whose code is not the pin's, with the test below that compares ours with 0.9.1's
CHANGED = {
    "compute_reinforce_plus_plus_outcome_advantage": "test_reinforce_plus_plus_carries_returns_across_gaps",
    "agg_loss": "test_aggregation_and_its_gradient_are_those_of_the_later_verl",
    "compute_policy_loss_gspo": "test_gspo_and_dro_in_any_mode_are_those_of_the_later_verl",
    "compute_policy_loss_dro": "test_gspo_and_dro_in_any_mode_are_those_of_the_later_verl",
    "compute_value_loss": "test_value_loss_is_normalised_over_the_mini_batch_as_in_the_later_verl",
}


def names_of_the_later_verl() -> dict[str, set[str]]:
    distillation = later_module("verl.trainer.distillation.losses")
    helper = later_module(rollout_corr_helper.__name__)
    return {
        "adv_estimator": set(LATER_ALGOS.ADV_ESTIMATOR_REGISTRY),
        "loss_mode": set(LATER_ALGOS.POLICY_LOSS_REGISTRY),
        "loss_agg_mode": names_compared(core_algos, "agg_loss", LATER),
        "kl_penalty": names_compared(core_algos, "kl_penalty_forward", LATER),
        "distillation loss_mode": set(distillation.DISTILLATION_LOSS_REGISTRY),
        "rollout_rs": set(helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
    }


def test_every_name_of_the_later_verl_is_ours_or_has_a_reason():
    ours = {
        "adv_estimator": set(ADV_ESTIMATOR_REGISTRY),
        "loss_mode": set(POLICY_LOSS_REGISTRY),
        "loss_agg_mode": set(LOSS_AGG_MODES),
        "kl_penalty": set(KL_PENALTIES),
        "distillation loss_mode": set(DISTILLATION_LOSS_REGISTRY),
        "rollout_rs": set(rollout_correction.ROLLOUT_RS_OPTIONS),
    }
    theirs = names_of_the_later_verl()
    assert theirs.keys() == ours.keys()
    missing = {(kind, name) for kind in theirs for name in theirs[kind] - ours[kind]}
    assert missing == set(NOT_OURS)
    assert all(ours[kind] <= theirs[kind] for kind in ours)
    with verl_of(LATER), pytest.raises(NotImplementedError):
        LATER_ALGOS.kl_penalty(torch.ones(1, 1), torch.ones(1, 1), "full")


def code_of(module: ModuleType) -> dict[str, str]:
    """Every function of the module's own, without docstrings and layout."""
    tree = ast.parse(inspect.getsource(module))
    functions = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            functions[node.name] = ast.dump(node)
    return functions


def test_what_changed_in_core_algos_since_the_pin_is_compared_here_with_the_later_verl():
    pinned, later = code_of(core_algos), code_of(LATER_ALGOS)
    assert {name for name in later if later[name] != pinned.get(name)} == set(CHANGED)
    assert pinned.keys() <= later.keys()
    assert all(callable(globals()[test]) for test in CHANGED.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_carries_returns_across_gaps(gamma, dtype):
    def check(b):
        b = b.to(dtype)
        expected = run_verl(LATER_ALGOS, "reinforce_plus_plus", b, gamma=gamma)
        for mine, theirs in zip(run_ours("reinforce_plus_plus", b, gamma=gamma), expected, strict=True):
            assert mine.dtype == dtype
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["gspo", "dro"])
def test_gspo_and_dro_in_any_mode_are_those_of_the_later_verl(name, setting, dtype):
    def check(b, mode, weights, with_global, mask_dtype):
        info = GLOBAL if with_global else NO_GLOBAL
        b = b.to(dtype)
        with verl_of(LATER):
            config = config_with(info, SETTINGS[setting], LATER_ALGOS)
            run = (b, config, weights, b.response_mask.to(mask_dtype))
            fn = LATER_ALGOS.POLICY_LOSS_REGISTRY[name]
            theirs = value_gradient_metrics(fn, *run, loss_agg_mode=mode)
        mine = value_gradient_metrics(get_policy_loss_fn(name), *run, loss_agg_mode=mode, **info)
        assert_same_losses(mine, theirs, dtype)

    drawn = (st.sampled_from(LOSS_AGG_MODES), st.booleans(), st.booleans(), MASK_DTYPES)
    check_on_batches(check, batches(), *drawn)


@pytest.mark.parametrize("dro_beta", [None, 0.0, -0.1])
def test_dro_without_a_positive_beta_is_refused_by_both(dro_beta):
    one = torch.full((1, 1), -1.0)
    config = config_with(NO_GLOBAL, dict(policy_loss=dict(dro_beta=dro_beta)), LATER_ALGOS)
    for fn in (get_policy_loss_fn("dro"), LATER_ALGOS.compute_policy_loss_dro):
        with pytest.raises(ValueError, match="dro_beta"):
            fn(one, one, one, torch.ones(1, 1), config=config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_and_its_gradient_are_those_of_the_later_verl(mode, dtype):
    def check(b, with_global, mask_dtype):
        info = GLOBAL if with_global else NO_GLOBAL

        call = (b.advantages.to(dtype), b.response_mask.to(mask_dtype), mode, info)
        ours, laters = (aggregation_and_gradient(fn, *call) for fn in (agg_loss, LATER_ALGOS.agg_loss))
        for mine, theirs in zip(ours, laters, strict=True):
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches(), st.booleans(), MASK_DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_loss_is_normalised_over_the_mini_batch_as_in_the_later_verl(mode, dtype):
    def check(b, cliprange_value, with_global, mask_dtype):
        b, info = b.to(dtype), GLOBAL if with_global else NO_GLOBAL

        call = (b, b.response_mask.to(mask_dtype))
        options = dict(cliprange_value=cliprange_value, loss_agg_mode=mode, **info)
        ours, laters = (
            value_loss_gradient_clipfrac(fn, *call, **options)
            for fn in (compute_value_loss, LATER_ALGOS.compute_value_loss)
        )
        for mine, theirs in zip(ours, laters, strict=True):
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches(), st.sampled_from([0.5, 0.05]), st.booleans(), MASK_DTYPES)


def test_the_two_versions_are_two():
    assert LATER_ALGOS.agg_loss is not core_algos.agg_loss
    assert f"/{LATER}/" in LATER_ALGOS.__file__ and f"/{LATER}/" not in core_algos.__file__
    with verl_of(LATER):
        import verl.trainer.ppo.core_algos as inside

        assert inside is LATER_ALGOS
    import verl.trainer.ppo.core_algos as outside

    assert outside is core_algos
