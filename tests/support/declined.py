"""The matches that prompt lookup found and a policy declined, searched again in the finished text."""

import numpy as np

from speculative.drafting.suffix import SuffixProposer


def declined_matches(prompt, steps, vocab_size):
    """Whether the declined match was the next token, of each step with one and without a rejected draft token."""
    source, tokens, found = SuffixProposer(vocab_size), np.append(prompt, steps[0].tokens), []
    for step in steps[1:-1]:  # the last one has no room for a draft
        n = len(tokens) + step.accepted
        tokens = np.append(tokens, step.tokens)
        if step.accepted == step.proposed and (match := source.propose(tokens[:n], None, None)):
            found.append(bool(match.token == tokens[n]))
    return found
