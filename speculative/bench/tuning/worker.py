"""Model process of tune.py, separate so that a driver crash costs only the current candidate.

One process holds all models under comparison, so that they can be interleaved. tune.py calls the methods of
`TuningWorker` by name through speculative/bench/cluster/worker_process.py; each machine of a cluster has one process.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov

from speculative.bench import genai
from speculative.bench import quality as text_quality
from speculative.bench.cluster import worker_process
from speculative.bench.harness import BackgroundLoad
from speculative.bench.quality import Quality, ReferenceText
from speculative.bench.tuning.settings import Models, Properties, PropertySet, Setting, property_values
from speculative.decoder import GenerationResult
from speculative.drafting import cost_model as costs
from speculative.drafting.policy import Costs
from speculative.models.cached_model import CachedModel
from speculative.models.loading import DraftModel


class TuningWorker:
    """The models and their measurements."""

    def __init__(self, main: Path, capacity: int):
        self.models = Models(main, capacity)
        self.references: list[ReferenceText] = []
        self.load = BackgroundLoad()
        self.load.__enter__()

    def load_models(self, setting: Setting | PropertySet, drafts: list[Path | None]) -> bool:
        """Returns True. Raises RuntimeError or ValueError if a device or plugin rejects the models."""
        if isinstance(setting, Setting):
            self.models.load(setting)
        else:
            for draft in drafts:
                self.models.pair(setting, draft)
        return True

    def keep(self, settings: list, drafts: list[Path | None]) -> None:
        self.models.keep(settings, drafts)

    def is_loaded(self, setting: Setting | PropertySet, drafts: list[Path | None]) -> bool:
        return self.models.is_loaded(setting, drafts)

    def groups(self, always: list, settings: list) -> list[list]:
        return self.models.groups(always, settings)

    def property_values(self, device: str) -> list[Properties]:
        return property_values(device, ov.Core())

    def other_load(self) -> float:
        """The share of processor time used by other programs since this process started."""
        self.load.__exit__()
        return self.load.share

    # ---- texts

    def reference(self, models: PropertySet, ids: np.ndarray, tokens: int) -> ReferenceText:
        return text_quality.reference_text(self.models.any_main(models), ids, tokens)

    def take_references(self, references: list[ReferenceText]) -> None:
        self.references = references

    def judge(self, models: PropertySet) -> Quality:
        main = self.models.any_main(models)
        quality = text_quality.judge(main, self.references)
        main.reset()
        return quality

    def decode(
        self, setting: Setting, ids: np.ndarray, tokens: int, costs: Costs | None
    ) -> genai.Run | GenerationResult:
        if costs:  # for the adaptive length
            self.models.costs[setting.models, setting.draft] = costs
        return self.models.decode(setting, ids, tokens)

    # ---- times

    def measure_costs(self, models: PropertySet, draft: Path | None) -> Costs:
        self.models.costs[models, draft] = found = costs.measure(*self.models.pair(models, draft))
        return found

    def room(self, models: PropertySet, draft: Path | None) -> tuple[int, int]:
        """The smaller logits width and the smaller capacity of the models."""
        pair = self.loaded(models, draft)
        return min(model.vocab_size for model in pair), min(model.capacity for model in pair)

    def iteration(
        self, models: PropertySet, draft: Path | None, tokens: np.ndarray, k: int
    ) -> tuple[float, float, float]:
        """Seconds of a plain step, a verification of k draft tokens and a draft step (0 without a draft), after all but
        the last k + 1 of `tokens`."""
        main, *drafter = self.loaded(models, draft)
        context = len(tokens) - k - 1
        for model, lengths in ((main, (1, k + 1)), *((one, (1,)) for one in drafter)):
            if not isinstance(model, CachedModel) or model.common_prefix(tokens[:context]) < context:
                model.logits(tokens[:context])
                for n in lengths:  # a shape is compiled on first use
                    model.backend.run(context, tokens[context : context + n], n)
        seconds = []
        for model, n in ((main, 1), (main, k + 1), *((one, 1) for one in drafter)):
            begin = time.perf_counter()
            model.backend.run(context, tokens[context : context + n], n)
            seconds.append(time.perf_counter() - begin)
        plain, check, step = [*seconds, 0.0][:3]
        return plain, check, step

    def forget(self, models: PropertySet, draft: Path | None) -> None:
        for model in self.loaded(models, draft):
            model.reset()

    def loaded(self, models: PropertySet, draft: Path | None) -> list[CachedModel | DraftModel]:
        """The main model, and the draft if there is one."""
        return [model for model in self.models.pair(models, draft) if model]


def main() -> None:
    bench: list[TuningWorker] = []

    def function(name: str) -> Callable:
        if name == "open":
            return lambda main, capacity: bench.append(TuningWorker(main, capacity))
        return getattr(bench[0], name)

    worker_process.serve(function)


if __name__ == "__main__":
    main()
