"""Prompt lookup decoding: draft tokens are copied from the prompt and the output so far, without a draft model.

    python samples/prompt_lookup_decoding_lm.py models/embedded/main "def read_file(path):"

It helps if the answer repeats the prompt: summaries, code edits, questions about a document. Decoding is greedy.
The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai


def main():
    args = console.parse_arguments(
        __doc__, "main", "prompt", "--device", "--num-assistant-tokens", "--max-ngram-size", "--max-new-tokens",
        "--property",
    )  # fmt: skip

    pipe = openvino_genai.LLMPipeline(args.main, args.device, prompt_lookup=True, **args.property)

    config = openvino_genai.GenerationConfig()  # greedy, whatever the model's generation_config.json says
    config.max_new_tokens = args.max_new_tokens
    config.num_assistant_tokens = args.num_assistant_tokens
    config.max_ngram_size = args.max_ngram_size

    streamer = console.Streamer(args.main, pipe.get_tokenizer())
    # A list, not a str: generate("text") returns a plain str, without metrics.
    result = pipe.generate([args.prompt], config, streamer)
    console.print_summary(args, config, streamer, result)


if __name__ == "__main__":
    console.run(main)
