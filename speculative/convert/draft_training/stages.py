"""The stages of a training, each of which continues where an earlier run ended: texts, states, training, verdict."""

import contextlib
import importlib.metadata
import json
import math
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculative.atomic_write import atomic_write
from speculative.byte_size import byte_size
from speculative.cli.progress import tqdm
from speculative.convert.draft_training import beginnings, model_card, verdict
from speculative.convert.draft_training.beginnings import Prompt
from speculative.convert.draft_training.clock import Clock, Interval
from speculative.convert.draft_training.draft_folder import DraftFolder
from speculative.convert.draft_training.eagle3 import Eagle3
from speculative.convert.draft_training.kind import Kind
from speculative.convert.draft_training.main_model import MainModel
from speculative.convert.draft_training.pruned import Pruned
from speculative.convert.draft_training.state_file import StateFile
from speculative.convert.draft_training.texts import MIN_HELD_OUT, MIN_TEXTS, TextFile
from speculative.convert.draft_training.writer import Writer
from speculative.convert.errors import ConvertError
from speculative.convert.source import content_hash
from speculative.models.cores import thread_properties
from speculative.models.spec import ModelSpec

if TYPE_CHECKING:  # torch takes seconds to import, and the first stages need none
    from speculative.convert.draft_training.device_writer import DeviceWriter
    from speculative.convert.draft_training.training import Training

TOP = 64  # next tokens whose probabilities are kept
TEXT_BYTES = 8  # on disk for a token of a text
EVALUATED, EVALUATE_EVERY = 24, 60.0  # held-out texts that are read, too; least seconds between evaluations
MANY_CUT = 0.5  # share of cut answers above which --length is too small
FEW_TOKENS = 10_000  # with as many, a head of SmolLM2-135M agreed with it on 32 % of the first draft tokens
PACKAGES = ("openvino", "openvino-genai", "torch", "transformers")


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    main: str  # as given
    out: Path
    command: str
    minutes: float
    tokens: int  # most tokens of text
    longest: int  # tokens of a text
    prompts: Path | None
    kind: str
    layers: list[int] | None
    draft_vocabulary: int | None
    init_from: Path | None  # folder of a head
    keep_layers: int | None
    compared: list[str]  # drafts, as given
    device: str  # of the training, torch's name
    online: bool  # the main model runs there, too
    threads: int | None


def make(options: Options) -> None:
    """Make the draft, and print what each stage found. Raises ConvertError if something is wrong with the options, the
    main model or the disk; an interrupted call is continued by the next one with the same options."""
    main = MainModel(ModelSpec(Path(options.main), "CPU", thread_properties(options.threads)))
    kind: Kind
    if options.kind == Pruned.name:
        kind = Pruned(main, options.keep_layers)
    else:
        kind = Eagle3(main, options.layers, options.draft_vocabulary, options.init_from)
    prompts = beginnings.read_prompts(options.prompts) if options.prompts else []
    for draft in options.compared:
        verdict.require_draft(main.spec.folder, Path(draft))
    if options.threads and (options.online or kind.name == Pruned.name):
        _limit_torch(options.threads)
    if not (options.out / "work/training.pt").exists():
        kind.check()
    if options.online:
        kind.put_main_on(options.device)
    folder = DraftFolder(options.out, kind.files)
    folder.open()
    try:
        folder.settle(
            {
                "main model": content_hash(main.spec.folder, skip=options.out),
                "--kind": kind.name,
                "content of --init-from": _weights_hash(options.init_from) if options.init_from else None,
                **kind.settings,
                "content of --prompts": beginnings.fingerprint(prompts) if prompts else None,
                "--length": options.longest,
                "--online": options.online or None,
            }
        )
        _Stages(options, kind, folder, prompts).run()
    finally:
        folder.close()
        with contextlib.suppress(OSError):  # not empty
            options.out.rmdir()


class _Stages:
    def __init__(self, options: Options, kind: Kind, folder: DraftFolder, prompts: list[Prompt]):
        self.options, self.kind, self.main, self.folder, self.prompts = options, kind, kind.main, folder, prompts
        self.unfinished = folder.work / "unfinished"  # exists while a trained draft is not installed yet
        self.longest = min(options.longest, self.main.shape.max_position_embeddings)
        self.top = min(TOP, self.main.vocabulary)
        self.compared = {draft: _weights_hash(Path(draft)) for draft in options.compared}
        self.clock = Clock(folder.work / "clock.json", options.minutes)
        self.texts = TextFile(folder.work / "texts.jsonl")
        self.states, self.held_out_states = (
            StateFile(folder.work / name, kind.states, self.top) for name in ("states", "held_out_states")
        )

    def run(self) -> None:
        finished = self.options.out / "draft.json"
        record = json.loads(finished.read_text(encoding="utf-8")) if finished.exists() else {}
        is_compared = record and self.compared.items() <= record["verdict"].get("content of --compare", {}).items()
        if is_compared and not self.clock.remaining("training") and not self.unfinished.exists():
            print("\n".join(verdict.lines(record["verdict"])))
            minutes = math.ceil(10 * self.clock.used_minutes) / 10
            print(f"{self.options.out} is complete; --minutes above {minutes:g} continues the training")
            return
        self._require_space()
        with self.clock.stage("texts"):
            self._write_texts()
        if not self.kind.online:
            with self.clock.stage("states"):
                self._read_texts()
        with self.clock.stage("training"):
            training = self._train()
        self._install(training)

    def _require_space(self) -> None:
        missing = max(0, self.options.tokens - sum(self.states.lengths))
        each = TEXT_BYTES if self.kind.online else StateFile.bytes_each(self.kind.states, self.top)
        saved = self.folder.work / "training.pt"
        needed = missing * each + self.kind.space - (saved.stat().st_size if saved.exists() else 0)
        free = shutil.disk_usage(self.folder.work).free
        if needed > free:
            what = f"{self.options.tokens:,} tokens need" if missing else "the training and the draft need"
            raise ConvertError(
                f"the disk of {self.options.out} has {byte_size(free)} free, but {what} up to {byte_size(needed)}; "
                f"make room{', choose another folder, or give a smaller --tokens' if missing else ''}"
            )

    def _write_texts(self) -> None:
        wants_more = self.clock.remaining("texts") > 0 and self.texts.token_count < self.options.tokens
        if wants_more or not self.texts.is_enough:
            bar = tqdm(total=round(self.clock.remaining("texts")), unit="s", desc="texts", mininterval=1)
            writer = self._writer()

            def progress(unfinished_tokens: int) -> None:
                remaining = self.clock.remaining("texts")
                bar.n = bar.total - round(remaining)
                if not remaining:
                    reason = f"texts, until there are {MIN_TEXTS} and {MIN_HELD_OUT} held-out ones"
                    bar.set_description(reason, refresh=False)
                tokens = self.texts.token_count + unfinished_tokens
                bar.set_postfix(texts=len(self.texts.texts), tokens=f"{tokens:,}", refresh=False)
                bar.update(0)

            try:
                writer.write(lambda: self.clock.remaining("texts"), self.options.tokens, progress)
            finally:
                bar.close()
        self.texts.close()
        held_out = len(self.texts.held_out)
        lengths = [len(text.prompt) + len(text.answer) for text in self.texts.texts]
        # minus 1: online, a token before the model's own texts is not kept
        cut = sum(length >= self.longest - 1 for length in lengths) / len(lengths)
        advice = "; give a greater --length if answers are longer" if cut > MANY_CUT else ""
        print(
            f"texts: {len(self.texts.texts):,}, {self.texts.token_count:,} tokens, {held_out} of the texts held out, "
            f"{cut:.0%} cut at {self.longest} tokens{advice}"
        )

    def _writer(self) -> "Writer | DeviceWriter":
        if not self.kind.online:
            return Writer(self.main.spec, self.longest, self.main.vocabulary, self.prompts, self.texts)
        from speculative.convert.draft_training.device_writer import DeviceWriter

        return DeviceWriter(self.main.spec, self.kind.online, self.longest, self.prompts, self.texts)

    def _read_texts(self) -> None:
        """Compute the hidden states and probabilities of texts, of some held-out ones first."""
        todo = [(self.held_out_states, text) for text in self.texts.held_out[len(self.held_out_states) : EVALUATED]]
        todo += [(self.states, text) for text in self.texts.training[len(self.states) :]]
        if todo and (self.clock.remaining("states") > 0 or len(self.states) < MIN_TEXTS):
            bar = tqdm(todo, unit=" texts", desc="states", mininterval=1)
            reader = self.kind.reader(self.top)
            for file, text in bar:
                if not self.clock.remaining("states") and len(self.states) >= MIN_TEXTS:
                    break
                if sum(self.states.lengths) < self.options.tokens:
                    file.add(text.tokens, reader.read(text.tokens))
            bar.close()
        for file in (self.states, self.held_out_states):
            file.close()
        tokens = sum(self.states.lengths)
        advice = "; a draft learns little from so few: give more --minutes" if tokens < FEW_TOKENS else ""
        print(f"states: of {len(self.states):,} texts, {tokens:,} tokens{advice}")

    def _train(self) -> "Training":
        if self.options.threads:
            _limit_torch(self.options.threads)
        texts, held_out = self._training_texts()
        training = self.kind.training(self.folder.work / "training.pt", texts, self.options.device)
        remaining = self.clock.remaining("training")
        seconds = remaining + self.clock.spent.get("training", 0.0)
        bar = tqdm(total=round(seconds), unit="s", desc="training", mininterval=1)
        evaluations = Interval(EVALUATE_EVERY)

        def progress(loss: float) -> None:
            def evaluate() -> None:
                agreement = training.evaluate(held_out).agreement
                bar.set_postfix(steps=training.steps, loss=f"{loss:.2f}", agreement=_shares(agreement), refresh=False)

            bar.n = bar.total - round(self.clock.remaining("training"))
            evaluations.run(evaluate)
            bar.update(0)

        try:
            if remaining or not training.is_enough:
                self.unfinished.touch()
                training.run(texts, lambda: self.clock.remaining("training"), seconds or 1.0, progress)
        finally:
            bar.close()
        self.scores = training.evaluate(held_out)
        print(
            f"training: {training.steps:,} steps, {training.tokens:,} tokens; agreement with the main model on "
            f"held-out texts, by draft step: {_shares(self.scores.agreement)}"
        )
        return training

    def _training_texts(self) -> tuple[list[Any], list[Any]]:
        """Texts to train on, and held-out ones."""
        if not self.kind.online:
            return self.states.texts(), self.held_out_states.texts()
        return (
            [(text.tokens, len(text.prompt)) for text in self.texts.training],
            [(text.tokens, len(text.prompt)) for text in self.texts.held_out[:EVALUATED]],
        )

    def _install(self, training: "Training") -> None:
        """Export the draft, measure it, and move all files into place."""
        new = self.folder.new
        new.mkdir(parents=True)
        self.kind.save(training, new)
        prompts = list({tuple(text.prompt): text for text in self.texts.held_out}.values())
        bar = tqdm(total=len(prompts), unit=" prompts", desc="verdict", mininterval=1, miniters=0)

        def progress(answers: int, of: int) -> None:
            bar.set_postfix(answers=f"{answers % of}/{of}", refresh=False)
            bar.update(int(answers == of))

        judged = verdict.judge(
            self.main.spec,
            new,
            self.options.compared,
            [(text.prompt, text.category) for text in prompts],
            self.longest,
            self.clock.verdict_seconds,
            progress,
        )
        bar.close()
        judged["content of --compare"] = self.compared
        record = self._record(training, judged)
        atomic_write(new / "draft.json", json.dumps(record, indent=2))
        atomic_write(new / "README.md", model_card.card(record))
        self.folder.install()
        self.unfinished.unlink(missing_ok=True)
        print("\n".join(verdict.lines(judged)))
        size = sum((self.options.out / name).stat().st_size for name in ("openvino_model.xml", "openvino_model.bin"))
        print(f"done: {self.options.out} ({size / 1e6:,.1f} MB), checkpoint/, README.md and draft.json in it")

    def _record(self, training: "Training", judged: dict) -> dict:
        """Content of draft.json."""
        return {
            "format": 1,
            "kind": self.kind.name,
            "main": self.options.main,
            "init_from": str(self.options.init_from) if self.options.init_from else None,
            "command": self.options.command,
            "draft": {**self.kind.record(training), "parameters": training.parameters},
            "data": {
                "texts": len(self.texts.training) if self.kind.online else len(self.states),
                "tokens": sum(len(text.tokens) for text in self.texts.training)
                if self.kind.online
                else sum(self.states.lengths),
                "held_out_texts": len(self.texts.held_out),
                "prompts": self.options.prompts.name if self.options.prompts else None,
            },
            "training": {
                "steps": training.steps,
                "tokens": training.tokens,
                "seconds": round(self.clock.spent.get("training", 0.0)),
                "device": self.options.device,
                "held_out_agreement": [round(share, 3) for share in self.scores.agreement],
                "held_out_overlap": [round(share, 3) for share in self.scores.overlap],
            },
            "verdict": judged,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def _weights_hash(folder: Path) -> str:
    return content_hash(folder, only=folder / "openvino_model.bin")


def _limit_torch(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _shares(values: list[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
