"""Converts a GGUF file to OpenVINO IR with GenAI's own reader. A program of its own: its memory is given back at once.

    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER
    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER --weight-format int8

FOLDER, which must not exist, gets the model, its tokenizer, config.json and generation_config.json.
"""

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from speculative.convert.gguf_source import FORMATS, matrix_types
from speculative.convert.gguf_weights import (
    ROUNDED,
    correct,
    import_gguf,
    keep_whole_texts,
    skip_control_tokens_only,
)
from speculative.convert.program import run_child
from speculative.models import gguf_file

BLOCK = 32  # weights that share a scale in Q8_0 and Q4_0
WRITERS_OWN = ("general.file_type", "general.alignment")  # what the writer of a copy chooses itself


def convert(path: Path, folder: Path, weight_format: str | None) -> None:
    """Write the IR of a file to a new folder, with the weights of the file, or in fp16, int8 or int4.

    Raises ConvertError if the gguf package is needed and not installed, and RuntimeError if GenAI's reader fails.
    """
    import openvino_genai

    folder.mkdir(parents=True)
    file = gguf_file.read(path)
    config, generation_config = gguf_file.configs(file)
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    source = folder / f"model{gguf_file.SUFFIX}"  # GenAI writes beside the file that it reads
    if weight_format:
        recode(path, source, FORMATS[weight_format])
    else:
        try:
            source.symlink_to(path.resolve())
        except OSError:  # Windows without the permission to create links
            shutil.copyfile(path, source)
    openvino_genai.LLMPipeline(source, "CPU", enable_save_ov_model=True, EXECUTION_MODE_HINT="ACCURACY")
    source.unlink()
    xml = folder / "openvino_model.xml"
    is_rounded = not weight_format and ROUNDED.intersection(matrix_types(file))
    correct(xml, file if is_rounded else None)
    _name_layers(xml)
    keep_whole_texts(folder / "openvino_tokenizer.xml")
    skip_control_tokens_only(folder / "openvino_detokenizer.xml", file)


def _name_layers(xml: Path) -> None:
    """Name the outputs of the layers as optimum-cli does: EAGLE-3 drafts look them up by their names."""
    text = xml.read_text(encoding="utf-8")
    named = re.sub(
        r'name="model\.layers\.self_attn\.add1\.layer(\d+)"', r'name="__module.model.layers.\1/aten::add/Add_1"', text
    )
    xml.write_text(named, encoding="utf-8", newline="\n")


def recode(path: Path, target: Path, kind: str) -> None:
    """Write a copy of a file with its matrices in F16, Q8_0 or Q4_0, which GenAI's reader takes over exactly."""
    gguf = import_gguf()
    types = gguf.GGMLQuantizationType
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "")  # the architecture is one of the keys
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in WRITERS_OWN:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])  # GenAI's reader takes no scales of a file in F16
    chosen = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        chosen[tensor.name] = types[kind if shape[-1] % BLOCK == 0 else "F16"] if len(shape) > 1 else types.F32
        stored = gguf.quant_shape_to_byte_shape(shape, chosen[tensor.name])
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), math.prod(stored), chosen[tensor.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:  # one at a time in memory
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(gguf.quants.quantize(weights, chosen[tensor.name]).view(np.uint8))
    writer.close()


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--weight-format", choices=list(FORMATS), help="instead of the weights of the file")
    options = parser.parse_args()
    return run_child(lambda: convert(options.file, options.folder, options.weight_format))


if __name__ == "__main__":
    sys.exit(main())
