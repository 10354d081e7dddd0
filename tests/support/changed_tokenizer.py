"""A tokenizer like the embedded one, except for the texts that it decodes."""


class ChangedTokenizer:
    """`tokenizer` with a function that changes the decoded texts."""

    def __init__(self, tokenizer, change):
        self._tokenizer, self._change = tokenizer, change

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **options):
        text = self._tokenizer.decode(tokens, **options)
        return self._change(text) if isinstance(text, str) else text


def cleaning_up(tokenizer):
    """`tokenizer`, but it removes the space before a full stop, as many of Hugging Face's do."""
    return ChangedTokenizer(tokenizer, lambda text: text.replace(" .", "."))


def only(tokenizer, *texts):
    """A logit bias that allows only these tokens."""
    ids = [tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist() for text in texts]
    return {token: 100.0 for (token,) in ids}
