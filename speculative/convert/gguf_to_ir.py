"""Converts a GGUF file to OpenVINO IR with GenAI's own reader. A program of its own: its memory is given back at once.

    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER
    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER --weight-format int8

FOLDER, which must not exist, gets the model, its tokenizer, config.json and generation_config.json.
"""

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from speculative.convert import group_size
from speculative.convert.errors import ConvertError
from speculative.error_text import engine_lines
from speculative.models import gguf_file

MODEL = "openvino_model"


def convert(path: Path, folder: Path, weight_format: str | None) -> None:
    """Write the IR of a file to a new folder, its weights compressed to int8 or int4 if `weight_format` says so."""
    if weight_format and importlib.util.find_spec("nncf") is None:
        raise ConvertError("compressing weights needs nncf; install it: pip install -r requirements-export.txt")
    import openvino_genai

    folder.mkdir(parents=True)
    config, generation_config = gguf_file.configs(gguf_file.read(path))
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    link = folder / f"model{gguf_file.SUFFIX}"  # GenAI writes beside the file that it reads
    try:
        link.symlink_to(path.resolve())
    except OSError:  # Windows without the permission to create links
        shutil.copyfile(path, link)
    openvino_genai.LLMPipeline(link, "CPU", enable_save_ov_model=True)
    link.unlink()
    if weight_format:
        _compress(folder, weight_format)


def _compress(folder: Path, weight_format: str) -> None:
    """Compress the weights of an IR as optimum-cli does: asymmetric, int4 in groups of 128 or the largest that fits."""
    import nncf
    import openvino

    options: dict = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if weight_format == "int4":
        size, sentence = group_size.choose(folder, [])
        if sentence:
            print(sentence)
        mode = nncf.CompressWeightsMode.INT4_ASYM
        options = {"mode": mode, "ratio": 1.0, "group_size": size or group_size.DEFAULT}
    model = nncf.compress_weights(openvino.Core().read_model(folder / f"{MODEL}.xml"), **options)
    smaller = folder / "compressed"
    openvino.save_model(model, smaller / f"{MODEL}.xml", compress_to_fp16=False)
    del model  # which maps the file to replace
    for file in list(smaller.iterdir()):
        file.replace(folder / file.name)
    smaller.rmdir()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--weight-format", choices=["int8", "int4"], help="compress F16 weights to this format")
    options = parser.parse_args()
    try:
        convert(options.file, options.folder, options.weight_format)
    except (ConvertError, ValueError, RuntimeError, OSError) as error:
        print(engine_lines(error)[-1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
