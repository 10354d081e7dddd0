"""What `load` makes of its arguments: a ModelSpec or a path for each model; and what the package exports."""

import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import openvino as ov
import pytest

import speculative
from speculative import batch_decoder, decoder
from speculative.drafting import cost_model
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.sequence.result import GenerationResult
from tests.support.paths import DRAFT, MAIN, ROOT

EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}


class Loaded(Exception):
    """Everything that the test asks about has been loaded."""


@pytest.fixture(params=[decoder, batch_decoder], ids=["decoder", "batch_decoder"])
def specs_of(request, monkeypatch):
    def specs_of(*models):
        """The specs that `load` loads for these arguments; nothing is compiled."""
        loaded = []

        def load(spec, **_):
            loaded.append(spec)
            if len(loaded) == sum(model is not None for model in models):
                raise Loaded
            return spec

        monkeypatch.setattr(cached_model, "load", load)
        with pytest.raises(Loaded):
            request.param.load(*models)
        return loaded

    return specs_of


# ---- ModelSpec ------------------------------------------------------------------------------------------------------


def test_spec_is_an_immutable_value():
    properties = {"NUM_STREAMS": 1}
    spec = ModelSpec("models/main", "GPU", properties)
    assert spec == ModelSpec(Path("models/main"), "GPU", {"NUM_STREAMS": 1}) == pickle.loads(pickle.dumps(spec))
    assert spec.folder == Path("models/main")
    properties["NUM_STREAMS"] = 2  # the caller's own
    assert spec.properties == {"NUM_STREAMS": 1}
    assert len({spec, replace(spec), replace(spec, properties={}), replace(spec, device="CPU")}) == 3
    with pytest.raises(FrozenInstanceError):
        spec.device = "NPU"


def test_specs_share_no_default_properties():
    one, other = ModelSpec(MAIN), ModelSpec(MAIN)
    assert (one.device, one.properties) == ("CPU", {}) and one.properties is not other.properties


@pytest.mark.parametrize("path", [MAIN, str(MAIN)], ids=["Path", "str"])
def test_path_becomes_a_cpu_spec_or_copies_device_and_properties(path):
    assert ModelSpec.of(path) == ModelSpec(MAIN, "CPU", {})
    assert ModelSpec.of(path, like=ModelSpec(DRAFT, "NPU", EXACT)) == ModelSpec(MAIN, "NPU", EXACT)
    spec = ModelSpec(MAIN, "GPU")
    assert ModelSpec.of(spec) is ModelSpec.of(spec, like=ModelSpec(DRAFT, "NPU", EXACT)) is spec


# ---- load -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [MAIN, str(MAIN)], ids=["Path", "str"])
def test_main_model_given_as_path_runs_on_cpu_without_properties(specs_of, folder):
    assert specs_of(folder) == specs_of(folder, None) == [ModelSpec(MAIN, "CPU", {})]


@pytest.mark.parametrize("folder", [DRAFT, str(DRAFT)], ids=["Path", "str"])
def test_draft_given_as_path_inherits_device_and_properties(specs_of, folder):
    main = ModelSpec(MAIN, "GPU.1", EXACT)
    assert specs_of(main, folder) == [main, ModelSpec(DRAFT, "GPU.1", EXACT)]
    assert specs_of(MAIN, folder) == [ModelSpec(MAIN), ModelSpec(DRAFT)]


def test_draft_given_as_spec_inherits_nothing(specs_of):
    main, draft = ModelSpec(MAIN, "GPU.1", EXACT), ModelSpec(DRAFT)
    assert specs_of(main, draft) == [main, draft]
    assert specs_of(MAIN, ModelSpec(DRAFT, "NPU", EXACT)) == [ModelSpec(MAIN), ModelSpec(DRAFT, "NPU", EXACT)]


@pytest.mark.parametrize("load", [decoder.load, batch_decoder.load, cached_model.load])
def test_load_options_are_keyword_only(load):
    """A device as the second argument, as in earlier versions, is an error instead of being misread."""
    with pytest.raises(TypeError):
        load(MAIN, "CPU", DRAFT)
    with pytest.raises(TypeError):
        load(MAIN, device="CPU")


def test_cost_cache_key_depends_on_models_devices_and_processor():
    main, draft = ModelSpec(MAIN), ModelSpec(DRAFT)
    assert cost_model.key(main, None) == cost_model.key(main) == cost_model.key(ModelSpec(str(MAIN)))
    others = [draft, replace(draft, device="GPU"), replace(draft, properties=EXACT)]
    assert len({cost_model.key(main), cost_model.key(draft, main), *(cost_model.key(main, one) for one in others)}) == 5
    processor = json.dumps(ov.Core().get_property("CPU", "FULL_DEVICE_NAME"))
    assert f'"CPU", {processor}' in cost_model.key(main) and processor in cost_model.key(others[1])


# ---- the package ----------------------------------------------------------------------------------------------------


def test_package_exports_the_engine():
    assert speculative.load is decoder.load and speculative.load_batch is batch_decoder.load
    assert speculative.Decoder is decoder.Decoder and speculative.BatchDecoder is batch_decoder.BatchDecoder
    assert speculative.ModelSpec is ModelSpec and speculative.GenerationResult is GenerationResult
    assert all(getattr(speculative, name) for name in speculative.__all__)
    with pytest.raises(AttributeError, match="'speculative' has no attribute 'lode'"):
        speculative.lode  # noqa: B018


def test_engine_is_imported_on_first_use():
    program = (
        "import sys, speculative, speculative.cli.ctrl_c, speculative.cli.processes\n"
        "from speculative import ModelSpec\n"
        "print('openvino' in sys.modules, 'numpy' in sys.modules)\n"
        "from speculative import load\n"
        "print('openvino' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
