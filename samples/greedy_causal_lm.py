"""Greedy decoding with one model: the baseline for speculative decoding.

    python samples/greedy_causal_lm.py models/embedded/main "def read_file(path):"

The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai


def main():
    args = console.parse_arguments(
        __doc__, "main", "prompt", "--device", "--max-new-tokens", "--property", "--recommended"
    )  # fmt: skip

    pipe = openvino_genai.LLMPipeline(args.main, args.device, **args.property)

    config = openvino_genai.GenerationConfig()  # greedy, whatever the model's generation_config.json says
    config.max_new_tokens = args.max_new_tokens

    streamer = console.Streamer(args.main, pipe.get_tokenizer())
    # A list, not a str: generate("text") returns a plain str, without metrics.
    result = pipe.generate([args.prompt], config, streamer)
    console.print_summary(args, config, streamer, result)


if __name__ == "__main__":
    console.run(main)
