"""The model card of a draft: README.md, from the record in draft.json."""

from speculative.convert.draft_training import verdict

CARD = """\
---
base_model: {main}
library_name: openvino
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 draft for {main}

Drafts tokens for {main}, which verifies them: the output stays that of the main model. Made from nothing but that
model by

    {command}

| | |
|---|---|
| data | {texts:,} texts of the main model ({tokens:,} tokens), {held_out} more held out; {source} |
| draft vocabulary | {vocabulary:,} of {all_tokens:,} tokens, {coverage:.1%} of the text |
| hidden states | outputs of the main model's layers {layers} (`hidden_layers_list` in the IR) |
| training | {steps:,} steps, {seen:,} tokens, {minutes:.1f} minutes on {device}; {parameters:.1f} M parameters |
| versions | {versions} |

```text
{verdict}
```

`openvino_model.xml` is for OpenVINO (this project, OpenVINO GenAI). `checkpoint/` holds the same head in the published
format, for SGLang, vLLM and EAGLE, which take the embeddings from the main model. Check that the main model's licence
allows drafts trained on its output.
"""


def card(record: dict) -> str:
    """The text of README.md."""
    data, training = record["data"], record["training"]
    return CARD.format(
        main=record["main"],
        command=record["command"],
        texts=data["texts"],
        tokens=data["tokens"],
        held_out=data["held_out_texts"],
        source=f"prompts of {data['prompts']}" if data["prompts"] else "it wrote the prompts, too",
        vocabulary=training["draft_vocabulary"],
        all_tokens=training["vocabulary"],
        coverage=training["coverage"],
        layers=", ".join(map(str, record["layers"])),
        steps=training["steps"],
        seen=training["tokens"],
        minutes=training["seconds"] / 60,
        device=training["device"],
        parameters=training["parameters"] / 1e6,
        versions=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        verdict="\n".join(verdict.lines(record["verdict"])),
    )
