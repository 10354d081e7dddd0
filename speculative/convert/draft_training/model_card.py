"""The model card of a draft: README.md, from the record in draft.json."""

from speculative.convert.draft_training import verdict

CARD = """\
---
base_model: {main}
library_name: openvino
tags: [{kind}, speculative-decoding]
---
# {title} for {main}

Drafts tokens for {main}, which verifies them. The output stays that of the main model.
Made from the main model alone, by

    {command}

| | |
|---|---|
{beginning}| data | {texts:,} texts of the main model ({tokens:,} tokens), {held_out_texts} more held out; {source} |
{choices}
| training | {steps:,} steps, {seen:,} tokens, {minutes:.1f} minutes on {device}; {millions:.1f} M parameters |
| versions | {packages} |

```text
{judged}
```

{use} Check that the main model's licence allows drafts {made_of}.
"""

EAGLE3 = {
    "title": "EAGLE-3 draft",
    "choices": """\
| draft vocabulary | {draft_vocabulary:,} of {vocabulary:,} tokens, {coverage:.1%} of the text |
| hidden states | outputs of the main model's layers {layers} (`hidden_layers_list` in the IR) |""",
    "use": """\
`openvino_model.xml` is for OpenVINO (this project, OpenVINO GenAI). `checkpoint/` holds the same head in the published
format, for SGLang, vLLM and EAGLE. These take the embeddings from the main model.""",
    "made_of": "trained on its output",
}
PRUNED = {
    "title": "Pruned draft",
    "choices": """\
| layers | {kept_layers} of the main model's 0 to {last_layer}; the others are consecutive and turn hidden states by \
{angular_distance:.2f} pi on average |""",
    "use": """\
`openvino_model.xml` is an ordinary draft model for OpenVINO (this project, OpenVINO GenAI) on any device. Its weights
are int8. `checkpoint/` holds the same model for transformers, with the main model's architecture.""",
    "made_of": "made from its weights and trained on its output",
}
KINDS = {"eagle3": EAGLE3, "pruned": PRUNED}


def card(record: dict) -> str:
    """The text of README.md."""
    data, training, draft = record["data"], record["training"], record["draft"]
    kind = KINDS[record["kind"]]
    draft = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in draft.items()}
    if "main_layers" in draft:
        draft["last_layer"] = draft["main_layers"] - 1
    return CARD.format(
        **{name: record[name] for name in ("main", "command", "kind")},
        **{name: data[name] for name in ("texts", "tokens", "held_out_texts")},
        **{name: training[name] for name in ("steps", "device")},
        **{name: kind[name] for name in ("title", "use", "made_of")},
        beginning=f"| start | the head in {record['init_from']} |\n" if record["init_from"] else "",
        choices=kind["choices"].format(**draft),
        source=f"prompts of {data['prompts']}" if data["prompts"] else "it wrote the prompts, too",
        seen=training["tokens"],
        minutes=training["seconds"] / 60,
        millions=draft["parameters"] / 1e6,
        packages=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        judged="\n".join(verdict.lines(record["verdict"])),
    )
