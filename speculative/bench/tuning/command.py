"""How to run the method that scripts/tune.py recommends: a command, and Python code."""

import shlex

from speculative.bench.tuning.choice import TuningChoice
from speculative.bench.tuning.session import Session
from speculative.bench.tuning.settings import Setting
from speculative.drafting.suffix import LONGEST_MATCH
from speculative.pair import recommendation
from speculative.pair.engines import NATIVE

PROMPT = "def fib(n):"  # in the printed commands


def command(tuning: Session, setting: Setting, choice: TuningChoice) -> list[str]:
    """The command, with --recommended and with explicit options, and the Python code. Without any draft the command is
    that of `choice.sample_alone`, as no sample runs the main model alone in our engine or with a scheduler config."""
    main = str(tuning.arguments.main)
    python = _python(main, setting)
    setting = setting if setting.draft or setting.copies else choice.sample_alone.setting
    models = setting.models
    program = recommendation.SAMPLE_OF[setting.kept_as]
    folders = [main, str(setting.draft)] if setting.draft else [main]
    begin = ["python", f"samples/{program}", *folders, PROMPT]
    begin += ["--temperature", "0"] if setting.engine == NATIVE and setting.draft else []
    options = ["--device", models.device] if models.device != "CPU" else []
    for name, value in models.properties:
        options += ["--property", f"{name}={value}"]
    if setting.draft:
        options += ["--draft-device", models.draft_device] if models.draft_device != models.device else []
        if (models.draft_device, models.draft_properties) != (models.device, models.properties):
            for name, value in models.draft_properties:
                options += ["--draft-property", f"{name}={value}"]
        adaptive = isinstance(setting.draft_length, str)
        options += ["-k", "auto" if adaptive else f"{setting.draft_length:g}"]
        options += ["--suffix-decoding"] if setting.is_combined else []
    for name, value in setting.scheduler:
        options += ["--scheduler", f"{name}={value}"]
    beside = recommendation.place(tuning.arguments.main, choice.drafted.setting.draft)
    kept_beside = beside and not tuning.arguments.out
    return [
        *([f"Run it: {shlex.join([*begin, '--recommended'])}"] if kept_beside else []),
        f"{'or' if kept_beside else 'Run it'}, with explicit options: {shlex.join([*begin, *options])}",
        "In Python:",
        *("    " + line for line in python),
    ]


def _python(main: str, setting: Setting) -> list[str]:
    models = setting.models
    length = ""
    if isinstance(setting.draft_length, float):
        length = f", assistant_confidence_threshold={setting.draft_length}"
    elif setting.draft and not isinstance(setting.draft_length, str):
        length = f", num_assistant_tokens={setting.draft_length}"
    config = f"GenerationConfig(max_new_tokens=100{length})"
    if setting.engine == NATIVE:
        load_arguments = [f"ModelSpec({main!r}, {models.device!r}, {dict(models.properties)})"]
        if setting.draft:
            draft_properties = dict(models.draft_properties)
            load_arguments.append(f"ModelSpec({str(setting.draft)!r}, {models.draft_device!r}, {draft_properties})")
        if setting.copies or setting.is_combined:
            load_arguments.append(f"max_ngram_size={LONGEST_MATCH}")
        return [
            "from openvino_genai import GenerationConfig",
            "from speculative import ModelSpec, load",
            f"decoder = load({', '.join(load_arguments)})",
            f"config = {config}",
            f"print(decoder.generate({PROMPT!r}, config).text)",
        ]
    lines = ["import openvino_genai"]
    arguments = "".join(f", {name}={value!r}" for name, value in models.properties)
    if setting.scheduler:
        lines.append("scheduler = openvino_genai.SchedulerConfig()")
        lines += [f"scheduler.{name} = {value!r}" for name, value in setting.scheduler]
        arguments += ", scheduler_config=scheduler"
    if setting.draft:
        draft_arguments = "".join(f", {name}={value!r}" for name, value in models.draft_properties)
        lines.append(
            f"draft = openvino_genai.draft_model({str(setting.draft)!r}, {models.draft_device!r}{draft_arguments})"
        )
        arguments = ", draft_model=draft" + arguments
    return [
        *lines,
        f"pipe = openvino_genai.LLMPipeline({main!r}, {models.device!r}{arguments})",
        f"config = openvino_genai.{config}",
        f"print(pipe.generate({PROMPT!r}, config))",
    ]
