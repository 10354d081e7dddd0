"""Converts the checkpoint of an EAGLE-3 head to OpenVINO IR with optimum-cli.

    python -m speculative.convert.eagle3_to_ir HEAD FOLDER --layers 1,13,24 --weight-format int8

FOLDER, which must not exist, gets the model and config.json. The IR says which layers' outputs of the main model the
head reads (rt_info `hidden_layers_list`). Other options go to optimum-cli. Only code of optimum-intel runs: optimum-cli
gets a copy of the checkpoint without its Python files.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from speculative.convert import eagle3_source, optimum_cli
from speculative.convert.program import run_child
from speculative.convert.source import Source

COPIED = ("config.json", "generation_config.json", "openvino_config.json")


def convert(checkpoint: Path, folder: Path, layers: list[int], options: list[str], base: float | None = None) -> None:
    """Write the IR of a head to a new folder. `layers` are those whose outputs it was trained on, [] if not known;
    `base` is the rotary base that it was trained with, None if its config has that.

    Raises ConvertError if the checkpoint is not supported.
    """
    head = Source(str(checkpoint), checkpoint, commit=None)
    with tempfile.TemporaryDirectory() as temporary:
        staged, exported = Path(temporary, "checkpoint", checkpoint.name), Path(temporary, "exported")
        eagle3_source.stage(head, staged, base)
        eagle3_source.refuse_incomplete(eagle3_source.tensor_names(staged), eagle3_source.head_config(head), head.name)
        arguments = optimum_cli.arguments_for(None, options, trust_remote_code=True)
        run_optimum(optimum_cli.command(str(staged), arguments, str(exported)))
        _save(exported, folder, layers)
        for name in COPIED:
            if (exported / name).is_file():
                shutil.copyfile(exported / name, folder / name)
                optimum_cli.use_given_name(folder / name, str(staged), str(checkpoint))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # a path on this machine, to code of optimum-intel
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")


def run_optimum(typed: list[str]) -> None:
    """Run optimum-cli in this process. Its class for heads counts as remote code, so that transformers wants every
    package installed that its file imports; a head needs none of them."""
    from optimum.commands import optimum_cli as program
    from transformers import dynamic_module_utils as modules

    with (
        mock.patch.multiple(modules, check_imports=modules.get_relative_imports),
        mock.patch.object(sys, "argv", typed),
    ):
        program.main()


def _save(exported: Path, folder: Path, layers: list[int]) -> None:
    import openvino

    model = openvino.Core().read_model(exported / "openvino_model.xml")
    _widen(model.output("d2t"))
    if layers:
        model.set_rt_info(layers, "hidden_layers_list")
    folder.mkdir(parents=True)
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def _widen(d2t: Any) -> None:
    """Store the table of token ids in int64, the only type that GenAI reads; some checkpoints have int32."""
    import numpy
    from openvino import opset13

    result = d2t.get_node()
    table = result.input_value(0)
    wide = opset13.constant(table.get_node().data.astype(numpy.int64))
    wide.output(0).set_names(table.get_names())
    result.input(0).replace_source_output(wide.output(0))
    result.validate_and_infer_types()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, metavar="HEAD")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", default="", help="of the main model, counted from 0: 1,13,24")
    parser.add_argument("--rope-theta", type=float, help="rotary base (default: that of config.json)")
    options, rest = parser.parse_known_args(arguments)
    layers = [int(layer) for layer in options.layers.split(",") if layer]
    return run_child(lambda: convert(options.checkpoint, options.folder, layers, rest, options.rope_theta))


if __name__ == "__main__":
    sys.exit(main())
