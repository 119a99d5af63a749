"""The tracer on a toy trainer: tensors with the shapes and names of a real step, no model."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from minirl.protocol import DataProto
from minirl.trace import Trace, station, trace
from minirl.viz import ShapeTable

torch.set_num_threads(1)
b, n, P, R = 2, 3, 4, 5


class Tokenizer:
    """Token 7 decodes to markup, to see that it is escaped."""

    def decode(self, ids):
        return "".join("<script>" if token == 7 else f"t{token} " for token in ids)


class ToyTrainer:
    """Goes through the stations as PPOTrainer does, and balances the rows between rollout and reward."""

    def __init__(self, order=(4, 0, 5, 2, 1, 3)):
        self.tokenizer = Tokenizer()
        self.order = torch.tensor(order)

    def step(self):
        rows = {"dummy_tensor": torch.zeros(b, 1, dtype=torch.uint8)}
        arrays = {
            "raw_prompt": np.array(["甲", "乙"], dtype=object),
            "data_source": np.array(["g", "g"], dtype=object),
        }
        with station("load", {**rows, **arrays}) as s:
            batch = DataProto.from_single_dict({**rows, **arrays}, meta_info={"temperature": 1.0})
            batch.non_tensor_batch["uid"] = np.array(["u0", "u1"], dtype=object)
            s.done(batch)
        with station("gen_batch", batch) as s:
            gen = batch.pop(non_tensor_batch_keys=["raw_prompt"])
            gen.non_tensor_batch.update(batch.non_tensor_batch)
            gen = gen.repeat(n)
            s.done(gen)
        with station("rollout", gen) as s:
            batch = batch.repeat(n).union(self.generate())
            s.done(batch)
        batch.reorder(self.order)
        with station("reward", batch) as s:
            scores = torch.zeros(b * n, R)
            scores[:, R - 1] = batch.batch["responses"][:, 0].float()  # the score tells which row it was
            s.done(batch.union(DataProto.from_dict({"rm_scores": scores})))
        with station("advantage", batch) as s:
            batch.batch["token_level_scores"] = batch.batch["rm_scores"]
            batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
            batch.batch["response_mask"] = batch.batch["response_mask"] * (batch.batch["responses"] != 0)
            batch.batch["advantages"] = -scores
            s.done(batch)
        with station("update_actor", batch) as s:
            s.done(DataProto(meta_info={"metrics": {"actor/pg_loss": [0.1], "actor/kl": [0.2]}}))
        with station("sync", batch) as s:
            s.done()
        return batch

    def generate(self):
        responses = torch.arange(1, b * n * R + 1).reshape(b * n, R)
        mask = torch.ones(b * n, P + R, dtype=torch.int64)
        mask[:, 0] = 0
        prompts = torch.full((b * n, P), 2)
        return DataProto.from_dict(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": torch.ones(b * n, R, dtype=torch.int64),
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": mask,
                "rollout_log_probs": -responses / 10,
            },
            {"raw_prompt": np.array(["甲"] * n + ["乙"] * n, dtype=object)},
        )


@pytest.fixture
def traced() -> Trace:
    trainer = ToyTrainer()
    with trace(trainer, samples=(0, 4)) as t:
        trainer.step()
        trainer.step()
    return t


def statuses(record, *names):
    return [record.keys[name].status for name in names]


def test_without_a_trace_a_station_records_nothing_and_the_batch_is_the_same():
    with trace(ToyTrainer()) as t:
        pass
    batch = ToyTrainer().step()
    assert t.steps == []
    assert len(batch) == b * n


def test_each_load_opens_a_step_and_stations_come_in_order(traced):
    assert len(traced.steps) == 2
    assert list(traced.steps[0].stations) == [
        "load",
        "gen_batch",
        "rollout",
        "reward",
        "advantage",
        "update_actor",
        "sync",
    ]
    assert traced.steps[0].sizes == {"b": b, "B": b * n, "G": n, "P": P, "R": R}


def test_each_station_says_what_it_added(traced):
    stations = traced.steps[0].stations
    assert set(stations["load"].added()) == {
        "dummy_tensor",
        "raw_prompt",
        "data_source",
        "uid",
        "temperature",
    }
    assert stations["gen_batch"].added() == []
    assert stations["gen_batch"].dropped == ["dummy_tensor", "temperature"]
    assert statuses(stations["gen_batch"], "raw_prompt", "uid") == ["repeated", "repeated"]
    assert statuses(stations["rollout"], "dummy_tensor", "temperature", "responses") == [
        "returned",
        "returned",
        "added",
    ]
    assert stations["reward"].added() == ["rm_scores"]
    assert set(stations["advantage"].added()) == {"token_level_scores", "token_level_rewards", "advantages"}


def test_a_replaced_tensor_counts_as_changed_only_if_its_values_differ(traced):
    assert traced.steps[0].stations["advantage"].keys["response_mask"].status == "kept"
    batch = DataProto.from_dict(
        {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 3), "advantages": torch.zeros(2, 3)}
    )
    with trace() as t, station("advantage", batch) as s:
        batch.batch["values"] = torch.zeros(2, 3)
        batch.batch["returns"] = torch.ones(2, 3)
        batch.batch["advantages"].add_(1)  # in place: same memory, another version
        s.done(batch)
    assert statuses(t.steps[0].stations["advantage"], "values", "returns", "advantages") == [
        "kept",
        "changed",
        "changed",
    ]


def test_a_second_name_for_the_same_tensor_is_said(traced):
    keys = traced.steps[0].stations["advantage"].keys
    assert keys["token_level_scores"].alias_of == "rm_scores"
    assert keys["advantages"].alias_of is None


def test_a_key_has_letters_numbers_dtype_and_bytes(traced):
    key = traced.steps[0].stations["rollout"].keys["input_ids"]
    assert (key.dims, key.shape, key.dtype, key.device) == ("B P+R", [b * n, P + R], "int64", "cpu")
    assert key.bytes == b * n * (P + R) * 8


def test_the_rows_of_a_sample_survive_the_balancing(traced):
    stations = traced.steps[0].stations
    assert (
        stations["reward"].reordered
        and not stations["rollout"].reordered
        and not stations["advantage"].reordered
    )
    for sample in (0, 4):
        responses = stations["rollout"].rows[sample]["responses"]
        assert responses[0] == sample * R + 1
        assert stations["reward"].rows[sample]["rm_scores"] == [0, 0, 0, 0, responses[0]]
        assert stations["advantage"].rows[sample]["advantages"][-1] == -responses[0]


def test_the_rows_before_the_repeat_are_those_of_the_samples_prompt(traced):
    stations = traced.steps[0].stations
    assert stations["load"].rows[0]["raw_prompt"] == "甲"
    assert stations["load"].rows[4]["raw_prompt"] == "乙"
    assert stations["load"].rows[4]["uid"] == "u1"


def test_a_trainer_that_balances_inside_the_rollout_station_is_followed_too():
    class Inside(ToyTrainer):
        def step(self):
            order, self.order = self.order, torch.arange(b * n)
            union = DataProto.union

            def union_and_balance(batch, other):
                result = union(batch, other)
                if "responses" in other.batch:
                    result.reorder(order)
                return result

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DataProto, "union", union_and_balance)
                return super().step()

    trainer = Inside()
    with trace(trainer, samples=(0, 4)) as t:
        trainer.step()
    stations = t.steps[0].stations
    assert stations["rollout"].reordered and not stations["reward"].reordered
    assert statuses(stations["rollout"], "uid", "raw_prompt", "data_source") == ["kept"] * 3
    for sample, prompt in ((0, "甲"), (4, "乙")):
        assert stations["load"].rows[sample]["raw_prompt"] == prompt
        responses = stations["rollout"].rows[sample]["responses"]
        assert (responses[0] - 1) // R // n == "甲乙".index(prompt)  # a response to that prompt
        assert stations["reward"].rows[sample]["rm_scores"][-1] == responses[0]


def test_siblings_with_equal_responses_are_told_apart_by_order():
    class Twins(ToyTrainer):
        def generate(self):
            output = super().generate()
            for key in ("responses", "rollout_log_probs"):
                output.batch[key][1] = output.batch[key][0]
            return output

    trainer = Twins(order=(1, 0, 2, 3, 4, 5))
    with trace(trainer, samples=(0, 1)) as t:
        trainer.step()
    rows = t.steps[0].stations["reward"].rows
    assert rows[0]["rm_scores"] == rows[1]["rm_scores"] == [0, 0, 0, 0, 1]


def test_metrics_without_rows_leave_the_batch_as_it_was(traced):
    record = traced.steps[0].stations["update_actor"]
    assert record.metrics == ["actor/kl", "actor/pg_loss"]
    assert record.dropped == [] and {key.status for key in record.keys.values()} == {"kept"}


def test_a_tensor_that_contradicts_the_ledger_stops_the_run():
    batch = DataProto.from_dict({"responses": torch.zeros(4, 3, dtype=torch.int64)})
    with trace(), station("values", batch) as s:
        batch.batch["values"] = torch.zeros(4, 7)
        with pytest.raises(ValueError, match=r"'values' \(station values\) has shape \[4, 7\]: .*R=3"):
            s.done(batch)


def test_weights_handed_over_before_the_first_batch_are_not_a_step():
    with trace() as t, station("sync", None) as s:
        s.done(None)
    assert t.steps == []


def test_traces_do_not_outlive_their_block_even_after_an_error():
    with pytest.raises(RuntimeError), trace():
        raise RuntimeError
    with station("load") as s:
        s.done(None)
    assert type(s).__name__ == "_NoVisit"


def test_what_was_not_traced_is_named(traced):
    with pytest.raises(ValueError, match=r"sample 3 was not traced, only \(0, 4\)"):
        traced.strip(3)
    with pytest.raises(ValueError, match="step 5 was not traced, only 2"):
        traced.table(5)


# ---- json -------------------------------------------------------------------------


def test_json_keeps_everything_that_is_shown(traced, tmp_path):
    path = tmp_path / "trace.json"
    traced.to_json(path)
    again = Trace.load(path)
    assert again.steps == traced.steps and again.samples == traced.samples
    assert again.text(1) == traced.text(1)
    assert str(again.strip(4)) == str(traced.strip(4))


# ---- what is shown ------------------------------------------------------------------

GOLDEN = """\
b = 2（一步的提示词数）；B = 6（一步的轨迹数）；G = 3（一组的轨迹数）；P = 4（填充后的提示词长度）；R = 5（填充后的响应长度）

4 打分 reward，_ s，行序变了
  + 新增    rm_scores            batch                         [B, R] = [6, 5]                 float32  120   AgentLoopWorker._postprocess
  另有 11 个键未变

7 优势 advantage，_ s
  + 新增    token_level_scores   batch                         [B, R] = [6, 5]，即 rm_scores   float32  120   RayPPOTrainer.fit
  + 新增    token_level_rewards  batch                         [B, R] = [6, 5]，即 rm_scores   float32  120   RayPPOTrainer.fit
  + 新增    advantages           batch                         [B, R] = [6, 5]                 float32  120   compute_advantage
  另有 12 个键未变

9 更新 actor update_actor，_ s
  另有 15 个键未变；指标 2 个：actor/kl、actor/pg_loss"""  # noqa: E501


def test_the_text_table_is_golden(traced):
    text = re.sub(r"\d+\.\d{3} s", "_ s", traced.text())
    head, *blocks = text.split("\n\n")
    shown = [block for block in blocks if block[0] in "479"]
    squeeze = lambda lines: re.sub(r" {2,}", "  ", lines)  # noqa: E731
    assert squeeze("\n\n".join([head, *shown])) == squeeze(GOLDEN)
    assert "  × 重复  uid" in squeeze(text).replace("  ×", "  ×") and "[b] = [2]  [B] = [6]" in squeeze(text)
    assert "- 未带走" in text and "↩ 取回" in text


def test_columns_line_up_in_a_terminal(traced):
    from minirl.viz import _width

    lines = [line for line in traced.text().split("\n") if "  batch  " in line and "+ 新增" in line]
    assert len({_width(line[: line.index("  batch")]) for line in lines}) == 1


class Reader(HTMLParser):
    """Collects text, and fails on a tag that is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_the_html_table_says_the_same_as_the_text(traced):
    page = read(traced._repr_html_())
    assert page.tags <= {"style", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "code"}
    words = " ".join(page.text)
    for cell in ("3 生成 rollout", "+ 新增", "rm_scores", "[B, P+R] = [6, 9]", "[b] = [2]", "行序变了"):
        assert cell in words


def test_html_asks_for_nothing_outside_itself(traced):
    for html in (traced._repr_html_(), traced.strip(0)._repr_html_()):
        assert not re.search(r"https?:|url\(|@import|<link|<img|<script", html)
        assert "overflow-x:auto" in html and "var(--pst-color-text-base,inherit)" in html


def test_tokens_and_keys_are_escaped():
    trainer = ToyTrainer()
    with trace(trainer, samples=(1,)) as t:  # its second response token is 7
        batch = trainer.step()
        batch.meta_info["<b>x</b>"] = "<img src=x onerror=alert(1)>"
        with station("values", batch) as s:
            s.done(batch)
    strip, table = t.strip(1)._repr_html_(), t._repr_html_()
    assert "<script>" in t.strip(1).tokens
    assert "&lt;script&gt;" in strip and "<script>" not in strip
    read(strip), read(table)


def test_hostile_meta_info_is_escaped_in_the_table():
    batch = DataProto.from_dict({"values": torch.zeros(2, 3)})
    with trace() as t, station("values", batch) as s:
        batch.meta_info["<b>x</b>"] = "<img src=x onerror=alert(1)>"
        s.done(batch)
    html = t._repr_html_()
    assert "<img" not in html and "&lt;img src=x onerror=alert(1)&gt;" in html and "<b>" not in html


def test_the_strip_shows_the_real_tokens_and_every_number_as_text(traced):
    strip = traced.strip(4)
    assert strip.prompt == "t2 t2 t2 "  # the padded first position is left out
    assert strip.tokens == [f"t{i} " for i in range(21, 26)]
    assert list(strip.rows) == [
        "response_mask",
        "rollout_log_probs",
        "rm_scores",
        "token_level_rewards",
        "advantages",
    ]
    assert strip.rows["advantages"] == [0, 0, 0, 0, -21]
    words = read(strip._repr_html_()).text
    for cell in ("-2.10", "+21.00", "-21.00", "t21␣"):
        assert cell in words
    assert str(strip).split("\n")[2].split() == ["token", *strip.rows]


def test_colour_only_repeats_the_sign(traced):
    html = traced.strip(4)._repr_html_()
    assert re.search(r"rgba\(234,88,12,[\d.]+\)\">-21.00<", html)
    assert re.search(r"rgba\(37,99,235,[\d.]+\)\">\+21.00<", html)
    assert "<td>0</td>" in html


def test_a_trace_without_a_tokenizer_shows_ids():
    trainer = ToyTrainer()
    with trace(None, samples=(0,)) as t:
        trainer.step()
    assert t.strip(0).tokens == ["1", "2", "3", "4", "5"] and t.strip(0).prompt == "2 2 2"


def test_a_table_of_chosen_stations_shows_only_these(traced):
    whole = traced.table(0)
    some = traced.table(0, stations=("advantage",))
    assert "7 优势" in str(some) and "4 打分" not in str(some) and "4 打分" in str(whole)
    assert "7 优势" in some._repr_html_() and "4 打分" not in some._repr_html_()
    with pytest.raises(ValueError, match="station 'values' was not traced: choose from load, .*, advantage"):
        traced.table(0, stations=("values",))


def test_a_table_needs_only_the_record(traced):
    assert str(ShapeTable(traced.steps[0])) == traced.text(0)
