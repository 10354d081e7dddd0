"""Speculative sampling: lossless sampling with a draft model.

    python samples/speculative_sampling_lm.py models/embedded/main models/embedded/draft "def fib(n):" --temperature 0.8

The output has exactly the main model's distribution (Leviathan et al. 2023, Chen et al. 2023). GenAI's own pipeline
samples from a wrong distribution with a draft model, so this sample uses `speculative/decoder.py`.
The same --seed gives the same text. Without -k the draft length is adaptive, and the summary explains it. With
--suffix-decoding, draft tokens are also copied from the text so far, where that gains more.
The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai

from speculative import ModelSpec, load
from speculative.drafting.suffix import LONGEST_MATCH


def main():
    args = console.parse_arguments(
        __doc__, "main", "draft", "prompt", "--device", "--draft-device", "-k", "--temperature", "--top-k", "--top-p",
        "--seed", "--max-new-tokens", "--property", "--draft-property", "--recommended", "--suffix-decoding",
    )  # fmt: skip

    main_model = ModelSpec(args.main, args.device, args.property)
    draft_model = ModelSpec(args.draft, args.draft_device, args.draft_property)
    engine = load(main_model, draft_model, max_ngram_size=LONGEST_MATCH if args.suffix_decoding else None)

    config = openvino_genai.GenerationConfig()  # ignores the model's generation_config.json
    config.max_new_tokens = args.max_new_tokens
    config.num_assistant_tokens = args.num_assistant_tokens
    config.assistant_confidence_threshold = args.assistant_confidence_threshold
    config.do_sample = True
    config.temperature = args.temperature
    config.top_k = args.top_k
    config.top_p = args.top_p

    streamer = console.Streamer(args.main, engine.tokenizer)
    result = engine.generate(args.prompt, config, streamer, args.seed)
    console.print_summary(args, config, streamer, result)


if __name__ == "__main__":
    console.run(main)
