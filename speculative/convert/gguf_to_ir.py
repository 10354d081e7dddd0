"""Converts a GGUF file to OpenVINO IR with GenAI's own reader. A program of its own: its memory is given back at once.

    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER
    python -m speculative.convert.gguf_to_ir MODEL.gguf FOLDER --weight-format int8

FOLDER, which must not exist, gets the model, its tokenizer, config.json and generation_config.json.
"""

import argparse
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

from speculative.convert import group_size
from speculative.convert.errors import ConvertError
from speculative.convert.gguf_source import FORMATS, matrix_types
from speculative.error_text import engine_lines
from speculative.models import gguf_file

MODEL = "openvino_model"


def convert(path: Path, folder: Path, weight_format: str | None) -> None:
    """Write the IR of a file to a new folder, with the weights of the file, or in fp16, int8 or int4.

    Raises ConvertError if a package for that is not installed, and RuntimeError if GenAI's reader fails.
    """
    for package in ("gguf", "nncf") if weight_format else ():
        if importlib.util.find_spec(package) is None:
            raise ConvertError(f"{weight_format} needs {package}; install it: pip install -r requirements-export.txt")
    import openvino_genai

    folder.mkdir(parents=True)
    file = gguf_file.read(path)
    config, generation_config = gguf_file.configs(file)
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
    source = folder / f"model{gguf_file.SUFFIX}"  # GenAI writes beside the file that it reads
    if weight_format and matrix_types(file) != ["F16"]:
        _decode(path, source)
    else:
        try:
            source.symlink_to(path.resolve())
        except OSError:  # Windows without the permission to create links
            shutil.copyfile(path, source)
    openvino_genai.LLMPipeline(source, "CPU", enable_save_ov_model=True)
    source.unlink()
    if weight_format in ("int8", "int4"):
        _compress(folder, weight_format)


def _decode(path: Path, target: Path) -> None:
    """Write a copy of a file with its matrices in F16: exactly the weights that it encodes, one matrix at a time."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "")  # the architecture is one of the keys
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        kind = np.dtype(np.float16 if len(shape) > 1 else np.float32)
        writer.add_tensor_info(tensor.name, shape, kind, math.prod(shape) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(weights.astype(np.float16 if weights.ndim > 1 else np.float32))
    writer.close()


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
    parser.add_argument("--weight-format", choices=FORMATS, help="instead of the weights of the file")
    options = parser.parse_args()
    try:
        convert(options.file, options.folder, options.weight_format)
    except (ConvertError, ValueError, RuntimeError, OSError) as error:
        print(engine_lines(error)[-1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
