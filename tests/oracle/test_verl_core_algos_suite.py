"""verl's own tests of core_algos and rollout correction, from the installed wheel, run on minirl's functions.

Their source is parsed, imports from verl are dropped, and the names they imported are bound to minirl's
functions (with an adapter where the calling convention differs). What is left are the tests of this module.
"""

import ast
import inspect
from types import SimpleNamespace

import pytest

import minirl.core_algos.advantage as advantage
import minirl.core_algos.kl as kl
import minirl.core_algos.policy_loss as policy_loss
import minirl.core_algos.rollout_correction as rollout_correction
from minirl.core_algos.registry import Registry
from minirl.pin import use_verl, verl_root
from minirl.protocol import DataProto

pytestmark = pytest.mark.oracle

SUITES = (
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/test_rollout_corr.py",
    "tests/trainer/ppo/test_rollout_corr_integration.py",
)
ERRORS = "asks for verl's exception or message; minirl answers every mistake of the user with a ValueError: "
FACTORY = (
    "calls a preset factory with arguments; minirl's presets are values, changed with dataclasses.replace"
)
NOT_APPLICABLE = {
    "TestRegisterAdvEst.test_get_adv_estimator_fn_invalid_name": ERRORS
    + "test_unknown_names_are_answered_with_the_nearest",
    "test_bool_rollout_is_threshold_is_rejected": ERRORS + "test_a_boolean_threshold_is_refused",
    "TestRolloutCorrectionConfigNormalization.test_float_threshold_conversion_in_factory": FACTORY,
}


# ---- adapters: verl's calling convention on minirl's functions ----


class ClearableRegistry(Registry):
    """The suite empties and refills the registry around every test."""

    def clear(self):
        self._functions.clear()


class CoreAlgosModule:
    """Stands for the module verl.trainer.ppo.core_algos, whose registry the suite replaces by a dict."""

    def __init__(self):
        self._registry = ClearableRegistry("advantage estimator", "algorithm.adv_estimator")

    @property
    def ADV_ESTIMATOR_REGISTRY(self):
        return self._registry

    @ADV_ESTIMATOR_REGISTRY.setter
    def ADV_ESTIMATOR_REGISTRY(self, functions):
        self._registry = ClearableRegistry("advantage estimator", "algorithm.adv_estimator")
        for name, fn in functions.items():
            self._registry.register(name)(fn)


core_algos_module = CoreAlgosModule()


def positional_gae(token_level_rewards, values, response_mask, gamma, lam):
    return advantage.compute_gae_advantage_return(
        token_level_rewards, values, response_mask, gamma=gamma, lam=lam
    )


def weights_in_a_data_proto(**options):
    weights, mask, metrics = rollout_correction.compute_rollout_correction_and_rejection_mask(**options)
    proto = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return proto, mask, metrics


class PresetFactories(rollout_correction.RolloutCorrection):
    """verl writes presets as class methods."""

    @classmethod
    def decoupled_token_icepop(cls):
        return rollout_correction.PRESETS["decoupled_token_icepop"]


def verls_actor_config(**options):
    from verl.workers.config.actor import ActorConfig  # the suite's own input, not what is tested

    return ActorConfig(**options)


SWAPPED = {
    "ADV_ESTIMATOR_REGISTRY": advantage.ADV_ESTIMATOR_REGISTRY,
    "compute_gae_advantage_return": positional_gae,
    "compute_grpo_outcome_advantage": advantage.compute_grpo_outcome_advantage,
    "compute_grpo_vectorized_outcome_advantage": advantage.get_adv_estimator_fn("grpo_vectorized"),
    "compute_rloo_outcome_advantage": advantage.compute_rloo_outcome_advantage,
    "compute_rloo_vectorized_outcome_advantage": advantage.compute_rloo_vectorized_outcome_advantage,
    "get_adv_estimator_fn": lambda name: core_algos_module.ADV_ESTIMATOR_REGISTRY.find(name),
    "register_adv_est": lambda name: core_algos_module.ADV_ESTIMATOR_REGISTRY.register(name),
    "kl_penalty": kl.kl_penalty,
    "compute_policy_loss_vanilla": policy_loss.compute_policy_loss_vanilla,
    "compute_rollout_correction_and_rejection_mask": weights_in_a_data_proto,
    "compute_offpolicy_metrics": rollout_correction.compute_offpolicy_metrics,
    "SUPPORTED_ROLLOUT_RS_OPTIONS": rollout_correction.ROLLOUT_RS_OPTIONS,
    "RolloutCorrectionConfig": PresetFactories,
    "ActorConfig": verls_actor_config,
    "DataProto": DataProto,
    "verl": SimpleNamespace(trainer=SimpleNamespace(ppo=SimpleNamespace(core_algos=core_algos_module))),
}


class SwapImports(ast.NodeTransformer):
    """Drop every import from verl, at any depth, after checking that its names are bound in SWAPPED."""

    def visit_ImportFrom(self, node):
        if node.module.split(".")[0] == "verl":
            missing = {alias.name for alias in node.names} - SWAPPED.keys()
            assert not missing, f"the suite imports {missing}, which is not swapped"
            return ast.Pass()
        return node

    def visit_Import(self, node):
        return ast.Pass() if any(alias.name.split(".")[0] == "verl" for alias in node.names) else node


def written_in(tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.append(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
            names += [f"{node.name}.{method.name}" for method in methods]
    return names


def swapped_namespace(suite: str) -> dict:
    tree = SwapImports().visit(ast.parse((verl_root() / suite).read_text(encoding="utf-8")))
    for name in NOT_APPLICABLE:
        class_name, _, method = name.rpartition(".")
        for scope in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)]:
            if scope is tree and class_name:
                continue
            scope.body = [n for n in scope.body if getattr(n, "name", None) != method] or [ast.Pass()]
    namespace = dict(SWAPPED) | {"__name__": __name__}
    exec(compile(ast.fix_missing_locations(tree), suite, "exec"), namespace)
    return namespace


use_verl()
for _suite in SUITES:
    _namespace = swapped_namespace(_suite)
    _collected = {k: v for k, v in _namespace.items() if k.startswith(("test_", "Test")) and callable(v)}
    assert not _collected.keys() & globals().keys(), "two suites use one test name"
    globals().update(_collected)


def test_every_test_of_the_suites_is_run_or_excused():
    written = [
        name for suite in SUITES for name in written_in(ast.parse((verl_root() / suite).read_text("utf-8")))
    ]
    assert len(written) == len(set(written))
    assert set(NOT_APPLICABLE) <= set(written)
    here = []
    for name, member in globals().items():
        if inspect.isclass(member) and name.startswith("Test"):
            here += [f"{name}.{method}" for method in vars(member) if method.startswith("test_")]
        elif name.startswith("test_") and callable(member):
            here.append(name)
    own = {"test_every_test_of_the_suites_is_run_or_excused"}
    assert set(here) - own == set(written) - set(NOT_APPLICABLE)
    assert len(written) == 34
