"""Structured output: text that follows a JSON schema or a regular expression, at the speed of speculative decoding.

    python samples/structured_output_lm.py models/embedded/main models/embedded/draft "def f():" --json-schema FILE

The schema masks the distributions of main model and draft alike, so the draft does not change the output (lossless).
Text that the schema forces is drafted without a draft step. Without a draft model, draft tokens are copied from the
text so far (suffix decoding).
The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai

from speculative import ModelSpec, load
from speculative.drafting.suffix import LONGEST_MATCH


def main():
    args = console.parse_arguments(
        __doc__, "main", "[draft]", "prompt", "--json-schema", "--regex", "--device", "--draft-device", "-k",
        "--temperature=0", "--top-k", "--top-p", "--seed", "--max-new-tokens", "--property", "--draft-property",
    )  # fmt: skip

    main_model, draft_model = ModelSpec(args.main, args.device, args.property), None
    if "draft" in args:
        draft_model = ModelSpec(args.draft, args.draft_device, args.draft_property)
    engine = load(main_model, draft_model, max_ngram_size=None if draft_model else LONGEST_MATCH)

    config = openvino_genai.GenerationConfig()  # ignores the model's generation_config.json
    config.structured_output_config = openvino_genai.StructuredOutputConfig()
    config.structured_output_config.json_schema = args.json_schema
    config.structured_output_config.regex = args.regex
    config.max_new_tokens = args.max_new_tokens
    config.num_assistant_tokens = args.num_assistant_tokens
    config.assistant_confidence_threshold = args.assistant_confidence_threshold
    config.do_sample = args.temperature > 0
    config.temperature = args.temperature or 1.0
    config.top_k = args.top_k
    config.top_p = args.top_p

    streamer = console.Streamer(args.main, engine.tokenizer)
    result = engine.generate(args.prompt, config, streamer, args.seed)
    console.print_summary(args, config, streamer, result)


if __name__ == "__main__":
    console.run(main)
