"""A tokenizer like the embedded one, but for the texts that it decodes."""


class ChangedTokenizer:
    """`tokenizer`, whose texts a function changes."""

    def __init__(self, tokenizer, change):
        self._tokenizer, self._change = tokenizer, change

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **options):
        found = self._tokenizer.decode(tokens, **options)
        return self._change(found) if isinstance(found, str) else found


def cleaning_up(tokenizer):
    """`tokenizer`, but it removes the space before a full stop, as many of Hugging Face's do."""
    return ChangedTokenizer(tokenizer, lambda text: text.replace(" .", "."))


def only(tokenizer, *texts):
    """A logit bias that leaves no other tokens than these."""
    ids = [tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist() for text in texts]
    return {token: 100.0 for (token,) in ids}
