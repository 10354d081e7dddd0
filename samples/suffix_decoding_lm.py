"""Suffix decoding: draft tokens are copied from the prompt and the output so far, with an adaptive draft length.

    python samples/suffix_decoding_lm.py models/embedded/main - < samples/repetitive_prompt.txt

Like prompt lookup (`prompt_lookup_decoding_lm.py`), but with this project's engine: it copies the continuation of the
longest match, decodes plainly where copying would cost time, and is lossless when sampling (--temperature), too.
The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai

from speculative import ModelSpec, load


def main():
    args = console.parse_arguments(
        __doc__, "main", "prompt", "--device", "-k", "--max-ngram-size=16", "--temperature=0", "--top-k", "--top-p",
        "--seed", "--max-new-tokens", "--property", "--recommended",
    )  # fmt: skip

    main_model = ModelSpec(args.main, args.device, args.property)
    engine = load(main_model, max_ngram_size=args.max_ngram_size)

    config = openvino_genai.GenerationConfig()  # ignores the model's generation_config.json
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
