"""Engine ids in files and options, "genai" and "native", and the names that tables and charts show for them."""

GENAI = "genai"  # OpenVINO GenAI's pipelines
NATIVE = "native"  # this project's engine
SHOWN = {GENAI: "GenAI", NATIVE: "ours"}
FORMER = {"GenAI": GENAI, "ours": NATIVE}  # in recommended.json of format 1, and in results and options of that time


def engine_id(name: str) -> str:
    """The id of an engine; former ids are accepted, any other text is returned unchanged."""
    return FORMER.get(name, name)


def shown_engine(name: str) -> str:
    """The name to show for an engine id, present or former."""
    return SHOWN.get(engine_id(name), name)
