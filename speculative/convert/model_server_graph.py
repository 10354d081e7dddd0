"""Builds the graph.pbtxt of a text generation server from protobuf messages, so that it is valid for the server.

The server (OpenVINO Model Server) parses graph.pbtxt as protobuf text and rejects unknown fields and values. So does
this module, with the published names, numbers and types of those messages in model_server_graph.json.
"""

import difflib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from speculative.convert.errors import ConvertError

MESSAGES = Path(__file__).with_name("model_server_graph.json")
OPTIONS = "mediapipe.LLMCalculatorOptions"
LOOPBACK = "LOOPBACK:0"
OWN_FIELDS = {  # fields that --set rejects, because other options set them
    "models_path": "this program sets it",
    "draft_models_path": "this program sets it",
    "device": "give --device",
    "draft_device": "give --draft-device",
    "plugin_config": "give --property",
}


def graph_text(fields: dict[str, object], set_by_user: list[str]) -> str:
    """The content of graph.pbtxt.

    Args:
        fields: of LLMCalculatorOptions.
        set_by_user: "FIELD=VALUE" each, VALUE in protobuf's text format; these override `fields`.

    Raises ConvertError if a field or value is not in the published schema, or protobuf is not installed.
    """
    text_format, pool, message = _protobuf()
    options = message(OPTIONS)
    for name, value in fields.items():
        try:
            setattr(options, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConvertError(f"{name} = {value!r} cannot be written to graph.pbtxt ({error})") from None
    for assignment in set_by_user:
        options.MergeFrom(_assigned(assignment))

    graph = message("mediapipe.CalculatorGraphConfig")
    graph.input_stream.append("HTTP_REQUEST_PAYLOAD:input")
    graph.output_stream.append("HTTP_RESPONSE_PAYLOAD:output")
    node = graph.node.add(name="LLMExecutor", calculator="HttpLLMCalculator")
    node.input_stream.extend(["LOOPBACK:loopback", "HTTP_REQUEST_PAYLOAD:input"])
    node.output_stream.extend(["LOOPBACK:loopback", "HTTP_RESPONSE_PAYLOAD:output"])
    node.input_side_packet.append("LLM_NODE_RESOURCES:llm")
    node.input_stream_info.add(tag_index=LOOPBACK, back_edge=True)
    node.node_options.add().Pack(options)
    node.input_stream_handler.input_stream_handler = "SyncSetInputStreamHandler"
    sync_set = pool.FindExtensionByName("mediapipe.SyncSetInputStreamHandlerOptions.ext")
    node.input_stream_handler.options.Extensions[sync_set].sync_set.add().tag_index.append(LOOPBACK)
    return text_format.MessageToString(graph, descriptor_pool=pool, as_utf8=True)


def read_graph(text: str) -> Any:
    """The LLMCalculatorOptions in the text of a graph.pbtxt, as a message.

    Raises ConvertError if a field or value is not in the published schema, or a required one is missing.
    """
    text_format, pool, message = _protobuf()
    from google.protobuf.message import EncodeError

    graph, options = message("mediapipe.CalculatorGraphConfig"), message(OPTIONS)
    try:
        text_format.Parse(text, graph, descriptor_pool=pool)
    except (text_format.ParseError, EncodeError) as error:  # EncodeError: a required field is missing
        raise ConvertError(f"graph.pbtxt does not match the published schema ({error})") from None
    packed = [option for node in graph.node for option in node.node_options if option.Unpack(options)]
    if len(packed) != 1:
        raise ConvertError(f"graph.pbtxt has {len(packed)} nodes with {OPTIONS}, but the server expects one")
    draft_fields = [field.name for field, _ in options.ListFields() if field.name.startswith("draft_")]
    if draft_fields and not options.draft_models_path:
        raise ConvertError(f"the server rejects {', '.join(draft_fields)} without a draft; leave it out", 2)
    return options


def _assigned(assignment: str) -> Any:
    """LLMCalculatorOptions with the one field of "FIELD=VALUE"."""
    text_format, pool, message = _protobuf()
    options = message(OPTIONS)
    fields = options.DESCRIPTOR.fields_by_name
    name, separator, value = assignment.partition("=")
    if not separator or not value.strip():
        raise ConvertError(f"--set {assignment} is not FIELD=VALUE; give cache_size=4, for example", 2)
    if name in OWN_FIELDS:
        raise ConvertError(f"--set {name} is not possible: {OWN_FIELDS[name]}", 2)
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=3) or sorted(set(fields) - set(OWN_FIELDS))
        raise ConvertError(f"--set {name}: the server has no such field; it has {', '.join(near)}", 2)
    field, value = fields[name], value.strip()
    if field.type == field.TYPE_STRING:
        value = json.dumps(value, ensure_ascii=False)
    colon = "" if field.message_type else ":"
    try:
        text_format.Parse(f"{name}{colon} {value}", options, descriptor_pool=pool)
    except text_format.ParseError as error:
        raise ConvertError(f"--set {assignment}: the server does not accept this value ({error})", 2) from None
    if [field.name for field, _ in options.ListFields()] != [name]:
        raise ConvertError(f"--set {assignment} has more than one field; give one --set per field", 2)
    missing = [part for part in options.FindInitializationErrors() if part.startswith(f"{name}.")]
    if missing:
        raise ConvertError(f"--set {assignment}: {', '.join(missing)} is missing", 2)
    return options


@functools.cache
def _protobuf() -> tuple[ModuleType, Any, Callable[[str], Any]]:
    """protobuf's text format, the published messages, and a function that creates an empty message by name."""
    try:
        from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
    except ImportError:
        raise ConvertError("protobuf is not installed; install it: pip install -r requirements-export.txt") from None
    published = json.loads(MESSAGES.read_text(encoding="utf-8"))
    files = json_format.ParseDict({"file": published["file"]}, descriptor_pb2.FileDescriptorSet())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return text_format, pool, lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))()
