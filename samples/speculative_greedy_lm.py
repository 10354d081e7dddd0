"""Greedy speculative decoding as in speculative_decoding_lm.py, with tuned settings, all checks and all metrics.

    python samples/speculative_greedy_lm.py models/embedded/main models/embedded/draft "def read_file(path):"

The output is the main model's own, with fewer forward passes. Low precision may flip near-ties; with
--property EXECUTION_MODE_HINT=ACCURACY the outputs are identical (and slower).
The text streams to standard output; a summary follows on standard error.
"""

import console
import openvino_genai


def main():
    args = console.parse_arguments(
        __doc__, "main", "draft", "prompt", "--device", "--draft-device", "--num-assistant-tokens", "--tree-depth",
        "--branching-factor", "--max-new-tokens", "--property", "--draft-property", "--scheduler", "--recommended",
    )  # fmt: skip

    draft = openvino_genai.draft_model(args.draft, args.draft_device, **args.draft_property)
    pipe = openvino_genai.LLMPipeline(args.main, args.device, draft_model=draft, **args.property)

    config = openvino_genai.GenerationConfig()  # greedy, whatever the model's generation_config.json says
    config.max_new_tokens = args.max_new_tokens
    config.num_assistant_tokens = args.num_assistant_tokens
    if args.tree_depth:
        config.tree_depth, config.branching_factor = args.tree_depth, args.branching_factor

    streamer = console.Streamer(args.main, pipe.get_tokenizer())
    # A list, not a str: generate("text") returns a plain str, without metrics.
    result = pipe.generate([args.prompt], config, streamer)
    console.print_summary(args, config, streamer, result)


if __name__ == "__main__":
    console.run(main)
