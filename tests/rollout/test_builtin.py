"""The builtin rollout against transformers: text, log-probs, masks, seeds."""

import copy

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minirl.protocol import DataProto
from minirl.rollout import qwen2_decoder
from minirl.rollout.builtin import BuiltinRollout
from minirl.rollout.decoder import CausalLMDecoder
from minirl.rollout.sampling import SamplingParams, filter_logits, pick, row_uniforms

V, P, R = 40, 12, 16
WORDS = [f"w{i}" for i in range(V - 3)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer


def build(kind: str):
    torch.manual_seed(3)
    common = dict(vocab_size=V, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3)
    wide = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=64)
    if kind == "gpt2":  # learned absolute positions: a wrong position under left padding changes the text
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)).eval()
    if kind == "llama":
        config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **wide, **common)
        return LlamaForCausalLM(config).eval()
    kv_heads = {"qwen2": 4, "qwen2-gqa": 2}[kind]
    tied = kind == "qwen2"
    config = Qwen2Config(
        num_attention_heads=4, num_key_value_heads=kv_heads, tie_word_embeddings=tied, **wide, **common
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # as built they are all ones and zeros, which would hide a forgotten weight
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def config(**changes):
    base = dict(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        do_sample=True,
        prompt_length=P,
        response_length=R,
        ignore_eos=False,
        calculate_log_probs=True,
        val_kwargs=dict(temperature=0, top_p=1.0, top_k=-1, do_sample=False),
    )
    return OmegaConf.create(base | changes)


def prompts(groups: int = 5, n: int = 4, **meta_info) -> DataProto:
    """Prompts of 3 to 3 + groups words, each repeated n times."""
    draw = np.random.default_rng(0)
    rows = [
        [{"role": "user", "content": " ".join(draw.choice(WORDS, size=3 + i % 8))}]
        for i in range(groups)
        for _ in range(n)
        if n
    ]
    first = {i // n: rows[i] for i in range(0, len(rows), n)}
    raw_prompt = np.empty(len(rows), dtype=object)
    raw_prompt[:] = [first[i // n] for i in range(len(rows))]
    return DataProto(non_tensor_batch={"raw_prompt": raw_prompt}, meta_info=meta_info)


def generic(rollout: BuiltinRollout) -> BuiltinRollout:
    rollout.decoder = CausalLMDecoder(rollout.model)
    return rollout


KINDS = ["qwen2", "qwen2-gqa", "llama", "gpt2"]


def test_fast_path_is_taken_for_qwen2_only():
    assert [qwen2_decoder.supports(build(kind)) for kind in KINDS] == [True, True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_identical_to_transformers_generate(kind, tokenizer):
    model = build(kind)
    out = BuiltinRollout(config(), model, tokenizer).generate_sequences(prompts(validate=True))
    ids, mask = out.batch["prompts"], out.batch["attention_mask"][:, :P]
    expected = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=R, do_sample=False, pad_token_id=0, eos_token_id=1
    )[:, P:]
    expected = torch.nn.functional.pad(expected, (0, R - expected.shape[1]))
    assert out.batch["responses"].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_log_probs_equal_a_full_forward(kind, tokenizer):
    model = build(kind)
    batch = BuiltinRollout(config(temperature=0.8), model, tokenizer).generate_sequences(prompts()).batch
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits
    # the logit at position t scores the token at t + 1
    full = (logits[:, P - 1 : -1] / 0.8).log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    assert batch["rollout_log_probs"].dtype == torch.float32
    torch.testing.assert_close(batch["rollout_log_probs"][mask], full[mask], atol=2e-5, rtol=0)
    assert (batch["rollout_log_probs"][~mask] == 0).all()


@pytest.mark.parametrize(("groups", "n"), [(6, 5), (20, 1), (1, 16)])
@pytest.mark.parametrize("kind", ["qwen2", "qwen2-gqa"])
def test_fast_path_draws_the_same_tokens_as_the_generic_path(kind, groups, n, tokenizer):
    model = build(kind)
    fast = BuiltinRollout(config(), model, tokenizer)
    assert isinstance(fast.decoder, qwen2_decoder.Qwen2Decoder)
    a = fast.generate_sequences(prompts(groups, n, rollout_seed=7)).batch
    b = (
        generic(BuiltinRollout(config(), model, tokenizer))
        .generate_sequences(prompts(groups, n, rollout_seed=7))
        .batch
    )
    lengths = a["response_mask"].sum(-1)
    assert lengths.min() < R // 2 < lengths.max()  # rows ended early: compaction really ran
    assert a["responses"].tolist() == b["responses"].tolist()
    torch.testing.assert_close(a["rollout_log_probs"], b["rollout_log_probs"], atol=2e-5, rtol=0)


def test_shapes_dtypes_and_masks(tokenizer):
    out = BuiltinRollout(config(), build("qwen2"), tokenizer).generate_sequences(prompts(global_steps=3))
    batch, rows = out.batch, 20
    widths = dict(prompts=P, responses=R, response_mask=R, input_ids=P + R, attention_mask=P + R)
    for key, width in (widths | dict(position_ids=P + R)).items():
        assert batch[key].shape == (rows, width) and batch[key].dtype == torch.int64, key
    prompt_mask = batch["attention_mask"][:, :P]
    assert (prompt_mask.diff(dim=-1) >= 0).all()  # padding on the left
    assert (batch["response_mask"].diff(dim=-1) <= 0).all()  # and on the right
    assert torch.equal(batch["attention_mask"][:, P:], batch["response_mask"])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=-1))
    first_real = prompt_mask.argmax(dim=-1)
    assert (batch["position_ids"].gather(1, first_real[:, None]) == 0).all()
    assert out.non_tensor_batch["__num_turns__"].dtype == np.int32
    assert out.non_tensor_batch["multi_modal_inputs"].tolist() == [{}] * rows
    assert out.meta_info["timing"]["agent_loop/slowest/generate_sequences"] > 0


def test_eos_is_the_last_token_of_the_mask(tokenizer):
    batch = BuiltinRollout(config(), build("qwen2"), tokenizer).generate_sequences(prompts(groups=8)).batch
    lengths = batch["response_mask"].sum(-1)
    ended = lengths < R
    assert 0 < ended.sum() < len(ended)
    last = batch["responses"].gather(1, lengths[:, None] - 1)[:, 0]
    assert (last[ended] == 1).all()
    is_eos = (batch["responses"] == 1) & batch["response_mask"].bool()
    assert is_eos.sum(-1).max() == 1
    assert (batch["responses"][~batch["response_mask"].bool()] == 0).all()


def test_ignore_eos_fills_the_width(tokenizer):
    rollout = BuiltinRollout(config(ignore_eos=True), build("qwen2"), tokenizer)
    assert rollout.generate_sequences(prompts()).batch["response_mask"].all()


def test_a_row_is_the_same_whatever_the_batch_around_it(tokenizer):
    rollout = BuiltinRollout(config(), build("qwen2"), tokenizer)
    batch = prompts(groups=6, n=3)
    whole = rollout.generate_sequences(batch).batch
    order = np.random.default_rng(1).permutation(18)
    order = order[np.argsort(order % 3, kind="stable")]  # siblings keep their order, groups are torn apart
    permuted = DataProto(non_tensor_batch={"raw_prompt": batch.non_tensor_batch["raw_prompt"][order]})
    again = rollout.generate_sequences(permuted).batch
    assert again["responses"].tolist() == whole["responses"][torch.tensor(order)].tolist()
    part = DataProto(non_tensor_batch={"raw_prompt": batch.non_tensor_batch["raw_prompt"][3:6]})
    alone = rollout.generate_sequences(part).batch
    assert alone["responses"].tolist() == whole["responses"][3:6].tolist()


def test_row_seeds_survive_a_split_inside_a_group(tokenizer):
    rollout = BuiltinRollout(config(), build("qwen2"), tokenizer)
    batch = prompts(groups=3, n=4)
    batch.non_tensor_batch["__seed__"] = np.arange(12)
    whole = rollout.generate_sequences(batch).batch["responses"].tolist()
    halves = [
        rollout.generate_sequences(
            DataProto(non_tensor_batch={key: value[rows] for key, value in batch.non_tensor_batch.items()})
        ).batch["responses"]
        for rows in (slice(0, 6), slice(6, 12))
    ]
    assert torch.cat(halves).tolist() == whole


def test_siblings_steps_and_seeds_draw_differently(tokenizer):
    rollout = BuiltinRollout(config(), build("qwen2"), tokenizer)

    def text(**meta_info):
        return rollout.generate_sequences(prompts(groups=2, n=4, **meta_info)).batch["responses"].tolist()

    base = text(global_steps=1)
    assert len({tuple(row) for row in base[:4]}) > 1
    assert text(global_steps=1) == base
    assert text(global_steps=2) != base
    assert text(global_steps=1, rollout_seed=8) != base
    state = torch.random.get_rng_state()
    text()
    assert torch.equal(torch.random.get_rng_state(), state)  # no global generator


def test_prefix_sharing_equals_prefilling_every_row(tokenizer, monkeypatch):
    model = build("qwen2")
    widths = []
    prefill = CausalLMDecoder.prefill

    def spy(self, input_ids, attention_mask, max_new_tokens):
        widths.append(len(input_ids))
        return prefill(self, input_ids, attention_mask, max_new_tokens)

    monkeypatch.setattr(CausalLMDecoder, "prefill", spy)
    batch = prompts(groups=3, n=4)
    batch.non_tensor_batch["__seed__"] = np.arange(12)
    rollout = BuiltinRollout(config(), model, tokenizer)
    shared = rollout.generate_sequences(batch).batch
    assert widths == [3]
    for row in range(12):
        one = DataProto(non_tensor_batch={key: value[[row]] for key, value in batch.non_tensor_batch.items()})
        alone = rollout.generate_sequences(one).batch
        assert alone["responses"][0].tolist() == shared["responses"][row].tolist()
        torch.testing.assert_close(
            alone["rollout_log_probs"][0], shared["rollout_log_probs"][row], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_text_changes_only_when_the_weights_are_synced(kind, tokenizer):
    model = build(kind)
    rollout = BuiltinRollout(config(), model, tokenizer)
    before = rollout.generate_sequences(prompts(validate=True)).batch["responses"].tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert rollout.generate_sequences(prompts(validate=True)).batch["responses"].tolist() == before
    assert rollout.version == 0
    rollout.sleep()
    with pytest.raises(AssertionError, match="wake_up"):
        rollout.generate_sequences(prompts())
    rollout.update_weights(model.named_parameters(), version=4)
    after = rollout.generate_sequences(prompts(validate=True)).batch["responses"].tolist()
    fresh = BuiltinRollout(config(), copy.deepcopy(model), tokenizer)
    assert rollout.version == 4
    assert after != before
    assert after == fresh.generate_sequences(prompts(validate=True)).batch["responses"].tolist()


def test_do_sample_false_makes_single_rows_greedy(tokenizer):
    rollout = BuiltinRollout(config(), build("qwen2"), tokenizer)
    batch = prompts(groups=3, n=2)
    batch.non_tensor_batch["__do_sample__"] = np.array([True, False] * 3)
    mixed = rollout.generate_sequences(batch).batch["responses"].tolist()
    sampled = rollout.generate_sequences(prompts(groups=3, n=2)).batch["responses"].tolist()
    greedy = rollout.generate_sequences(prompts(groups=3, n=2, do_sample=False)).batch["responses"].tolist()
    assert mixed[0::2] == sampled[0::2]
    assert mixed[1::2] == greedy[1::2]
    assert sampled != greedy


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.7), (8, 0.6), (1, 1.0), (V + 10, 1.0)])
def test_filtered_distribution_equals_transformers_warpers(top_k, top_p):
    logits = 3 * torch.randn(50, V, generator=torch.Generator().manual_seed(0))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(min(top_k, V)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits.clone()).softmax(-1)
    ours = filter_logits(logits / 0.7, top_k=top_k, top_p=top_p).softmax(-1)
    torch.testing.assert_close(ours, expected)


def test_top_p_and_top_k_log_probs_are_renormalised(tokenizer):
    model = build("qwen2")
    rollout = BuiltinRollout(config(top_k=6, top_p=0.8), model, tokenizer)
    batch = rollout.generate_sequences(prompts()).batch
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits[:, P - 1 : -1]
    warpers = LogitsProcessorList([TopKLogitsWarper(6), TopPLogitsWarper(0.8)])
    full = warpers(None, logits.flatten(0, 1)).log_softmax(-1).view_as(logits)
    full = full.gather(-1, batch["responses"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    torch.testing.assert_close(batch["rollout_log_probs"][mask], full[mask], atol=2e-5, rtol=0)


def test_inverse_cdf_draws_each_token_as_often_as_its_probability():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    uniform = row_uniforms(np.arange(20_000, dtype=np.uint64), 1)[:, 0]
    token, log_prob = pick(probs.log().expand(20_000, 4), uniform, None, SamplingParams())
    share = token.bincount(minlength=4) / 20_000
    assert share[1] == 0
    assert (share - probs).abs().max() < 0.015  # four standard deviations
    torch.testing.assert_close(log_prob, probs.log()[token])


def test_uniforms_are_uniform_and_independent_between_rows_and_steps():
    u = row_uniforms(np.arange(2000, dtype=np.uint64), 8)
    assert 0 <= u.min() and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 0.01
    assert abs(float(u.var()) - 1 / 12) < 0.005
    assert float(torch.corrcoef(u.T).fill_diagonal_(0).abs().max()) < 0.1
    assert float(torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1].abs()) < 0.1


def test_overlong_prompt_names_the_field(tokenizer):
    rollout = BuiltinRollout(config(prompt_length=5), build("qwen2"), tokenizer)
    with pytest.raises(
        ValueError, match=r"6 tokens but data\.max_prompt_length is 5.*filter_overlong_prompts"
    ):
        rollout.generate_sequences(prompts())


@pytest.mark.parametrize("token", ["pad", "eos"])
def test_tokenizer_without_special_token_is_refused(token, tokenizer):
    broken = copy.deepcopy(tokenizer)
    setattr(broken, f"{token}_token", None)
    with pytest.raises(ValueError, match=f"set tokenizer.{token}_token"):
        BuiltinRollout(config(), build("qwen2"), broken)


@pytest.mark.parametrize("change", [dict(temperature=-1), dict(top_p=0), dict(top_k=-3)])
def test_impossible_sampling_options_are_refused(change, tokenizer):
    rollout = BuiltinRollout(config(**change), build("qwen2"), tokenizer)
    with pytest.raises(ValueError, match=f"rollout.{next(iter(change))} is"):
        rollout.generate_sequences(prompts())
