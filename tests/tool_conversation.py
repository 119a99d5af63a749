"""A model that calls tools by script: its tokenizer, its words, and the server that speaks them."""

import itertools

from omegaconf import DictConfig, OmegaConf

from minirl.rollout.server import RolloutServer, TokenOutput

ROLES = ["<system>", "<user>", "<assistant>", "<tool>"]
CALLS = {
    name: f'{{"name":"{tool}","arguments":{{"expression":"{expression}"}}}}'
    for name, tool, expression in [
        ("sum", "calculator", "3+4"),
        ("product", "calculator", "6*7"),
        ("zero", "calculator", "1/0"),
        ("unknown", "search", "x"),
    ]
}
WORDS = [
    "<pad>", "<eos>", "<unk>", *ROLES, "be", "brief", "what", "is", "7", "42", "####", "<tool_call>",
    "</tool_call>", *CALLS.values(), "Error", "executing", "tool", "'calculator':", "division", "by", "zero",
]  # fmt: skip
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<system> be brief {% endif %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def turn(*calls: str, text: str = "") -> list[int]:
    """Token ids of an assistant's turn with these calls, EOS at its end."""
    words = text.split()
    for call in calls:
        words += ["<tool_call>", CALLS[call], "</tool_call>"]
    return [WORDS.index(word) for word in [*words, "<eos>"]]


def said(script: list[list[int]], prompt_ids: list[int]) -> list[int]:
    """The turn of `script` that comes after `prompt_ids`; the last one over and over."""
    number = prompt_ids.count(WORDS.index("<assistant>")) - 1
    return script[min(number, len(script) - 1)]


def log_probs_of(tokens: list[int]) -> list[float]:
    return [-0.01 * (token + 1) for token in tokens]


class ScriptedServer(RolloutServer):
    """Says the turns of the script whatever the weights are. Every call raises the version by one."""

    def __init__(self, script: list[list[int]]) -> None:
        self.script, self.versions = script, itertools.count()
        self.prompts: list[list[int]] = []
        self.version = 0

    async def generate(self, prompt_ids, sampling_params, *, request_id, max_tokens, seed):
        self.prompts.append(list(prompt_ids))
        tokens = said(self.script, prompt_ids)[:max_tokens]
        reason = "completed" if tokens[-1] == 1 else "length"
        return TokenOutput(list(tokens), log_probs_of(tokens), reason, next(self.versions))

    async def update_weights(self, named_tensors, version): ...
    async def sleep(self): ...
    async def wake_up(self): ...
    async def abort(self, request_ids=None): ...
    async def close(self): ...


def rollout_config(*, response_length: int = 40, **multi_turn) -> DictConfig:
    from minirl.config import compose

    config = compose(["actor_rollout_ref.rollout.mode=async"]).actor_rollout_ref.rollout
    config.response_length = response_length
    config.calculate_log_probs = True
    config.agent.default_agent_loop = "tool_agent"
    config.multi_turn = OmegaConf.merge(config.multi_turn, multi_turn)
    return config
