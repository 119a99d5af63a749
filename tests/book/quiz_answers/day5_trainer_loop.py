"""Answers of data/quiz/day5_trainer_loop.yml, computed with verl 0.8.0."""

import numpy as np
import torch
from tensordict import TensorDict

from minirl.pin import find_symbol, use_verl

use_verl()

FIT = "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"


def source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def before(text: str, *parts: str) -> bool:
    places = [text.index(part) for part in parts]
    return places == sorted(places)


def mini_batches(prompts: int, n: int, mini: int, epochs: int, ranks: int) -> list[int]:
    """Rows of every mini-batch that one rank trains on, cut by verl's own iterator."""
    from verl.utils import tensordict_utils as tu

    assert "ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n" in source(
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor"
    )
    assert "mini_batch_size // self.engine.get_data_parallel_size()" in source(
        "verl.workers.engine_workers:TrainingWorker.train_mini_batch"
    )
    rows = prompts * n // ranks
    data = TensorDict({"row": torch.arange(rows)}, batch_size=rows)
    cut = tu.make_iterator(
        data, mini_batch_size=mini * n // ranks, epochs=epochs, seed=1, dataloader_kwargs={"shuffle": False}
    )
    return [len(part) for part in cut]


def q_optimizer_steps():
    return len(mini_batches(prompts=1024, n=5, mini=256, epochs=2, ranks=8))


def q_rows_per_rank():
    return mini_batches(prompts=1024, n=5, mini=256, epochs=1, ranks=8)[0]


def q_order_of_fit():
    step = source(FIT)
    step = step[step.index("DataProto.from_single_dict(batch_dict)") :]
    calls = [
        "generate_sequences(combined_gen_batch)",
        "sleep_replicas()",
        "self._balance_batch(",
        "self._compute_old_log_prob(batch)",
        "batch = compute_advantage(",
        "self._update_critic(batch)",
        "self._update_actor(batch)",
    ]
    assert before(step, *calls)
    assert step.rindex("checkpoint_manager.update_weights(") > step.index(calls[-1])
    return list("abcdefgh")


def q_reduce_by_name():
    from verl.utils.metric import reduce_metrics

    out = reduce_metrics({"actor/minibatch_loss": [1.0, 3.0], "actor/loss": [1.0, 3.0]})
    return f"{out['actor/minibatch_loss']} {out['actor/loss']}"


def q_left_shift():
    from verl.workers.utils.padding import no_padding_2_padding

    data = TensorDict(
        {
            "prompts": torch.zeros(1, 3),
            "responses": torch.zeros(1, 4),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
        },
        batch_size=1,
    )
    return str(no_padding_2_padding(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), data)[0].tolist())


def q_first_mini_batch_ratio():
    """One parameter, four mini-batches: the ratio to the log-probs of before the step."""
    logits = torch.zeros(2, requires_grad=True)
    old = logits.log_softmax(-1)[0].item()
    optimizer = torch.optim.SGD([logits], lr=1.0)
    ratios = []
    for _ in range(4):
        log_prob = logits.log_softmax(-1)[0]
        ratios.append((log_prob - old).exp())
        optimizer.zero_grad()
        (-ratios[-1]).backward()
        optimizer.step()
    assert ratios[0].item() == 1.0 and all(ratio.item() != 1.0 for ratio in ratios[1:])
    return "b"


def q_critic_loss_scale():
    from verl.trainer.ppo.core_algos import compute_value_loss

    values, mask = torch.zeros(2, 3), torch.ones(2, 3)
    vpreds, returns = values + 0.1, values + 1.0

    def grad(rows):
        v = vpreds[rows].clone().requires_grad_()
        loss, _ = compute_value_loss(
            vpreds=v,
            returns=returns[rows],
            values=values[rows],
            response_mask=mask[rows],
            cliprange_value=0.5,
        )
        loss.backward()
        return v.grad.sum()

    assert "batch_num_tokens" not in source("verl.workers.utils.losses:value_loss")
    return ((grad([0]) + grad([1])) / grad([0, 1])).item()


def q_who_reads_mini():
    assert "mini_batch_size=ppo_mini_batch_size," in source(
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor"
    )
    assert 'tu.pop(data, key="mini_batch_size"' in source(
        "verl.workers.engine_workers:TrainingWorker.train_mini_batch"
    )
    return "b"


def q_dispatch_of_update():
    assert 'dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")' in source(
        "verl.workers.engine_workers:ActorRolloutRefWorker.update_actor"
    )
    from verl.single_controller.base.decorator import _split_args_kwargs_data_proto

    data = TensorDict({"row": torch.arange(16)}, batch_size=16)
    (shards,), _ = _split_args_kwargs_data_proto(8, data)
    assert [shard["row"].tolist() for shard in shards] == [[2 * rank, 2 * rank + 1] for rank in range(8)]
    return "b"


def q_token_num_container():
    from verl import DataProto

    data = DataProto.from_dict({"n": torch.tensor([3, 1, 2])}, meta_info={"global_token_num": [3, 1, 2]})
    data.reorder(torch.tensor([1, 2, 0]))
    assert data.batch["n"].tolist() == [1, 2, 3] and data.meta_info["global_token_num"] == [3, 1, 2]
    fit = source(FIT)
    assert before(fit, "self._balance_batch(", 'batch.meta_info["global_token_num"] = torch.sum(')
    return "c"


def q_loss_mask_shape():
    text = source("verl.workers.utils.padding:left_right_2_no_padding")
    assert 'data["loss_mask"] = data["response_mask"]' in text
    assert 'data["input_ids"] = input_ids_nested' in text
    return "b"


def q_warmup_steps():
    assert "if self.config.trainer.critic_warmup > self.global_steps:" in source(FIT)
    steps = np.arange(1, 10)  # training starts at step 1
    return int((3 > steps).sum())
