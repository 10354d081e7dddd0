"""The error type of the conversion programs."""


class ConvertError(Exception):
    """One sentence: what is wrong, with which value, what to do. `status`: exit status, 2 bad usage, 1 failure."""

    def __init__(self, sentence: str, status: int = 1):
        super().__init__(sentence)
        self.status = status
