"""Console and arguments of the samples, from speculative/cli, because the server needs them too.

The pipeline, the draft model and the generation config are in the samples themselves.
"""

from speculative.cli.console import *  # noqa: F403
from speculative.cli.pipeline_arguments import *  # noqa: F403
