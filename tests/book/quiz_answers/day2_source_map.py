"""Answers of data/quiz/day2_source_map.yml, computed from the pinned verl.

One function per question; its name is the question's id. `data` classes come from verl itself.
"""

import numpy as np
import pytest
import torch

from minirl.config import compose
from minirl.pin import find_symbol, use_verl

FIT = "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"


def _line(spec: str, text: str) -> int:
    """Offset of the only line of a symbol that holds this text."""
    hits = [i for i, line in enumerate(find_symbol(spec).lines) if text in line]
    assert len(hits) == 1, (spec, text, hits)
    return hits[0]


def _verl_proto():
    use_verl()
    from verl.protocol import DataProto

    return DataProto


def q_uid_container():
    line = find_symbol(FIT).lines[_line(FIT, '["uid"] = np.array(')]
    container = line.strip().split("batch.", 1)[1].split('["uid"]')[0]
    return {"batch": "a", "non_tensor_batch": "b", "meta_info": "c"}[container]


def q_pop_leaves_no_tensor():
    batch = _verl_proto().from_single_dict(
        {
            "dummy_tensor": torch.zeros(2, 1, dtype=torch.uint8),
            "raw_prompt": np.array(["3+4=?", "9-2=?"], dtype=object),
        }
    )
    gen_batch = batch.pop(non_tensor_batch_keys=["raw_prompt"])
    printed = f"{gen_batch.batch} {len(gen_batch)} {list(batch.non_tensor_batch)}"
    return {"None 2 []": "a", "None 0 []": "b", "None 2 ['raw_prompt']": "c"}[printed]


def q_repeat_order():
    batch = _verl_proto().from_single_dict({"uid": np.array(["A", "B"], dtype=object)})
    return " ".join(batch.repeat(repeat_times=2, interleave=True).non_tensor_batch["uid"])


def q_union_clash():
    data_proto = _verl_proto()
    a = data_proto.from_single_dict({"rm_scores": torch.tensor([[0.0, 1.0]])})
    b = data_proto.from_single_dict({"rm_scores": torch.tensor([[0.0, 0.5]])})
    with pytest.raises(AssertionError, match="are not the same object"):
        a.union(b)
    return "c"


def q_score_shape():
    placed = find_symbol("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess").lines
    assert any("rm_scores = torch.zeros_like(response_mask" in line for line in placed)
    prompts, n, response_length = 16, 8, 24
    rm_scores = torch.zeros_like(torch.ones(prompts * n, response_length))
    return {(16,): "a", (128,): "b", (128, 24): "c", (128, 56): "d"}[tuple(rm_scores.shape)]


def q_score_position():
    spec = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess"
    line = find_symbol(spec).lines[_line(spec, "response_length = attention_mask")].strip()
    names = {
        "prompt_length": 6,
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]]),
    }
    exec(line, {}, names)  # verl's own expression, on the question's mask
    return names["response_length"].item()


def q_who_writes_token_level_scores():
    assert _line(FIT, 'batch.batch["token_level_scores"] = reward_tensor') > _line(
        FIT, "self._compute_values(batch)"
    )
    for spec in (
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
        "verl.trainer.ppo.ray_trainer:compute_advantage",
        "verl.trainer.ppo.reward:extract_reward",
    ):
        assert not any("token_level_scores" in line for line in find_symbol(spec).lines)
    return "c"


def q_order_of_a_step():
    where = {
        "uid": '["uid"] = np.array(',
        "gen": "self.async_rollout_manager.generate_sequences(",
        "sleep": "self.checkpoint_manager.sleep_replicas()",
        "union": "batch = batch.union(gen_batch_output)",
        "old": "self._compute_old_log_prob(batch)",
        "scores": '["token_level_scores"] = reward_tensor',
        "actor": "self._update_actor(batch)",
    }
    return sorted(where, key=lambda key: _line(FIT, where[key]))


def q_split_or_broadcast():
    worker = "verl.workers.engine_workers:ActorRolloutRefWorker."
    names = {"a": "compute_log_prob", "b": "init_model", "c": "update_actor", "d": "update_weights"}
    split = set()
    for key, name in names.items():
        decorator = find_symbol(worker + name).lines[0]
        assert "make_nd_compute_dataproto_dispatch_fn" in decorator or "Dispatch.ONE_TO_ALL" in decorator
        if "make_nd_compute_dataproto_dispatch_fn" in decorator:
            split.add(key)
    return split


def q_grpo_skips():
    use_verl()
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    config = compose(["algorithm.adv_estimator=grpo"])
    assert config.critic.enable is None and not need_reference_policy(config)
    assert not need_critic(config)
    lines = find_symbol(FIT).lines
    for call in ("self._compute_values(batch)", "self._update_critic(batch)"):
        assert lines[_line(FIT, call) - 2].strip() == "if self.use_critic:", call
    return "a"


def q_who_uses_rollout_n():
    line = find_symbol(FIT).lines[_line(FIT, "gen_batch_output = gen_batch.repeat(")]
    assert "repeat_times=rollout_n" in line
    generate = find_symbol("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences").lines
    assert not any("n=config.n" in line for line in generate)
    return "c"


def q_rows_per_update():
    spec = "verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor"
    config = compose(
        [
            "data.train_batch_size=16",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        ]
    )
    names = {"self": type("Trainer", (), {"config": config})}
    first = _line(spec, "ppo_mini_batch_size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size")
    for line in find_symbol(spec).lines[first : first + 2]:
        exec(line.strip(), {}, names)  # verl's own two lines
    return names["ppo_mini_batch_size"]
