"""The forward pass: shifted by one, cut to what the batch uses, indifferent to padding."""

import torch
from workers import tiny

from minirl.workers.model import forward_log_probs, forward_values, load_value_model


def test_log_probs_are_those_of_each_sequence_alone_without_padding():
    model, batch = tiny.causal_lm().eval(), tiny.batch()
    with torch.no_grad():
        got = forward_log_probs(model, batch, temperature=0.7)["log_probs"]
        assert got.shape == (len(batch), tiny.R)
        for i in range(len(batch)):
            real = batch.batch["attention_mask"][i].bool()
            ids = batch.batch["input_ids"][i][real]
            length = int(batch.batch["response_mask"][i].sum())
            log_softmax = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
            want = log_softmax[:-1].gather(1, ids[1:, None])[-length:, 0]
            torch.testing.assert_close(got[i, :length], want, rtol=1e-4, atol=1e-5)


def test_values_are_read_before_each_response_token():
    model, batch = tiny.value_model().eval(), tiny.batch()
    with torch.no_grad():
        got = forward_values(model, batch)["values"]
        for i in range(len(batch)):
            ids = batch.batch["input_ids"][i][batch.batch["attention_mask"][i].bool()]
            length = int(batch.batch["response_mask"][i].sum())
            want = model(ids[None]).logits[0, :, 0][-length - 1 : -1]
            torch.testing.assert_close(got[i, :length], want, rtol=1e-4, atol=1e-5)


def test_entropy_and_sum_pi_squared_are_those_of_the_tempered_distribution():
    model, batch = tiny.causal_lm().eval(), tiny.batch()
    with torch.no_grad():
        out = forward_log_probs(
            model,
            batch,
            temperature=2.0,
            calculate_entropy=True,
            calculate_sum_pi_squared=True,
            keep_logits=True,
        )
    pi = torch.softmax(out["logits"].float(), -1)
    mask = batch.batch["response_mask"][:, : pi.shape[1]]
    for name, want in (("entropy", -(pi * pi.log()).sum(-1)), ("sum_pi_squared", pi.pow(2).sum(-1))):
        torch.testing.assert_close(out[name][:, : pi.shape[1]], want * mask, rtol=1e-4, atol=1e-5)
    cold = forward_log_probs(model, batch, temperature=1.0, calculate_entropy=True)["entropy"]
    assert (out["entropy"][:, 0] > cold[:, 0]).all()


def test_every_rank_draws_the_same_new_value_head(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path)
    one, other = (load_value_model(str(tmp_path)).score.weight for _ in range(2))
    assert torch.equal(one, other) and one.abs().sum() > 0
