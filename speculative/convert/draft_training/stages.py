"""The stages of a training, each of which continues where an earlier run ended: texts, states, training, verdict."""

import contextlib
import importlib.metadata
import json
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speculative.atomic_write import atomic_write
from speculative.cli.progress import tqdm
from speculative.convert.draft_training import beginnings, model_card, verdict
from speculative.convert.draft_training.clock import Clock
from speculative.convert.draft_training.draft_folder import DraftFolder
from speculative.convert.draft_training.main_model import MainModel
from speculative.convert.draft_training.state_file import StateFile
from speculative.convert.draft_training.texts import LEAST, TextFile
from speculative.convert.draft_training.writer import Writer
from speculative.convert.errors import ConvertError
from speculative.convert.source import content_hash
from speculative.models.spec import ModelSpec

if TYPE_CHECKING:  # torch takes seconds to import, and the first stages need none
    from speculative.convert.draft_training.training import Training

TOP = 64  # next tokens whose probabilities are kept
COVERAGE, MOST_DRAFTED = 0.995, 8192  # of the draft vocabulary, by default
EVALUATED, EVALUATE_EVERY = 24, 60.0  # held-out texts that are read, too; seconds between evaluations
SPACE = 200 << 20  # bytes of disk beside the hidden states
PACKAGES = ("openvino", "openvino-genai", "torch", "transformers")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    main: str  # as given
    out: Path
    command: str
    minutes: float
    tokens: int  # most tokens of text
    longest: int  # tokens of a text
    prompts: Path | None
    layers: list[int] | None
    draft_vocabulary: int | None
    device: str  # of the training, torch's name
    threads: int | None


def make(options: Options) -> None:
    """Make the draft, and print what each stage found. Raises ConvertError if something is wrong with the options, the
    main model or the disk; an interrupted call is continued by the next one with the same options."""
    properties = {"INFERENCE_NUM_THREADS": options.threads} if options.threads else {}
    main = MainModel(ModelSpec(Path(options.main), "CPU", properties), options.layers)
    prompts = beginnings.read_prompts(options.prompts) if options.prompts else []
    folder = DraftFolder(options.out)
    folder.open()
    try:
        folder.settle(
            {
                "main model": content_hash(main.spec.folder),
                "--layers": main.layers,
                "--prompts": str(options.prompts) if options.prompts else None,
                "--draft-vocabulary": options.draft_vocabulary,
                "--length": options.longest,
            }
        )
        _Stages(options, main, folder, prompts).run()
    finally:
        folder.close()
        with contextlib.suppress(OSError):  # not empty
            options.out.rmdir()


class _Stages:
    def __init__(self, options: Options, main: MainModel, folder: DraftFolder, prompts: list[str]):
        self.options, self.main, self.folder, self.prompts = options, main, folder, prompts
        self.longest = min(options.longest, main.shape.max_position_embeddings)
        self.top = min(TOP, main.vocabulary)
        self.clock = Clock(folder.work / "clock.json", options.minutes)
        self.texts = TextFile(folder.work / "texts.jsonl")
        self.states, self.held_out_states = (
            StateFile(folder.work / name, main.states, self.top) for name in ("states", "held_out_states")
        )

    def run(self) -> None:
        finished = self.options.out / "draft.json"
        if finished.exists() and not self.clock.left("training"):
            made = json.loads(finished.read_text(encoding="utf-8"))
            print("\n".join(verdict.lines(made["verdict"])))
            print(f"{self.options.out} is complete; a larger --minutes continues the training")
            return
        self._require_space()
        with self.clock.stage("texts"):
            self._write_texts()
        with self.clock.stage("states"):
            self._read_texts()
        with self.clock.stage("training"):
            training = self._train()
        self._install(training)

    def _require_space(self) -> None:
        missing = max(0, self.options.tokens - sum(self.states.lengths))
        needed = missing * StateFile.bytes_each(self.main.states, self.top) + SPACE
        free = shutil.disk_usage(self.folder.work).free
        if needed > free:
            raise ConvertError(
                f"the disk of {self.options.out} has {free / 1e9:.1f} GB free, but {self.options.tokens:,} tokens need "
                f"up to {needed / 1e9:.1f} GB; make room, choose another folder, or give a smaller --tokens"
            )

    def _write_texts(self) -> None:
        wanted = self.clock.left("texts") > 0 and self.texts.token_count < self.options.tokens
        if wanted or not self.texts.is_enough:
            bar = tqdm(total=round(self.clock.left("texts")), unit="s", desc="texts", mininterval=1)
            writer = Writer(self.main.spec, self.longest, self.main.vocabulary, self.prompts, self.texts)

            def progress() -> None:
                bar.n = bar.total - round(self.clock.left("texts"))
                bar.set_postfix(texts=len(self.texts.texts), tokens=self.texts.token_count, refresh=False)
                bar.update(0)

            try:
                writer.write(lambda: self.clock.left("texts"), self.options.tokens, progress)
            finally:
                bar.close()
        self.texts.close()
        held_out = len(self.texts.held_out)
        print(f"texts: {len(self.texts.texts):,}, {self.texts.token_count:,} tokens, {held_out} of the texts held out")

    def _read_texts(self) -> None:
        """Compute the hidden states and probabilities of texts, of some held-out ones first."""
        todo = [(self.held_out_states, text) for text in self.texts.held_out[len(self.held_out_states) : EVALUATED]]
        todo += [(self.states, text) for text in self.texts.training[len(self.states) :]]
        if todo and (self.clock.left("states") > 0 or len(self.states) < LEAST):
            bar = tqdm(todo, unit=" texts", desc="hidden states", mininterval=1)
            reader = self.main.reader(self.top)
            for file, text in bar:
                if not self.clock.left("states") and len(self.states) >= LEAST:
                    break
                if sum(self.states.lengths) < self.options.tokens:
                    file.add(text.tokens, reader.read(text.tokens))
            bar.close()
        for file in (self.states, self.held_out_states):
            file.close()
        layers = ", ".join(map(str, self.main.layers))
        print(f"hidden states: of {len(self.states):,} texts, {sum(self.states.lengths):,} tokens; layers {layers}")

    def _train(self) -> "Training":
        from speculative.convert.draft_training.training import Training, choose_vocabulary

        if self.options.threads:
            import torch

            torch.set_num_threads(self.options.threads)
        texts, held_out = self.states.texts(), self.held_out_states.texts()
        counts = np.zeros(self.main.vocabulary, np.int64)
        for tokens, _ in texts:
            counts += np.bincount(tokens, minlength=len(counts))
        training = Training(
            self.folder.work / "training.pt",
            self.main.shape,
            self.main.states,
            self.main.embeddings(),
            self.options.device,
            lambda: choose_vocabulary(counts, self.options.draft_vocabulary, COVERAGE, MOST_DRAFTED),
            self.main.output_layer,
        )
        self.coverage = float(counts[training.vocabulary].sum() / counts.sum())
        print(
            f"draft vocabulary: {len(training.vocabulary):,} of {len(counts):,} tokens, {self.coverage:.1%} of the text"
        )
        left = self.clock.left("training")
        seconds = left + self.clock.spent.get("training", 0.0)
        bar = tqdm(total=round(seconds), unit="s", desc="training", mininterval=1)
        evaluated = left

        def progress(loss: float) -> None:
            nonlocal evaluated
            now = self.clock.left("training")
            bar.n = bar.total - round(now)
            if evaluated - now > EVALUATE_EVERY:
                evaluated = now
                agreement = training.evaluate(held_out).agreement
                bar.set_postfix(steps=training.steps, loss=f"{loss:.2f}", agreement=_shares(agreement), refresh=False)
            bar.update(0)

        try:
            if left or not training.is_enough:
                training.run(texts, lambda: self.clock.left("training"), seconds or 1.0, progress)
        finally:
            bar.close()
        self.scores = training.evaluate(held_out)
        print(
            f"training: {training.steps:,} steps, {training.tokens:,} tokens; on held-out texts its most likely token "
            f"is the main model's at {_shares(self.scores.agreement)} of the positions, by draft step"
        )
        return training

    def _install(self, training: "Training") -> None:
        """Export the head, measure it, and move all files into place."""
        from speculative.convert.draft_training import export

        new = self.folder.new
        export.save_checkpoint(training, self.main, new / "checkpoint")
        export.save_ir(training, self.main, new)
        prompts = [text.prompt for text in self.texts.held_out]
        prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
        bar = tqdm(total=len(prompts), unit=" prompts", desc="verdict", mininterval=1)
        judged = verdict.judge(
            self.main.spec, new, prompts, self.longest, self.clock.verdict_seconds, lambda: bar.update()
        )
        bar.close()
        record = self._record(training, judged)
        atomic_write(new / "draft.json", json.dumps(record, indent=2))
        atomic_write(new / "README.md", model_card.card(record))
        self.folder.install()
        print("\n".join(verdict.lines(judged)))
        size = sum((self.options.out / name).stat().st_size for name in ("openvino_model.xml", "openvino_model.bin"))
        print(f"done: {self.options.out} ({size / 1e6:,.1f} MB), checkpoint/, README.md and draft.json in it")

    def _record(self, training: "Training", judged: dict) -> dict:
        """What draft.json holds."""
        return {
            "format": 1,
            "main": self.options.main,
            "command": self.options.command,
            "layers": self.main.layers,
            "data": {
                "texts": len(self.states),
                "tokens": sum(self.states.lengths),
                "held_out_texts": len(self.texts.held_out),
                "prompts": self.options.prompts.name if self.options.prompts else None,
            },
            "training": {
                "draft_vocabulary": len(training.vocabulary),
                "vocabulary": self.main.vocabulary,
                "coverage": round(self.coverage, 4),
                "parameters": sum(weight.numel() for weight in training.head.parameters()),
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


def _shares(values: list[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)
