"""The variable of chat templates that turns a model's thinking off, as those of Qwen3 and SmolLM3 have it."""

from openvino_genai import Tokenizer

VARIABLE = "enable_thinking"
CHAT = [{"role": "user", "content": "Hi"}]


def is_on_by_default(tokenizer: Tokenizer) -> bool | None:
    """Whether the chat template lets the model think unless the variable is set; None if the template does not know the
    variable, or refuses a chat of one message."""
    if VARIABLE not in tokenizer.chat_template:
        return None
    try:
        usual, off = (
            tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, extra_context=variables)
            for variables in ({}, {VARIABLE: False})
        )
    except RuntimeError:
        return None
    return usual != off
