"""Exercise of day 2: ten shuffled cards, one for each station; put them in the order of `fit()`.

in: the reader's list of card letters -> out: passed, or the first card that came too early and why.
The keys on the cards are those of the ledger; the tests hold one against the other.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit
"""

from minirl.ledger import STATIONS

# What a station leaves behind: keys of the batch, or, where it adds none, what the log shows.
TRACES: dict[str, tuple[str, ...]] = {
    "load": ("dummy_tensor", "raw_prompt", "uid"),
    "gen_batch": ("global_steps",),
    "rollout": ("responses", "response_mask", "attention_mask"),
    "reward": ("rm_scores",),
    "log_prob": ("old_log_probs", "ref_log_prob"),
    "values": ("values",),
    "advantage": ("token_level_scores", "token_level_rewards", "advantages", "returns"),
    "update_critic": (),
    "update_actor": (),
    "sync": (),
}
NO_KEYS = {
    "gen_batch": "行数变成 B，一个张量也没有",
    "update_critic": "不添键；日志里有 critic/vf_loss",
    "update_actor": "不添键；日志里有 actor/pg_loss",
    "sync": "不添键；日志里有 timing_s/update_weights",
}
# Why a station may not come before its predecessor.
WHY: dict[str, str] = {
    "gen_batch": "先要有批、有 uid，才谈得上劈开和重复：uid 在重复之前发，同题的 n 行才带同一个。",
    "rollout": "生成的输入是劈出来、重复好的那一半。",
    "reward": "响应写完才能打分。",
    "log_prob": "要有响应的 token 才能算它们的对数概率；fit() 还先取出了分数。",
    "values": "fit() 里价值排在对数概率（和 ref）之后。两者互不依赖，但源码是这个顺序。",
    "advantage": "优势要用分数，GAE 还要用 values。token_level_scores 也是这一站才写，与 rm_scores 不同站。",
    "update_critic": "critic 学的是 returns，优势那一站才有。",
    "update_actor": "fit() 先更新 critic，再更新 actor：热身期里只做前一半。",
    "sync": "权重先变，再搬到 rollout。",
}
_SHUFFLED = (6, 3, 9, 0, 5, 8, 2, 7, 1, 4)  # station numbers in the order of the letters A..J
LETTERS = "ABCDEFGHIJ"


def cards() -> dict[str, str]:
    """Letter -> what is on the card."""
    shown = {}
    for letter, number in zip(LETTERS, _SHUFFLED, strict=True):
        station = STATIONS[number].id
        parts = ["添 " + "、".join(TRACES[station])] if TRACES[station] else []
        shown[letter] = "；".join([*parts, *([NO_KEYS[station]] if station in NO_KEYS else [])])
    return shown


def check_order(order: list[str]) -> str:
    """`order`: the ten letters. Returns a line of praise. Raises ValueError naming the first early card."""
    letters = [str(letter).strip().upper() for letter in order]
    missing = sorted(set(LETTERS) - set(letters))
    if missing:
        raise ValueError(f"还差 {len(missing)} 张：{' '.join(missing)}")
    if len(letters) != len(LETTERS):
        raise ValueError("有的卡片出现了两次，或者写了没有的字母。")
    numbers = [_SHUFFLED[LETTERS.index(letter)] for letter in letters]
    for place, number in enumerate(numbers):
        if number != place:
            station = STATIONS[number].id
            raise ValueError(f"前 {place} 张对；第 {place + 1} 张 {letters[place]} 放早了。{WHY[station]}")
    return "十站全对。现在合上书，把每站添的键默写一遍。"


def try_it(order: list[str]) -> None:
    """Print the verdict instead of raising, for a notebook cell."""
    if not order:
        print("… 还没排。把十个字母按 fit() 的顺序填进列表。")
        return
    try:
        print("✔", check_order(order))
    except ValueError as error:
        print("✘", error)
