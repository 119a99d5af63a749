"""No test file of the wheels goes unnoticed: each is run by a file here, or excused with its reason."""

import ast
from pathlib import Path

import pytest

from minirl.pin import LATER, PIN, verl_root

pytestmark = pytest.mark.oracle

PPO = "tests/trainer/ppo/"
CONTROLLER = "tests/single_controller/"
AGENT_LOOP = "tests/experimental/agent_loop/"
CHECKPOINT = "tests/checkpoint_engine/"

RUN = {
    PIN: {
        "tests/test_protocol_on_cpu.py": "test_verl_protocol_suite.py",
        f"{PPO}test_core_algos_on_cpu.py": "test_verl_core_algos_suite.py",
        f"{PPO}test_metric_utils_on_cpu.py": "test_metrics_oracle.py",
        f"{PPO}test_rollout_corr.py": "test_verl_core_algos_suite.py",
        f"{PPO}test_rollout_corr_integration.py": "test_verl_core_algos_suite.py",
        "tests/trainer/test_multi_trajectories_advantage.py": "test_verl_core_algos_suite.py",
    },
    LATER: {
        f"{PPO}test_core_algos_on_cpu.py": "test_later_verl_suite.py",
        f"{PPO}test_dynamic_policy_losses_on_cpu.py": "test_later_verl_suite.py",
        f"{PPO}test_loss_aggregation_on_cpu.py": "test_later_verl_suite.py",
        f"{PPO}test_metric_utils_on_cpu.py": "test_later_verl_suite.py",
        f"{PPO}test_reinforce_pp_multiturn_on_cpu.py": "test_later_verl_suite.py",
        f"{PPO}test_rollout_corr.py": "test_later_verl_suite.py",
        f"{PPO}test_rollout_corr_integration.py": "test_later_verl_suite.py",
        f"{PPO}test_value_loss_normalization_on_cpu.py": "test_later_verl_suite.py",
        "tests/trainer/test_multi_trajectories_advantage_on_cpu.py": "test_later_verl_suite.py",
    },
}

BASE_CONFIG = "tests BaseConfig, a dataclass read like a dict; minirl's config is OmegaConf's DictConfig"
TENSORDICT = "tests verl.utils.tensordict_utils on a bare TensorDict; minirl's batch is a DataProto"
WEIGHTS = "moves weights between verl's engines and servers on several GPUs"
WORKERS = "tests which step number verl's workers hand their checkpoint engine; minirl's have no such engine"
NO_TESTS = "holds no test, only what the others in its folder use"
REGISTRY = "tests the registry, named tools and ToolResponse of verl; minirl's decorated functions have none"
NATIVE = "tests YAML-defined tools beside functions; minirl has functions only"
NOT_APPLICABLE = {
    "tests/test_base_config_on_cpu.py": BASE_CONFIG,
    "tests/test_protocol_v2_on_cpu.py": TENSORDICT,
    f"{CHECKPOINT}test_correctness_on_gpu.py": WEIGHTS,
    f"{CHECKPOINT}test_correctness_on_npu.py": WEIGHTS,
    f"{CHECKPOINT}test_global_steps_on_cpu.py": WORKERS,
    f"{CHECKPOINT}test_special_server_adapter.py": WEIGHTS,
    f"{CHECKPOINT}test_utils.py": NO_TESTS,
    "tests/tools/test_function_tool_on_cpu.py": REGISTRY,
    "tests/tools/test_mixed_tools_on_cpu.py": NATIVE,
}

SAME = "the pin's file, byte for byte"
SHARDS = "exports or loads shards and differences of weights for a server; minirl hands over whole tensors"
TOOL_LOOP = "calls private methods of verl's ToolAgentLoop on a mock"
PARSER = "tests the parser of a model family's tool calls; minirl reads Hermes form only"
MULTI_MODAL = "images or audio; minirl trains on text"
SERVER = "starts a model server on GPUs"
FSDP = "tests what FSDP's checkpoint keeps of a LoRA model"
WORKER = "builds verl's AgentLoopWorker by its private attributes, and the output class of 0.9.1"
BASIC = "starts a model server; its load balancer is a Ray actor of 0.9.1, where servers come and go"
LATER_NOT_APPLICABLE = {
    "tests/test_base_config_on_cpu.py": SAME,
    "tests/test_protocol_on_cpu.py": "the pin's tests, and one of verl's byte format",
    "tests/test_protocol_v2_on_cpu.py": SAME,
    "tests/tools/test_function_tool_on_cpu.py": SAME,
    "tests/tools/test_mixed_tools_on_cpu.py": SAME,
    f"{CHECKPOINT}test_block_placement.py": SHARDS,
    f"{CHECKPOINT}test_correctness_on_gpu.py": WEIGHTS,
    f"{CHECKPOINT}test_correctness_on_npu.py": WEIGHTS,
    f"{CHECKPOINT}test_fsdp_lora_only_checkpoint_on_cpu.py": FSDP,
    f"{CHECKPOINT}test_global_steps_on_cpu.py": WORKERS,
    f"{CHECKPOINT}test_sglang_fusion_bucketing_on_cpu.py": SHARDS,
    f"{CHECKPOINT}test_sglang_loader.py": SHARDS,
    f"{CHECKPOINT}test_sharded_delta.py": SHARDS,
    f"{CHECKPOINT}test_special_server_adapter.py": WEIGHTS,
    f"{CHECKPOINT}test_utils.py": NO_TESTS,
    f"{AGENT_LOOP}test_agent_loop_extra_fields_schema_on_cpu.py": WORKER,
    f"{AGENT_LOOP}test_audio_server_contract_on_cpu.py": MULTI_MODAL,
    f"{AGENT_LOOP}test_basic_agent_loop.py": BASIC,
    f"{AGENT_LOOP}test_call_tool_on_cpu.py": TOOL_LOOP,
    f"{AGENT_LOOP}test_gpt_oss_tool_parser.py": PARSER,
    f"{AGENT_LOOP}test_multi_modal.py": MULTI_MODAL,
    f"{AGENT_LOOP}test_multimodal_position_ids_on_cpu.py": MULTI_MODAL,
    f"{AGENT_LOOP}test_qwen3_tool_parser_on_cpu.py": PARSER,
    f"{AGENT_LOOP}test_standalone_rollout.py": SERVER,
    f"{AGENT_LOOP}test_tool_call_id_on_cpu.py": "the id of a call in Kimi's form; minirl reads Hermes form",
    "tests/experimental/fully_async_policy/test_async_genrm_config_on_cpu.py": "tests "
    "when a fully asynchronous run needs a reward model; minirl has neither",
    "tests/plugin/test_platform_abstraction.py": "verl's choice between kinds of accelerator",
    "tests/trainer/test_constants_ppo_on_cpu.py": "environment variables of the profiler",
    f"{PPO}test_rollout_moe_lb_metrics_on_cpu.py": "metrics of experts; minirl's model has none",
    f"{PPO}test_spec_decode_metrics_on_cpu.py": "metrics of speculative decoding, which minirl does not do",
}
EXCUSED = {PIN: NOT_APPLICABLE, LATER: LATER_NOT_APPLICABLE}


def files(version: str) -> set[str]:
    """Every test file of the wheel; the controller's folder has its own table, test by test."""
    root = verl_root(version)
    every = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    return {file for file in every if not file.startswith(CONTROLLER)}


def functions_of(file: str, version: str) -> dict[str, str]:
    """Name -> syntax tree of each test function of the file, also those of classes."""
    tree = ast.parse((verl_root(version) / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.dump(node) for node in functions if node.name.startswith("test")}


@pytest.mark.parametrize("version", [PIN, LATER])
def test_every_test_file_of_the_wheel_is_run_or_excused(version):
    run, excused = set(RUN[version]), set(EXCUSED[version])
    assert not run & excused
    assert files(version) - run - excused == set(), "neither run nor excused"
    assert run | excused == files(version), "named here, but not in the wheel"


@pytest.mark.parametrize("version, file", [(v, file) for v in RUN for file in RUN[v]])
def test_the_file_said_to_run_a_suite_names_it(version, file):
    here = Path(__file__).parent / RUN[version][file]
    constants = [n for n in ast.walk(ast.parse(here.read_text("utf-8"))) if isinstance(n, ast.Constant)]
    assert file in {node.value for node in constants}


def test_what_is_excused_as_the_pins_file_is_the_same_file():
    for file in [file for file, reason in LATER_NOT_APPLICABLE.items() if reason == SAME]:
        assert (verl_root(LATER) / file).read_bytes() == (verl_root(PIN) / file).read_bytes(), file
        assert file in NOT_APPLICABLE


def test_the_controllers_suites_of_the_later_verl_are_the_pins_file_by_file():
    def folder(version):
        return {path.name: path.read_bytes() for path in (verl_root(version) / CONTROLLER).glob("*.py")}

    assert folder(LATER) == folder(PIN)


def test_the_later_protocol_suite_only_adds_a_test_of_the_byte_format():
    pinned, later = (functions_of("tests/test_protocol_on_cpu.py", version) for version in (PIN, LATER))
    assert later.items() >= pinned.items()
    assert set(later) - set(pinned) == {"test_numpy_dataproto_serialization_skips_tensordict_consolidation"}


def test_files_excused_as_empty_hold_no_test():
    for version, excused in EXCUSED.items():
        for file in [file for file, reason in excused.items() if reason == NO_TESTS]:
            assert not functions_of(file, version), file


@pytest.mark.parametrize("version", [PIN, LATER])
def test_excused_files_take_nothing_from_the_modules_that_minirl_rewrites_but_these(version):
    """`expected` names the exceptions, and why they are excused all the same."""
    ours = {
        "verl.protocol",
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.metric_utils",
        "verl.trainer.ppo.rollout_corr_helper",
        "verl.utils.groupwise",
        "verl.utils.metric",
        "verl.utils.seqlen_balancing",
    }
    takes = set()
    for file in EXCUSED[version]:
        tree = ast.parse((verl_root(version) / file).read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if modules & ours or any("distillation" in (module or "") for module in modules):
            takes.add(file)
    expected = {
        PIN: set(),
        LATER: {
            "tests/test_protocol_on_cpu.py",  # its tests are run in the pin's state
            f"{PPO}test_rollout_moe_lb_metrics_on_cpu.py",  # metrics of experts
            f"{AGENT_LOOP}test_basic_agent_loop.py",  # these two hand DataProto to a server
            f"{AGENT_LOOP}test_multi_modal.py",
        },
    }
    assert takes == expected[version]
