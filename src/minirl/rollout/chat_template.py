"""From messages to token ids, as the rollout sees them.

In:  a list of message dicts -> Out: token ids that end with the generation prompt.
Simplified: text only; a prompt that is too long is an error, where verl cuts its left end off.
verl: verl.utils.chat_template:apply_chat_template
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], **options) -> list[int]:
    """`tokenizer.apply_chat_template` as plain token ids."""
    options = {"add_generation_prompt": True} | options
    return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], *, limit: int, **options
) -> list[int]:
    """`encode_messages` of a prompt of at most `limit` tokens.

    Raises:
        ValueError: it is longer.
    verl: verl.experimental.agent_loop.agent_loop:AgentLoopBase.apply_chat_template
    """
    encoded = encode_messages(tokenizer, messages, **options)
    if len(encoded) > limit:
        raise ValueError(
            f"a prompt has {len(encoded)} tokens but data.max_prompt_length is {limit}: raise it "
            "or set data.filter_overlong_prompts=True to leave such prompts out"
        )
    return encoded


def system_prompt_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the template puts before any conversation; what a later turn must not repeat.

    Two user messages are one system prompt and twice the same message, one is one and once.
    verl: verl.utils.chat_template:initialize_system_prompt
    """
    message = {"role": "user", "content": ""}
    once = encode_messages(tokenizer, [message], add_generation_prompt=False)
    twice = encode_messages(tokenizer, [message] * 2, add_generation_prompt=False)
    return once[: 2 * len(once) - len(twice)]
