"""Run test files of the installed verl wheel on minirl's functions, by import swap.

Their source is parsed, imports from verl are dropped, and the names they imported are bound to minirl's
functions (with an adapter where the calling convention differs). What is left are the tests of a module here.
"""

import ast
import inspect
import re
from types import SimpleNamespace
from typing import Any

import torch

import minirl.core_algos.advantage as advantage
import minirl.core_algos.kl as kl
import minirl.core_algos.policy_loss as policy_loss
import minirl.core_algos.rollout_correction as rollout_correction
import minirl.metrics as metrics
from minirl.config import compose
from minirl.core_algos.agg_loss import agg_loss
from minirl.core_algos.registry import Registry
from minirl.core_algos.value_loss import compute_value_loss
from minirl.pin import LATER, PIN, find_symbol, use_verl, verl_root
from minirl.protocol import DataProto
from minirl.trainer import compute_advantage

MULTI_TRAJECTORIES = {
    PIN: "verl.trainer.main_ppo_sync:compute_advantage_for_multi_trajectories",
    LATER: "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
}

# tests of either version's wheel that are not run, with the reason
ERRORS = "asks for verl's exception or message; minirl answers every mistake of the user with a ValueError: "
EXCUSED = {
    "TestRegisterAdvEst.test_get_adv_estimator_fn_invalid_name": ERRORS
    + "test_unknown_names_are_answered_with_the_nearest",
    "test_bool_rollout_is_threshold_is_rejected": ERRORS + "test_a_boolean_threshold_is_refused",
    "TestRolloutCorrectionConfigNormalization.test_float_threshold_conversion_in_factory": (
        "calls a preset factory with arguments; minirl's presets are values, changed with dataclasses.replace"
    ),
}


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


def reinforce_plus_plus_by_config(token_level_rewards, response_mask, config):
    return advantage.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards, response_mask, gamma=config.gamma
    )


def positional_dro(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return policy_loss.get_policy_loss_fn("dro")(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=loss_agg_mode, config=config
    )


def weights_in_a_data_proto(**options):
    weights, mask, numbers = rollout_correction.compute_rollout_correction_and_rejection_mask(**options)
    proto = None if weights is None else DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return proto, mask, numbers


def is_metrics_of_the_weights(
    *, rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics, response_mask, **options
):
    """minirl takes the metrics where it makes the weights: it must come to the weights the suite hands in."""
    weights, numbers = rollout_correction.compute_rollout_correction_weights(
        log_ratio_for_metrics, response_mask, **options
    )
    torch.testing.assert_close(weights, rollout_is_weights)
    torch.testing.assert_close(log_ratio_for_metrics.exp(), raw_rollout_is_weights)
    return numbers


class PresetFactories(rollout_correction.RolloutCorrection):
    """verl writes presets as class methods."""

    @classmethod
    def decoupled_token_icepop(cls):
        return rollout_correction.PRESETS["decoupled_token_icepop"]


def verls_actor_config(policy_loss=None, **options):
    from verl.workers.config.actor import ActorConfig  # the suite's own input, not what is tested

    config = ActorConfig(**options)
    if policy_loss is not None:
        object.__setattr__(config, "policy_loss", policy_loss)  # it is frozen
    return config


def advantage_of_a_copy(
    data, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, norm_adv_by_std_in_grpo=True, config=None
) -> DataProto:
    """minirl.trainer's compute_advantage on a copy of the batch.

    Both functions, ours and verl's, write into the batch they are given; without the copy the suite's first
    test compares a batch with itself.
    """
    assert num_repeat == 1 and config is None
    algorithm = compose([f"algorithm.adv_estimator={adv_estimator}"]).algorithm
    algorithm.gamma, algorithm.lam = gamma, lam
    algorithm.norm_adv_by_std_in_grpo = norm_adv_by_std_in_grpo
    copied = DataProto(data.batch.clone(), dict(data.non_tensor_batch), dict(data.meta_info))
    return compute_advantage(copied, algorithm)


ADVANTAGE_ESTIMATOR = SimpleNamespace(GRPO="grpo")


def multi_trajectories(version: str):
    """verl's own choice of each session's last output, around minirl's compute_advantage and DataProto.

    minirl's row is a whole trajectory, so it has no function of its own for outputs that share a session.
    """
    names = {
        "Any": Any,
        "DataProto": DataProto,
        "compute_advantage": advantage_of_a_copy,
        "core_algos": SimpleNamespace(AdvantageEstimator=ADVANTAGE_ESTIMATOR),
        "torch": torch,
    }
    spec = MULTI_TRAJECTORIES[version]
    exec("\n".join(find_symbol(spec, version).lines), names)
    return names[spec.partition(":")[2]]


def swapped_names(version: str) -> dict:
    """verl's names in its tests, and what stands for them here."""
    return {
        "ADV_ESTIMATOR_REGISTRY": advantage.ADV_ESTIMATOR_REGISTRY,
        "AdvantageEstimator": ADVANTAGE_ESTIMATOR,
        "compute_advantage": advantage_of_a_copy,
        "compute_advantage_for_multi_trajectories": multi_trajectories(version),
        "compute_gae_advantage_return": positional_gae,
        "compute_grpo_outcome_advantage": advantage.compute_grpo_outcome_advantage,
        "compute_grpo_vectorized_outcome_advantage": advantage.get_adv_estimator_fn("grpo_vectorized"),
        "compute_reinforce_plus_plus_outcome_advantage": reinforce_plus_plus_by_config,
        "compute_rloo_outcome_advantage": advantage.compute_rloo_outcome_advantage,
        "compute_rloo_vectorized_outcome_advantage": advantage.compute_rloo_vectorized_outcome_advantage,
        "get_adv_estimator_fn": lambda name: core_algos_module.ADV_ESTIMATOR_REGISTRY.find(name),
        "register_adv_est": lambda name: core_algos_module.ADV_ESTIMATOR_REGISTRY.register(name),
        "agg_loss": agg_loss,
        "kl_penalty": kl.kl_penalty,
        "compute_policy_loss_dro": positional_dro,
        "compute_policy_loss_vanilla": policy_loss.compute_policy_loss_vanilla,
        "compute_value_loss": compute_value_loss,
        "compute_rollout_correction_and_rejection_mask": weights_in_a_data_proto,
        "compute_is_metrics": is_metrics_of_the_weights,
        "compute_offpolicy_metrics": rollout_correction.compute_offpolicy_metrics,
        "SUPPORTED_ROLLOUT_RS_OPTIONS": rollout_correction.ROLLOUT_RS_OPTIONS,
        "RolloutCorrectionConfig": PresetFactories,
        "ActorConfig": verls_actor_config,
        "PolicyLossConfig": SimpleNamespace,
        "DataProto": DataProto,
        "AggregationType": metrics.AggregationType,
        "Metric": metrics.Metric,
        "append_to_dict": metrics.append_to_dict,
        "bootstrap_metric": metrics.bootstrap_metric,
        "calc_maj_val": metrics.calc_maj_val,
        "compute_data_metrics": metrics.compute_data_metrics,
        "compute_throughout_metrics": metrics.compute_throughout_metrics,
        "compute_timing_metrics": metrics.compute_timing_metrics,
        "process_validation_metrics": metrics.process_validation_metrics,
        "reduce_metrics": metrics.reduce_metrics,
        "verl": SimpleNamespace(trainer=SimpleNamespace(ppo=SimpleNamespace(core_algos=core_algos_module))),
    }


class SwapImports(ast.NodeTransformer):
    """Drop every import from verl, at any depth, after checking that its names are bound in `names`.

    A function that a test patches by its dotted name is minirl's, too.
    """

    def __init__(self, names: dict):
        self.names = names

    def visit_ImportFrom(self, node):
        if node.module.split(".")[0] == "verl":
            missing = {alias.name for alias in node.names} - self.names.keys()
            assert not missing, f"the suite imports {missing}, which is not swapped"
            return ast.Pass()
        return node

    def visit_Import(self, node):
        return ast.Pass() if any(alias.name.split(".")[0] == "verl" for alias in node.names) else node

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = re.sub(r"^verl\.trainer\.ppo\.metric_utils\.(?=\w+$)", "minirl.metrics.", node.value)
        return node


def suite_tree(suite: str, version: str) -> ast.Module:
    return ast.parse((verl_root(version) / suite).read_text(encoding="utf-8"))


def written_in(suite: str, version: str) -> list[str]:
    """The names of the suite's tests, those of a class as "Class.test"."""
    names = []
    for node in suite_tree(suite, version).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.append(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
            names += [f"{node.name}.{method.name}" for method in methods]
    return names


def swapped_tests(suites: tuple[str, ...], version: str, excused: dict[str, str], module: str) -> dict:
    """The suites' tests and fixtures by name, without the excused ones, for the globals of `module`."""
    use_verl()
    tests: dict = {}
    for suite in suites:
        names = swapped_names(version)
        tree = SwapImports(names).visit(suite_tree(suite, version))
        for name in excused:
            class_name, _, method = name.rpartition(".")
            classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
            for scope in classes if class_name else [tree]:
                scope.body = [n for n in scope.body if getattr(n, "name", None) != method] or [ast.Pass()]
        namespace = names | {"__name__": module}
        exec(compile(ast.fix_missing_locations(tree), str(verl_root(version) / suite), "exec"), namespace)
        wanted = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and (node.name.startswith(("test_", "Test")) or _is_fixture(node))
        ]
        assert not tests.keys() & set(wanted), "two suites use one name"
        tests |= {name: namespace[name] for name in wanted}
    return tests


def _is_fixture(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any("pytest.fixture" in ast.unparse(decorator) for decorator in node.decorator_list)


def collected(names: dict) -> set[str]:
    """The tests that pytest finds in a module with these globals, written as `written_in` does."""
    here = set()
    for name, member in names.items():
        if inspect.isclass(member) and name.startswith("Test"):
            here |= {f"{name}.{method}" for method in vars(member) if method.startswith("test_")}
        elif name.startswith("test_") and callable(member):
            here.add(name)
    return here
