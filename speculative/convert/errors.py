"""How the programs in this folder say that a job cannot be done."""


class ConvertError(Exception):
    """One sentence: what is wrong, with which value, what to do. `status` is the exit status: 2 bad usage, 1 failed."""

    def __init__(self, sentence: str, status: int = 1):
        super().__init__(sentence)
        self.status = status
