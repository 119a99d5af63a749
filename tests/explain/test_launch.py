"""Each option of a launch script: default at the pin, reader, nearest name; and what the batch comes to."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from minirl.config import compose as minirl_compose
from minirl.explain import batch_arithmetic, explain_launch
from minirl.explain.catalogue import DATA, option_rows
from minirl.explain.launch import default_text, nearest
from minirl.pin import find_symbol, verl_root

GSM8K = (DATA / "launch" / "gsm8k_ppo.sh").read_text(encoding="utf-8")


def launch(*overrides: str):
    return explain_launch("python3 -m verl.trainer.main_ppo " + " ".join(overrides))


def option(text: str):
    return launch(text).options[0]


def compose_at_the_pin(*overrides: str):
    with initialize_config_dir(str(verl_root() / "verl" / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])


def test_every_option_of_the_gsm8k_line_is_in_the_pin_s_yaml_and_has_words():
    found = explain_launch(GSM8K)
    assert len(found.options) == 45 and found.module == "verl.trainer.main_ppo"
    assert [o.key for o in found.options if o.default is None or o.problem] == []
    assert [o.key for o in found.options if o.key not in option_rows()] == []


def test_the_pin_composes_the_gsm8k_line_to_the_values_we_read_from_it():
    found = explain_launch(GSM8K)
    plain = [f"{o.key}={o.value}" for o in found.options if "$" not in o.value]
    theirs = compose_at_the_pin(*plain)
    for key in ("data.train_batch_size", "actor_rollout_ref.actor.optim.lr", "trainer.logger"):
        section, name = key.rsplit(".", 1)
        ours, verls = found.config, theirs
        for part in section.split("."):
            ours, verls = ours[part], verls[part]
        assert ours[name] == verls[name], key


def test_the_gsm8k_line_makes_four_updates_of_32_rows_a_gpu():
    assert batch_arithmetic(explain_launch(GSM8K).config) == {
        "prompts": 1024,
        "trajectories": 1024,
        "dp": 8,
        "mini_batch_rows": 256,
        "rows_per_rank": 32,
        "optimizer_steps": 4,
        "micro_batches": None,
    }


def test_the_arithmetic_of_minirl_s_own_configuration_counts_micro_batches():
    numbers = batch_arithmetic(minirl_compose(["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]))
    assert numbers["trajectories"] == 128 and numbers["optimizer_steps"] == 4
    assert numbers["micro_batches"] == 16


def test_whole_counts_are_integers_and_a_batch_that_does_not_divide_keeps_its_fraction():
    whole = batch_arithmetic(explain_launch(GSM8K).config)
    assert isinstance(whole["optimizer_steps"], int) and isinstance(whole["rows_per_rank"], int)
    uneven = explain_launch(GSM8K.rstrip() + " data.train_batch_size=640").config
    assert batch_arithmetic(uneven)["optimizer_steps"] == 2.5


def test_the_gsm8k_line_sets_a_reference_policy_that_is_never_built():
    assert any("不会建参考策略" in note for note in explain_launch(GSM8K).notes)


def test_a_default_is_read_from_the_yaml_and_an_interpolation_shows_its_value():
    assert default_text("data.train_batch_size") == "1024"
    assert default_text("actor_rollout_ref.rollout.prompt_length").endswith("= 512")
    assert default_text("actor_rollout_ref.rollout.name") == "???"
    assert default_text("no.such.key") is None


def test_a_value_like_the_default_is_called_the_same_however_it_is_written():
    assert option("actor_rollout_ref.actor.optim.lr=1e-6").same
    assert not option("actor_rollout_ref.rollout.n=5").same


def test_a_misspelt_key_is_named_with_the_nearest_one_and_hydra_refuses_it():
    wrong = option("data.train_batchsize=64")
    assert wrong.consumer == "没有人" and "data.train_batch_size" in wrong.problem
    with pytest.raises(ConfigCompositionException):
        compose_at_the_pin("data.train_batchsize=64")


def test_a_right_name_in_the_wrong_section_is_found():
    assert nearest("actor.ppo_mini_batch_size") == "actor_rollout_ref.actor.ppo_mini_batch_size"


def test_a_plus_before_a_known_key_and_none_before_a_new_one_are_both_refused_by_hydra():
    assert "去掉 +" in option("+data.train_batch_size=64").problem
    assert "要加 +" in option("data.gen_batch_size=64").problem
    assert option("+data.gen_batch_size=64").problem == ""
    for text in ("+data.train_batch_size=64", "data.gen_batch_size=64"):
        with pytest.raises(ConfigCompositionException):
            compose_at_the_pin(text)
    assert compose_at_the_pin("+data.gen_batch_size=64").data.gen_batch_size == 64


def test_an_old_key_says_where_it_went():
    assert "reward.custom_reward_function.path" in option("custom_reward_function.path=a.py").problem


def test_what_minirl_lacks_is_marked():
    assert option("actor_rollout_ref.rollout.n=2").in_minirl
    assert not option("actor_rollout_ref.actor.fsdp_config.param_offload=True").in_minirl


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor_rollout_ref.actor.clip_ratio=0.3"], "只写 clip_ratio 不起作用"),
        (["data.train_batch_size=64"], "启动就报错"),
        (["data.train_batch_size=64", "actor_rollout_ref.actor.use_dynamic_bsz=True"], "断言失败"),
        (["trainer.n_gpus_per_node=7"], "不能被 7"),
        (["algorithm.kl_ctrl.kl_coef=0.1"], "use_kl_in_reward=True 才有人用"),
        (["algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=True"], "两个 KL 开关"),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            ],
            "不起作用",
        ),
        (["actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True"], "必须相同"),
        (["algorithm.adv_estimator=grpo"], "组里只有自己"),
        (["algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5"], "不建 critic"),
    ],
)
def test_a_combination_that_does_something_else_is_pointed_out(overrides, words):
    assert any(words in note for note in launch(*overrides).notes)


def test_a_size_that_is_no_number_is_named_and_stops_the_other_notes():
    assert launch("data.train_batch_size=null").notes == ["data.train_batch_size=None：要写一个正整数"]
    assert launch("trainer.nnodes=two").notes == ["trainer.nnodes=two：要写一个正整数"]


def test_what_a_command_computes_and_a_whole_section_leave_the_defaults():
    found = launch("data.train_batch_size=`nproc`", "data.max_prompt_length=$(nproc)", "critic=dp_critic")
    assert found.config.data.train_batch_size == 1024 and found.config.data.max_prompt_length == 512
    assert found.config.critic.optim.lr == 1e-5


def test_a_plain_line_has_no_notes():
    assert launch("data.train_batch_size=512").notes == []


def test_another_entry_point_is_said():
    assert (
        "verl.trainer.main_ppo_sync" in explain_launch("python -m verl.trainer.main_ppo_sync a.b=1").notes[0]
    )


def test_overrides_alone_are_enough_and_a_text_without_any_is_refused():
    assert explain_launch("data.seed=1\ndata.shuffle=False\n").module == ""
    with pytest.raises(ValueError, match="no override"):
        explain_launch("echo hello\nls -l\n")


def test_the_text_names_default_reader_and_unit():
    text = launch("data.train_batch_size=64").text()
    assert "默认 1024" in text and "提示词" in text and "_create_dataloader" in text


def test_every_row_of_the_options_table_resolves_at_the_pin():
    for key, row in option_rows().items():
        assert default_text(key) is not None, key
        assert ":" in row["reader"] and find_symbol(row["reader"]).version, key
