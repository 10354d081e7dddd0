"""What every sample needs around its idea: arguments, checked input, streaming, Ctrl-C, summary, one-sentence errors.

The library has it, as the server needs most of it, too: speculative/cli/console.py. The pipeline, the draft model and
the generation config stay in the sample itself.
"""

from speculative.cli.console import *  # noqa: F403
