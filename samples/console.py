"""Shared console code of the samples: arguments, input checks, streaming, Ctrl-C, summary, one-sentence errors.

It is in the library, speculative/cli/console.py, because the server needs most of it too. The pipeline, the draft model
and the generation config are in the samples themselves.
"""

from speculative.cli.console import *  # noqa: F403
