"""Ranks in processes train with torch's DDP or FSDP2 and end where the virtual ranks of one process end."""

import copy
from functools import partial

import pytest
import torch
from workers import tiny

from minirl.config import compose
from minirl.single_controller.decorator import Dispatch, register
from minirl.single_controller.local import LocalWorkerGroup
from minirl.workers.losses import ppo_loss
from minirl.workers.model import forward_log_probs
from minirl.workers.training_worker import TrainingWorker

ACTOR = compose(["actor_rollout_ref.actor.use_kl_loss=True"]).actor_rollout_ref.actor
TOLERANCE = {"ddp": dict(rtol=1e-5, atol=1e-5), "fsdp2": dict(rtol=1e-4, atol=1e-4)}


def score(module, data):
    return forward_log_probs(module, data, temperature=1.0)


class Trained(TrainingWorker):
    """A tiny actor whose options are chosen when it is (re)built, so that one process serves many tests."""

    def __init__(self, module, strategy, *, group):
        self.start, self.strategy, self.process_group = module, strategy, group
        self.build({})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def build(self, options):
        options = dict(options)
        module = copy.deepcopy(self.start).requires_grad_(not options.get("frozen", False))
        if options.pop("frozen_embedding", False):
            module.model.embed_tokens.requires_grad_(False)
        trains = not options.pop("frozen", False)
        super().__init__(
            module,
            score,
            name="actor",
            loss_fn=partial(ppo_loss, ACTOR),
            optim=ACTOR.optim if trains else None,
            strategy=self.strategy,
            group=self.process_group,
            **options,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data):
        return self.train_mini_batch(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def score(self, data):
        return self.infer_batch(data)["log_probs"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self):
        return self.parallel.weights(), self.parallel.moments(self.optimizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def micro_batches(self, data):
        return len(list(self._micro_batches(data, self.micro_batch_size)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self):
        """(bytes of weights on this rank, whether training calls a wrapper of the bare module)"""
        local = [p.to_local() if hasattr(p, "to_local") else p for p in self.module.parameters()]
        return sum(p.nbytes for p in local), self.parallel.module is not self.module


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def pair(request, ray_cluster):
    """Two processes, and the two virtual ranks that they must equal."""
    from minirl.single_controller.ray import RayWorkerGroup

    remote = RayWorkerGroup(Trained, tiny.causal_lm(), request.param, world_size=2)
    yield request.param, remote, LocalWorkerGroup(Trained, tiny.causal_lm(), request.param, world_size=2)
    remote.shutdown()


def uneven():
    """Long rows first, so that a token budget cuts the two ranks' halves into unequally many pieces."""
    batch = tiny.batch()
    return batch.select_idxs(batch.batch["attention_mask"].sum(-1).argsort(descending=True).tolist())


CUTS = {
    "whole": {},
    "micro-batches": {"micro_batch_size": 1},
    "token budget, unequal ranks": {"max_token_len": 14},
    "frozen embedding": {"frozen_embedding": True, "micro_batch_size": 2},
    "bfloat16": {"dtype": "bfloat16", "micro_batch_size": 2},
}


@pytest.mark.parametrize("cut", CUTS)
def test_processes_end_with_the_weights_moments_and_metrics_of_virtual_ranks(pair, cut):
    strategy, remote, local = pair
    tolerance = TOLERANCE[strategy] if cut != "bfloat16" else dict(rtol=1e-2, atol=1e-3)
    results = []
    for group in (local, remote):
        group.build(CUTS[cut])
        batch = uneven()
        metrics = group.update(batch)
        (weights, moments), *rest = group.whole()
        assert all(r == ({}, {}) for r in rest)  # only rank 0 gathers for the others
        results.append((metrics, weights, moments, torch.cat(group.score(batch))))
    (want, want_weights, want_moments, want_scores), (got, weights, moments, scores) = results
    for ours, theirs in zip(got, want, strict=True):
        for key in ("loss", "grad_norm", "actor/pg_clipfrac", "actor/pg_loss"):
            torch.testing.assert_close(torch.tensor(ours[key]), torch.tensor(theirs[key]), **tolerance)
    start = dict(tiny.causal_lm().named_parameters())
    assert weights.keys() >= start.keys() and len(moments) == len(start) - (cut == "frozen embedding")
    for name, value in start.items():
        assert weights[name].dtype == torch.float32
        torch.testing.assert_close(weights[name], want_weights[name], **tolerance)
        frozen = cut == "frozen embedding" and name == "model.embed_tokens.weight"
        assert torch.equal(weights[name], value) == frozen, name
    for i, slot in want_moments.items():
        assert moments[i]["step"] == slot["step"] == 4
        torch.testing.assert_close(moments[i]["exp_avg"], slot["exp_avg"], **tolerance)
    torch.testing.assert_close(scores, want_scores, **(tolerance | {"atol": 10 * tolerance["atol"]}))


def test_a_token_budget_gives_every_rank_as_many_micro_batches_as_the_longest_needs(pair):
    _, remote, local = pair
    alone = LocalWorkerGroup(Trained, tiny.causal_lm(), "ddp")
    alone.build({"max_token_len": 14})
    halves = [alone.micro_batches(uneven()[rows])[0] for rows in (slice(0, 4), slice(4, 8))]
    assert halves[0] > halves[1]
    for group in (local, remote):
        group.build({"max_token_len": 14})
        assert group.micro_batches(uneven()) == [halves[0]] * 2


def test_a_checkpoint_of_either_is_read_by_the_other_and_training_goes_on_to_the_same_numbers(pair, tmp_path):
    strategy, remote, local = pair
    batch = tiny.batch()
    for group in (local, remote):
        group.build({})
        group.update(copy.deepcopy(batch))
        group.save_checkpoint(str(tmp_path / type(group).__name__))
    files = [{p.name for p in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert files[0] == files[1]
    want = local.update(copy.deepcopy(batch))
    ends = [local.whole()[0][0]]
    for group, folder in (
        (remote, "LocalWorkerGroup"),
        (local, "RayWorkerGroup"),
        (remote, "RayWorkerGroup"),
    ):
        group.build({})
        group.load_checkpoint(str(tmp_path / folder))
        got = group.update(copy.deepcopy(batch))
        torch.testing.assert_close(
            torch.tensor(got[0]["loss"]), torch.tensor(want[0]["loss"]), **TOLERANCE[strategy]
        )
        ends.append(group.whole()[0][0])
    for other in ends[1:]:
        for name in dict(tiny.causal_lm().named_parameters()):
            torch.testing.assert_close(other[name], ends[0][name], **TOLERANCE[strategy])


def test_shards_hold_half_the_weights_and_copies_all_of_them(pair):
    strategy, remote, local = pair
    for group in (local, remote):
        group.build({})
    whole = sum(p.nbytes for p in tiny.causal_lm().parameters())
    assert local.held() == [(whole, False)] * 2
    assert remote.held() == ([(whole, True)] * 2 if strategy == "ddp" else [(whole // 2, False)] * 2)


def test_a_model_that_only_scores_is_sharded_but_never_wrapped_by_ddp(pair):
    strategy, remote, local = pair
    for group in (local, remote):
        group.build({"frozen": True, "infer_micro_batch_size": 2})
    assert [wrapped for _, wrapped in remote.held()] == [False, False]
    got, want = (torch.cat(group.score(tiny.batch())) for group in (remote, local))
    torch.testing.assert_close(got, want, **TOLERANCE[strategy])


def test_one_rank_is_the_bare_module_whatever_the_strategy(ray_cluster):
    from minirl.single_controller.ray import RayWorkerGroup

    one = RayWorkerGroup(Trained, tiny.causal_lm(), "fsdp2")
    alone = LocalWorkerGroup(Trained, tiny.causal_lm(), "fsdp2")
    assert one.held() == alone.held()
    assert one.update(tiny.batch())[0]["loss"] == alone.update(tiny.batch())[0]["loss"]
    got, want = one.whole()[0][0], alone.whole()[0][0]
    assert all(torch.equal(got[name], want[name]) for name in want)
    one.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_four_processes_end_where_four_virtual_ranks_end(strategy, ray_cluster):
    from minirl.single_controller.ray import RayWorkerGroup

    four, local = (
        RayWorkerGroup(Trained, tiny.causal_lm(), strategy, world_size=4),
        LocalWorkerGroup(Trained, tiny.causal_lm(), "ddp", world_size=4),
    )
    for group in (four, local):
        group.build({"micro_batch_size": 1})
        group.update(tiny.batch(rows=16))
    got, want = four.whole()[0][0], local.whole()[0][0]
    for name in dict(tiny.causal_lm().named_parameters()):
        torch.testing.assert_close(got[name], want[name], **TOLERANCE[strategy])
    four.shutdown()
