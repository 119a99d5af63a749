"""The card of each shipped folder: card.json with measured numbers, README.md with the same numbers in words.

In:  a dict measured by build.py -> Out: card.json and README.md.
The text is Chinese because readers see it; no number in it is typed by hand.
verl: none
"""

import json
from pathlib import Path
from string import Template

TEXTS = {
    "gsm8k_mini": """# gsm8k_mini：两步小应用题

与 verl 的 GSM8K 同样的列：`data_source`（`openai/gsm8k`）、`prompt`、`ability`、`reward_model`、
`extra_info`。题目由 `minirl.data.task` 按种子生成，完全离线，不含任何第三方数据。

| | 训练 `train.parquet` | 测试 `test.parquet` |
|---|---|---|
| 题数 | $rows_train | $rows_test |
| 可用的算式链 | $chains_train | $chains_test |

测试题的算式链（起始数、两次运算）在训练题里一次也不出现，所以测试题答对不可能是背下来的。
四种运算组合（++、+-、-+、--）各占四分之一，所有中间结果都在 1 到 10 之间。

例题：

> $example_question

```
$example_answer
```

种子：`$seeds`。重建：`make data`；只核对：`make data CHECK=1`。
""",
    "tiny_lm": """# tiny_lm：预热过的小语言模型

结构是 transformers 的 `Qwen2ForCausalLM`，$parameters 个参数，float32；词表 $vocab_size 个
（字节级 BPE，一个数字一个 token，任何文本编码后都能原样解码）。
不是任何公开模型的权重，是从随机初始化训练出来的。

做法：在训练题上做 SFT，答案由一位“粗心的标注员”写：算术都对，但“减少”常被看成“增加”，有时写完第一步就交卷。
减法看错的概率超过一半，所以贪心解码也会错：这就给 RL 留出了空间。
RL 在这里做的是把 SFT 里已有的好做法的概率抬高，不是教会新的算术。

测试集上的分数（由构建脚本写入 `card.json`）：

| 指标 | 值 |
|---|---|
| 贪心 pass@1 | $greedy |
| 采样 pass@1（温度 1） | $sampled |
| 采样 pass@8 | $pass8 |
| 8 个答案奖励全相同的组 | $zero |

种子：`$seeds`。重建：`make data`；同一台机器上逐字节相同，换一种 CPU 时权重的末位可能不同。
""",
    "tiny_critic": """# tiny_critic：预热过的小价值模型

结构是 `Qwen2ForTokenClassification`（`num_labels=1`，与 verl 的 critic 相同），$parameters 个参数，float32，
分词器与 tiny_lm 相同。

做法：以 tiny_lm 的各层为起点，用 tiny_lm 在训练题上采样的 $rollouts 条回答，让每个位置的值去拟合最终奖励
（gamma = lambda = 1）。从零开始的 critic 学得慢，几十步 RL 里帮不上忙，所以先预热；
真实训练里对应 `trainer.critic_warmup`。

测试题上的解释方差（1 是完全说中，0 等于只猜平均数；由构建脚本写入 `card.json`）：
全部 token 合计 **$whole**，按“生成第 t 个 token 之前”分开看：

| t | 解释方差 |
|---|---|
$by_position

写出运算符的位置之后台阶最明显：看到“把减看成加”，就知道这条回答多半拿不到分了。

种子：`$seeds`。重建：`make data`；同一台机器上逐字节相同，换一种 CPU 时权重的末位可能不同。
""",
}


def write(folder: Path, kind: str, measured: dict) -> None:
    (folder / "card.json").write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(Template(TEXTS[kind]).substitute(_values(kind, measured)))


def _values(kind: str, measured: dict) -> dict:
    values = {"seeds": json.dumps(measured["seeds"])}
    if kind == "gsm8k_mini":
        for name in ("rows", "chains", "example"):
            values |= {f"{name}_{key}": value for key, value in measured[name].items()}
        return values
    scores = measured["scores"]
    values["parameters"] = f"{measured['parameters']:,}"
    if kind == "tiny_lm":
        names = ("greedy_pass@1", "sampled_pass@1", "sampled_pass@8", "zero_variance_groups")
        values |= dict(
            zip(("greedy", "sampled", "pass8", "zero"), (scores[name] for name in names), strict=True)
        )
        return values | {"vocab_size": measured["vocab_size"]}
    rows = enumerate(scores["explained_variance_by_position"])
    return values | {
        "rollouts": measured["rollouts"],
        "whole": scores["explained_variance"],
        "by_position": "\n".join(f"| {t} | {value} |" for t, value in rows),
    }
