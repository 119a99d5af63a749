"""A teacher need not have the student's number of logits, but must read the student's tokens."""

import pytest
import tiny_run
import torch

from minirl.config import compose
from minirl.protocol import DataProto
from minirl.workers.teacher import TeacherWorker

STUDENT_VOCAB = 27  # of tiny_run


@pytest.fixture
def student(tmp_path) -> list[str]:
    return [*tiny_run.make(tmp_path), "algorithm.adv_estimator=grpo", "distillation.enabled=True"]


def teacher(folder, student, vocab_size: int, *overrides: str) -> TeacherWorker:
    tiny_run.save_model(folder / "teacher", vocab_size=vocab_size, initializer_range=1.0)
    path = f"distillation.teacher_models.teacher_model.model_path={folder}/teacher"
    return TeacherWorker(compose([*student, path, *overrides]))


def two_rows() -> DataProto:
    ids = torch.arange(20).view(2, 10) % STUDENT_VOCAB
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "prompts": ids[:, :4],
            "responses": ids[:, 4:],
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
        }
    )


TOPK = ["distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.distillation_loss.topk=8"]


def test_a_teacher_padded_to_more_tokens_teaches_only_those_the_student_has(tmp_path, student):
    worker = teacher(tmp_path, student, 60, *TOPK)
    ids = worker.compute_teacher_logprobs(two_rows()).batch["teacher_ids"]
    assert ids.shape == (2, 10, 8) and ids.max() < STUDENT_VOCAB
    logits = worker.module(two_rows().batch["input_ids"]).logits
    assert (logits.topk(8).indices >= STUDENT_VOCAB).any()  # it would have named others


def test_a_teacher_with_fewer_tokens_than_the_tokenizer_is_refused(tmp_path, student):
    with pytest.raises(ValueError, match=r"teacher_model.model_path=.* knows 10 tokens.* tokenizer 27"):
        teacher(tmp_path, student, 10)


def test_more_of_the_best_tokens_than_there_are_is_refused(tmp_path, student):
    with pytest.raises(ValueError, match=r"topk=28 is more than the 27 tokens"):
        teacher(tmp_path, student, 60, TOPK[0], "distillation.distillation_loss.topk=28")


def test_a_teacher_that_is_not_there_is_named_by_its_key(tmp_path, student):
    path = f"distillation.teacher_models.teacher_model.model_path={tmp_path}/nobody"
    with pytest.raises(ValueError, match=r"teacher_model.model_path=.*/nobody: no such folder"):
        TeacherWorker(compose([*student, path]))
