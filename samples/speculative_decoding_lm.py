"""Speculative decoding: a small draft model proposes K tokens, the main model verifies them in one forward pass.

    python samples/speculative_decoding_lm.py models/embedded/main models/embedded/draft "def read_file(path):"

Needs only openvino_genai. DRAFT may be an EAGLE-3 head. More options, metrics, and NPUs: speculative_greedy_lm.py."""

import argparse
import signal
import sys
from pathlib import Path


def key_value(text):
    key, value = text.split("=", 1)
    return key, int(value) if value.lstrip("-").isdecimal() else value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda sentence: parser.exit(2, f"error: {sentence}\n")
    hints = {RuntimeError: " (try scripts/check_pair.py)", UnicodeDecodeError: " (standard input must be UTF-8)"}
    sys.excepthook = lambda kind, e, _: parser.error((str(e).strip() or repr(e)).splitlines()[-1] + hints.get(kind, ""))
    for role, prefix, device in (("main", "", "CPU"), ("draft", "draft-", "")):
        parser.add_argument(role, help=f"folder of the {role} model (OpenVINO IR)")
        parser.add_argument(f"--{prefix}device", default=device, help=f"(default: {device or 'as the main model'})")
        parser.add_argument(f"--{prefix}property", type=key_value, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("prompt", help="prompt text; - reads it from standard input")
    parser.add_argument("-k", "--num-assistant-tokens", type=int, default=5, metavar="K", help="(default: 5)")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="(default: 100)")
    args = parser.parse_args()
    for file in [f"{x}/openvino_model.xml" for x in (args.main, args.draft)] + [f"{args.main}/openvino_tokenizer.xml"]:
        Path(file).is_file() or parser.error(f"there is no {file}: convert the models, with convert/export_pair.py.")
    if args.prompt == "-":
        args.prompt = sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    if not (1 <= (k := args.num_assistant_tokens) <= 64 and args.prompt.encode() and 0 < args.max_new_tokens < 2**31):
        parser.error(f"give a prompt that is not empty, --max-new-tokens of 1 or more and -k from 1 to 64 (-k is {k}).")
    import openvino_genai  # takes a second, for which --help and errors need not wait

    tokenizers = [openvino_genai.Tokenizer(x) for x in (args.main, args.draft) if any(Path(x).glob("*_tokenizer.xml"))]
    text = "\n".join(token.decode(errors="ignore") for token in tokenizers[0].get_vocab())[:100_000]
    if len({str(tokenizer.encode(text).input_ids.data.tolist()) for tokenizer in tokenizers}) > 1:
        parser.error(f"the tokenizers of {args.main} and {args.draft} differ: use a draft with the same tokenizer.")
    draft = openvino_genai.draft_model(args.draft, args.draft_device or args.device, **dict(args.draft_property))
    pipe = openvino_genai.LLMPipeline(args.main, args.device, draft_model=draft, **dict(args.property))
    config = openvino_genai.GenerationConfig(num_assistant_tokens=k)  # greedy, whatever generation_config.json says
    config.max_new_tokens = args.max_new_tokens
    result = pipe.generate([args.prompt], config, lambda text: print(text, end="", flush=True))
    perf, drafting = result.perf_metrics, result.extended_perf_metrics
    tokens, speed = perf.get_num_generated_tokens(), max(perf.get_throughput().mean, 0)  # -1000 for a single token
    accepted, drafted = drafting.get_num_accepted_tokens(), drafting.get_num_draft_tokens()  # may lack the last draft
    rate = f"{accepted / drafted:.2f} ({accepted} of {drafted} draft tokens)" if accepted <= drafted > 0 else "unknown"
    print(f"\n\nnew tokens       {tokens} ({speed:.1f} tokens/s)\nacceptance rate  {rate}", file=sys.stderr)
    print(f"devices          main on {args.device}, draft on {args.draft_device or args.device}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the program at once, whatever the engine is doing
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGINT), signal.SIG_DFL)  # and so does the end of a reader: | head
    sys.stdout.reconfigure(encoding="utf-8")
    main()
