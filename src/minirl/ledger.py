"""The ten stations of `fit()` and every key of a training batch: container, dims, dtype, writer, readers.

in: - -> out: STATIONS, LEDGER, and `check`, which holds a tensor against them.
Only what is true of the pinned verl; keys that minirl alone has carry `minirl_only`.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit
"""

from dataclasses import dataclass

import numpy as np
import torch

BATCH, ARRAY, META, TD = "batch", "non_tensor_batch", "meta_info", "tensordict"

LETTERS = {
    "b": "一步的提示词数，data.train_batch_size",
    "B": "一步的轨迹数，b × rollout.n",
    "G": "一组的轨迹数，rollout.n",
    "P": "填充后的提示词长度，rollout.prompt_length",
    "R": "填充后的响应长度，rollout.response_length",
    "V": "词表大小",
    "K": "老师给每个位置打分的 token 数",
    "J": "去掉填充后的长度，每行不同",
    "nnz": "整批去掉填充后的 token 总数",
}


@dataclass(frozen=True)
class Station:
    """One stop of the batch. `verl_call` is the text in fit() that starts it; read on at `symbol`."""

    id: str
    title_zh: str
    verl_call: str
    symbol: str


@dataclass(frozen=True)
class Field:
    """One key. `dims` are letters of LETTERS with spaces between, "" for a single value.

    A first `b` becomes `B` when the batch is repeated. Container "tensordict": only in what the workers get.
    `symbol` writes the key, `readers` use it; `proof` is the text that shows it in the writer's source.
    """

    name: str
    container: str
    dims: str
    dtype: str  # "any" where the reward function or the engine decides
    station: str
    symbol: str
    readers: tuple[str, ...]
    zh: str
    note: str = ""
    proof: str = ""
    minirl_only: bool = False

    @property
    def writer(self) -> str:
        return self.symbol.partition(":")[2]


FIT = "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"
TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer."
ADVANTAGE = "verl.trainer.ppo.ray_trainer:compute_advantage"
KL_PENALTY = "verl.trainer.ppo.ray_trainer:apply_kl_penalty"
DATASET = "verl.utils.dataset.rl_dataset:RLHFDataset.__getitem__"
AGENT = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker."
MANAGER = "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences"
SINGLE_TURN = "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run"
TOOLS = "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop.run"
NAIVE = "verl.experimental.reward_loop.reward_manager.naive:NaiveRewardManager.run_single"
ASSEMBLE = "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.assemble_rm_scores"
EXTRACT = "verl.trainer.ppo.reward:extract_reward"
CORRECTION = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch"
CORRECTION_WEIGHTS = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask"
BYPASS = "verl.trainer.ppo.rollout_corr_helper:apply_bypass_mode"
UNPAD = "verl.workers.utils.padding:left_right_2_no_padding"
REPAD = "verl.workers.utils.padding:no_padding_2_padding"
PPO_LOSS = "verl.workers.utils.losses:ppo_loss"
VALUE_LOSS = "verl.workers.utils.losses:value_loss"
DATA_METRICS = "verl.trainer.ppo.metric_utils:compute_data_metrics"
THROUGHPUT = "verl.trainer.ppo.metric_utils:compute_throughout_metrics"
VARIANCE = "verl.trainer.ppo.metric_utils:compute_variance_proxy_metrics"
DEBUG_METRICS = "verl.utils.debug.metrics:calculate_debug_metrics"
TRAIN_MINI = "verl.workers.engine_workers:TrainingWorker.train_mini_batch"
TRAIN = "verl.workers.engine_workers:TrainingWorker.train_batch"
INFER = "verl.workers.engine_workers:TrainingWorker.infer_batch"
ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch"
ENGINE_IN = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs"
ENGINE_OUT = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs"
DISTILL = "verl.trainer.distillation.losses:compute_distillation_loss_reverse_kl_estimator"
DISTILL_TOPK = "verl.trainer.distillation.losses:compute_topk_loss"

STATIONS: tuple[Station, ...] = (
    Station(
        "load",
        "装载",
        "DataProto.from_single_dict(batch_dict)",
        "verl.protocol:DataProto.from_single_dict",
    ),
    Station("gen_batch", "取生成批", "self._get_gen_batch(batch)", TRAINER + "_get_gen_batch"),
    Station("rollout", "生成", "self.async_rollout_manager.generate_sequences(", MANAGER),
    Station("reward", "打分", "extract_reward(batch)", EXTRACT),
    Station("log_prob", "对数概率", "self._compute_old_log_prob(batch)", TRAINER + "_compute_old_log_prob"),
    Station("values", "价值", "self._compute_values(batch)", TRAINER + "_compute_values"),
    Station("advantage", "优势", "compute_advantage(", ADVANTAGE),
    Station("update_critic", "更新 critic", "self._update_critic(batch)", TRAINER + "_update_critic"),
    Station("update_actor", "更新 actor", "self._update_actor(batch)", TRAINER + "_update_actor"),
    Station(
        "sync",
        "同步权重",
        "self.checkpoint_manager.update_weights(self.global_steps)",
        "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
    ),
)

_ROW = {"proof": "self.dataframe[item]"}  # the columns of the data file pass through as they are

_FIELDS = (
    # ---- 1 load -----------------------------------------------------------------------
    Field("dummy_tensor", BATCH, "b 1", "uint8", "load", DATASET,
        (), "占位张量，只为让 batch 不空", "没有读者"),
    Field("raw_prompt", ARRAY, "b", "object", "load", DATASET,
        (SINGLE_TURN, TOOLS), "聊天消息列表，还没有分词",
        "先被 gen_batch 取走，生成后随 extra_fields 回来"),
    Field("data_source", ARRAY, "b", "object", "load", DATASET,
        (TRAINER + "_get_gen_batch", NAIVE, TRAINER + "_validate"),
        "题目来自哪个数据集，决定用哪个打分函数"),
    Field("reward_model", ARRAY, "b", "object", "load", DATASET,
        (NAIVE,), "打分方式与标准答案 ground_truth", "名字像模型，其实是一个 dict", **_ROW),
    Field("extra_info", ARRAY, "b", "object", "load", DATASET,
        (NAIVE, TOOLS), "数据行附带的信息；奖励管理器加上 num_turns 等几项后交给打分函数",
        "重复 n 次后，同组的行共用同一个 dict"),
    Field("index", ARRAY, "b", "object", "load", DATASET,
        (AGENT + "generate_sequences",), "题目在数据集里的编号", "生成后不再回到 batch"),
    Field("tools_kwargs", ARRAY, "b", "object", "load", DATASET,
        (TOOLS,), "工具的参数", "生成后不再回到 batch"),
    Field("interaction_kwargs", ARRAY, "b", "object", "load", DATASET,
        (), "交互的参数", "0.8.0 里没有读者"),
    Field("prompt", ARRAY, "b", "object", "load", DATASET,
        (), "数据文件里的原始消息列", "RLHFDataset 由它做出 raw_prompt", **_ROW),
    Field("ability", ARRAY, "b", "object", "load", DATASET,
        (), "数据文件里的题目类别", "没有读者", **_ROW),
    Field("uid", ARRAY, "b", "object", "load", FIT,
        (ADVANTAGE, TRAINER + "_balance_batch"), "每个 prompt 一个编号；同组的 n 条轨迹共用",
        "在 repeat 之前写入，分组优势靠它找到同组"),
    Field("temperature", META, "", "float", "load", FIT,
        (ENGINE_IN, ENGINE_OUT), "采样温度，算对数概率前 logits 要除以它", "_update_actor 里又写一次"),
    # ---- 2 gen_batch -------------------------------------------------------------------
    Field("global_steps", META, "", "int", "gen_batch", FIT,
        (AGENT + "generate_sequences",), "训练到第几步",
        "写在 gen_batch 的 meta_info 里；生成后 non_tensor_batch 里另有一列同名的，记的是引擎手里权重的步数"),
    Field("rollout_seed", META, "", "int", "gen_batch", "minirl.trainer:PPOTrainer._get_gen_batch",
        (), "采样用的随机种子；与步数、prompt 和组内序号合成每一行的种子", minirl_only=True),
    Field("__seed__", ARRAY, "B", "int64", "gen_batch", "minirl.rollout.base:Rollout.generate_sequences",
        (), "这一行自己的随机种子", "可有可无", minirl_only=True),
    Field("__do_sample__", ARRAY, "B", "bool", "gen_batch", FIT,
        (AGENT + "generate_sequences",), "这一行是采样还是贪心", "只有 ReMax 才写"),
    # ---- 3 rollout ---------------------------------------------------------------------
    Field("prompts", BATCH, "B P", "int64", "rollout", AGENT + "_postprocess",
        (REPAD, ASSEMBLE, DATA_METRICS), "prompt 的 token，左侧填充"),
    Field("responses", BATCH, "B R", "int64", "rollout", AGENT + "_postprocess",
        (REPAD, ASSEMBLE, DATA_METRICS), "响应的 token，右侧填充"),
    Field("response_mask", BATCH, "B R", "int64", "rollout", AGENT + "_postprocess",
        (ADVANTAGE, UNPAD, PPO_LOSS, VALUE_LOSS, KL_PENALTY, CORRECTION),
        "1 表示模型自己生成的 token；工具输出和填充是 0", "rollout correction 会用拒绝后的 mask 换掉它"),
    Field("input_ids", BATCH, "B P+R", "int64", "rollout", AGENT + "_postprocess",
        (UNPAD, ENGINE_IN), "prompt 与响应接在一起，模型的输入", "去填充后变成 [B, J]"),
    Field("attention_mask", BATCH, "B P+R", "int64", "rollout", AGENT + "_postprocess",
        (UNPAD, REPAD, ASSEMBLE, TRAINER + "_balance_batch", FIT), "1 表示真实 token，包括工具输出",
        "分数放在它的最后一个 1 上"),
    Field("position_ids", BATCH, "B P+R", "int64", "rollout", AGENT + "_postprocess",
        (UNPAD, ENGINE_IN), "每个 token 的位置，从 0 数起", "多模态时是 [B, 4, P+R]；去填充后变成 [B, J]"),
    Field("rollout_log_probs", BATCH, "B R", "float32", "rollout", AGENT + "_postprocess",
        (CORRECTION, BYPASS, DEBUG_METRICS), "采样那一刻推理引擎给出的对数概率",
        "rollout.calculate_log_probs 打开才有；填充处是 0.0，也就是概率 1"),
    Field("__num_turns__", ARRAY, "B", "int32", "rollout", AGENT + "_postprocess",
        (DATA_METRICS, NAIVE), "对话轮数"),
    Field("multi_modal_inputs", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (FIT, ENGINE_IN), "图像等输入，纯文本时是空 dict", "fit() 无条件读它"),
    Field("turn_scores", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (), "多轮交互里每一轮的分"),
    Field("tool_rewards", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (), "工具给出的奖励"),
    Field("min_global_steps", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (), "生成时权重的最早版本", "同步训练里这一列全是 None"),
    Field("max_global_steps", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (), "生成时权重的最晚版本", "同步训练里这一列全是 None"),
    Field("extras", ARRAY, "B", "object", "rollout", AGENT + "_postprocess",
        (), "agent loop 的其他输出"),
    Field("agent_name", ARRAY, "B", "object", "rollout", AGENT + "generate_sequences",
        (), "用哪一种 agent loop", "写在送去生成的那一份里"),
    Field("timing", META, "", "dict", "rollout", MANAGER,
        (FIT,), "生成的用时统计", "fit() 读完就拿走"),
    Field("teacher_logprobs", BATCH, "B P+R K", "float32", "rollout", AGENT + "_postprocess",
        (UNPAD, DISTILL, DISTILL_TOPK), "老师给每个位置的对数概率", "只有 distillation.enabled 才有"),
    Field("teacher_ids", BATCH, "B P+R K", "int32", "rollout", AGENT + "_postprocess",
        (UNPAD, DISTILL_TOPK), "老师打分的 token", "只有 distillation.enabled 才有"),
    Field("routed_experts", BATCH, "B P+R layers topk", "any", "rollout", AGENT + "_postprocess",
        (UNPAD,), "MoE 每层选中的专家", "只有 router replay 才有"),
    Field("global_token_num", META, "B", "list", "rollout", FIT,
        (THROUGHPUT, INFER), "每条轨迹的 token 数", "在 _balance_batch 之后算，行序与 batch 一致"),
    Field("images_seqlens", META, "", "list", "rollout", FIT,
        (TRAIN, INFER), "图像的 token 数，纯文本时是空列表"),
    Field("reward_baselines", BATCH, "b", "float32", "rollout", FIT,
        (ADVANTAGE,), "ReMax 的基线：贪心响应的分", "只有 ReMax 才写，先写后 repeat"),
    # ---- 4 reward ----------------------------------------------------------------------
    Field("rm_scores", BATCH, "B R", "float32", "reward", AGENT + "_postprocess",
        (EXTRACT, FIT), "奖励分，只在最后一个真实响应 token 上非零",
        "verl 默认在生成调用里就写好；共置奖励模型时由 RewardLoopManager.compute_rm_score 写"),
    Field("acc", ARRAY, "B", "any", "reward", NAIVE,
        (TRAINER + "_val_metrics_update",), "这条响应对不对",
        "打分函数返回 dict 时，每个键（含 score）都成为一列；只返回一个数时记成 acc"),
    Field("reward_extra_keys", META, "", "list", "reward", AGENT + "_postprocess",
        (EXTRACT,), "打分函数多给了哪些列"),
    # ---- 5 log_prob --------------------------------------------------------------------
    Field("old_log_probs", BATCH, "B R", "float32", "log_prob", TRAINER + "_compute_old_log_prob",
        (PPO_LOSS, KL_PENALTY, CORRECTION, ADVANTAGE, VARIANCE),
        "更新之前的策略给每个响应 token 的对数概率", "bypass 模式下直接等于 rollout_log_probs"),
    Field("entropys", BATCH, "B R", "float32", "log_prob", TRAINER + "_compute_old_log_prob",
        (FIT,), "每个位置的熵", "只为指标 actor/entropy，union 之前就被取走"),
    Field("sum_pi_squared", BATCH, "B R", "float32", "log_prob", TRAINER + "_compute_old_log_prob",
        (ADVANTAGE, VARIANCE), "每个位置的概率平方和", "只有 actor.calculate_sum_pi_squared 才有"),
    Field("ref_log_prob", BATCH, "B R", "float32", "log_prob", TRAINER + "_compute_ref_log_prob",
        (KL_PENALTY, PPO_LOSS), "参考策略给每个响应 token 的对数概率",
        "单数；use_kl_loss 或 use_kl_in_reward 打开才有"),
    # ---- 6 values ----------------------------------------------------------------------
    Field("values", BATCH, "B R", "float32", "values", TRAINER + "_compute_values",
        (ADVANTAGE, VALUE_LOSS, DATA_METRICS), "critic 在每个位置估计的未来回报", "只有用 critic 才有"),
    # ---- 7 advantage -------------------------------------------------------------------
    Field("token_level_scores", BATCH, "B R", "float32", "advantage", FIT,
        (KL_PENALTY, DATA_METRICS), "就是 rm_scores，换了名字", "由 fit() 写，与 rm_scores 是同一个张量"),
    Field("token_level_rewards", BATCH, "B R", "float32", "advantage", FIT,
        (ADVANTAGE, DATA_METRICS), "每个 token 的奖励：分数减去 KL 惩罚",
        "不用 KL 惩罚时与 token_level_scores 是同一个张量"),
    Field("rollout_is_weights", BATCH, "B R", "float32", "advantage", CORRECTION_WEIGHTS,
        (PPO_LOSS, ADVANTAGE, VARIANCE), "重要性采样权重，修正采样策略与训练策略的差别",
        "只有 rollout_correction.rollout_is 才有"),
    Field("advantages", BATCH, "B R", "float32", "advantage", ADVANTAGE,
        (PPO_LOSS, DATA_METRICS), "每个 token 的优势"),
    Field("returns", BATCH, "B R", "float32", "advantage", ADVANTAGE,
        (VALUE_LOSS, DATA_METRICS), "每个 token 的回报", "GRPO 等估计器里与 advantages 是同一个张量"),
    # ---- 8, 9 update -------------------------------------------------------------------
    Field("multi_turn", META, "", "bool", "update_actor", TRAINER + "_update_actor",
        (), "是不是多轮对话"),
    Field("metrics", META, "", "dict", "update_actor", TRAINER + "_update_actor",
        (FIT, "verl.protocol:DataProto.concat"), "更新的指标",
        "concat 时各 worker 的 metrics 合并成列表；_update_critic 也返回它"),
    # ---- what the workers get besides, from log_prob on -------------------------------------
    Field("max_seq_len", TD, "", "int", "log_prob", UNPAD,
        (), "填充长度 P+R"),
    Field("max_response_len", TD, "", "int", "log_prob", UNPAD,
        (REPAD,), "填充长度 R"),
    Field("indices", TD, "nnz", "int64", "log_prob", UNPAD,
        (), "真实 token 在摊平后的 [B × (P+R)] 里的位置"),
    Field("loss_mask", TD, "B R", "int64", "log_prob", UNPAD,
        (ENGINE,), "response_mask 的同一份，引擎用它数 token"),
    Field("calculate_entropy", TD, "", "bool", "log_prob", TRAINER + "_compute_old_log_prob",
        (ENGINE_OUT,), "要不要算熵", proof="calculate_entropy="),
    Field("calculate_sum_pi_squared", TD, "", "bool", "log_prob", TRAINER + "_compute_old_log_prob",
        (ENGINE_OUT,), "要不要算概率平方和"),
    Field("compute_loss", TD, "", "bool", "log_prob", TRAINER + "_compute_old_log_prob",
        (INFER,), "这次前向要不要损失", proof="compute_loss="),
    Field("no_lora_adapter", TD, "", "bool", "log_prob", TRAINER + "_compute_ref_log_prob",
        (INFER,), "关掉 LoRA，让 actor 充当 ref"),
    Field("mini_batch_size", TD, "", "int", "update_actor", TRAINER + "_update_actor",
        (TRAIN_MINI,), "一次优化用多少条轨迹：ppo_mini_batch_size × n", proof="mini_batch_size="),
    Field("global_batch_size", TD, "", "int", "update_actor", TRAINER + "_update_actor",
        (PPO_LOSS,), "同上，seq-mean-* 的分母", proof="global_batch_size="),
    Field("epochs", TD, "", "int", "update_actor", TRAINER + "_update_actor",
        (TRAIN_MINI,), "这批数据用几遍：ppo_epochs", proof="epochs="),
    Field("dataloader_kwargs", TD, "", "dict", "update_actor", TRAINER + "_update_actor",
        (TRAIN_MINI,), "切 mini-batch 时要不要打乱", proof="dataloader_kwargs="),
    Field("seed", TD, "", "int", "update_actor", TRAINER + "_update_actor",
        (TRAIN_MINI,), "切 mini-batch 的随机种子：data_loader_seed", proof="seed="),
    Field("shuffle", META, "", "bool", "update_actor", "minirl.trainer:PPOTrainer._with_training_meta",
        ("minirl.workers.training_worker:TrainingWorker.train_mini_batch",), "切 mini-batch 时要不要打乱",
        "verl 放在 dataloader_kwargs 里", minirl_only=True),
    Field("distillation_use_topk", TD, "", "bool", "update_actor", TRAINER + "_update_actor",
        (ENGINE_OUT,), "蒸馏损失要不要 top-k 词表", proof="distillation_use_topk="),
    Field("batch_num_tokens", TD, "", "int", "update_actor", ENGINE,
        (PPO_LOSS,), "整个 mini-batch 的有效 token 数，token-mean 的分母", proof="batch_num_tokens="),
    Field("dp_size", TD, "", "int", "update_actor", ENGINE,
        (PPO_LOSS,), "数据并行数", proof="dp_size="),
)  # fmt: skip

LEDGER: dict[str, Field] = {field.name: field for field in _FIELDS}


def station_index(station_id: str) -> int:
    """0 for load ... 9 for sync."""
    for i, station in enumerate(STATIONS):
        if station.id == station_id:
            return i
    raise ValueError(f"no station {station_id!r}: one of {', '.join(s.id for s in STATIONS)}")


def check(name: str, value: torch.Tensor | np.ndarray, sizes: dict[str, int]) -> str:
    """Hold a tensor or array against the ledger. Returns its dims as letters, e.g. "B P+R".

    `sizes` maps letters to numbers; a letter met for the first time is added. A key that the ledger does not
    know is described by the sizes known so far. Raises ValueError naming key, station and both shapes.
    """
    field = LEDGER.get(name)
    shape = tuple(value.shape)
    if field is None:
        return _letters(shape, sizes)
    expected_array = field.container == ARRAY
    if isinstance(value, np.ndarray) != expected_array:
        kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
        raise ValueError(
            f"{name!r} (station {field.station}) is {kind}: the ledger keeps it in {field.container}"
        )
    if isinstance(value, torch.Tensor) and value.is_nested:
        return " ".join(["B", "J", *field.dims.split()[2:]])
    dims = field.dims.split()
    if "b" in sizes or "B" in sizes:
        dims = [_row_letter(shape, sizes) if dim in ("b", "B") else dim for dim in dims]
    expected = [_size(dim, sizes) for dim in dims]
    if len(expected) != len(shape) or any(e not in (None, n) for e, n in zip(expected, shape, strict=True)):
        want = ", ".join(
            dim if e is None or dim.isdigit() else f"{dim}={e}" for dim, e in zip(dims, expected, strict=True)
        )
        raise ValueError(
            f"{name!r} (station {field.station}) has shape {list(shape)}: the ledger says [{want}]"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != field.dtype and field.dtype != "any" and not (expected_array and field.dtype == "object"):
        raise ValueError(
            f"{name!r} (station {field.station}) is {dtype} {list(shape)}: the ledger says {field.dtype}"
        )
    for dim, n in zip(dims, shape, strict=True):
        if dim.isalpha():
            sizes.setdefault(dim, n)
    return " ".join(dims)


def _row_letter(shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    """`B` once the batch is repeated; `b` before, and for a tensor of b rows."""
    rows = shape[0] if shape else None
    return "b" if "B" not in sizes or (rows != sizes["B"] and rows == sizes.get("b")) else "B"


def _size(dim: str, sizes: dict[str, int]) -> int | None:
    """The number of "R", "P+R" or "1"; None where a letter is not known yet."""
    parts = [int(part) if part.isdigit() else sizes.get(part) for part in dim.split("+")]
    return None if None in parts else sum(parts)


def _letters(shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    """Letters for a key that the ledger does not know: an equal known size, else the number."""
    dims = []
    for i, n in enumerate(shape):
        known = [dim for dim in ("R", "P", "P+R") if _size(dim, sizes) == n]
        dims.append(_row_letter(shape, sizes) if i == 0 else known[0] if known else str(n))
    return " ".join(dims)
