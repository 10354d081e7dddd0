"""Each architecture end to end: random checkpoints, export, decoding with a draft, which must not change the tokens.

Three architectures by default, all with --long (make test-all). Main and draft differ in every size. Everything runs in
f32, because in lower precisions a pass over one token and a pass over K + 1 tokens resolve near-ties differently.
"""

from importlib.metadata import version

import numpy as np
import openvino_genai
import pytest
from packaging.version import parse

from speculative.decoder import Decoder
from speculative.decoder import load as load_decoder
from speculative.drafting.policy import AdaptiveDraftLength, Costs, FixedDraftLength
from speculative.drafting.proposers import DraftModelProposer
from speculative.models import cached_model
from speculative.models.spec import ModelSpec
from speculative.pair.check import check_pair
from tests.support.later import Later, torch, transformers
from tests.support.tiny_checkpoints import DROPPED_MASKS

exporter = Later("optimum.exporters.openvino.model_configs")
PROMPT = "def read_file(path):"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
NEW_TOKENS = 64  # with the prompt, several times the sliding windows of 16


def test_greedy_tokens_with_a_draft_equal_those_without(architecture, tiny_pair):
    pair = tiny_pair(architecture)
    alone, _ = generate(openvino_genai.LLMPipeline(str(pair / "main"), "CPU", **F32))
    for draft in ("draft", "main"):  # a bad draft and a perfect one: rejected and accepted tokens both
        draft_model = openvino_genai.draft_model(str(pair / draft), "CPU", **F32)
        pipeline = openvino_genai.LLMPipeline(str(pair / "main"), "CPU", draft_model=draft_model, **F32)
        for k in (1, 4):
            tokens, accepted = generate(pipeline, num_assistant_tokens=k)
            assert tokens == alone
            if draft == "main":
                assert accepted >= NEW_TOKENS * k // (k + 1) - k - 1  # all but those of the last iteration
    assert len(set(alone)) > 8  # no text that repeats itself from the start


def test_native_engine_generates_the_same_tokens_as_genai(architecture, tiny_pair):
    """On both caches, with a bad draft and a perfect one, for fixed and adaptive draft lengths."""
    pair = tiny_pair(architecture)
    expected, _ = generate(openvino_genai.LLMPipeline(str(pair / "main"), "CPU", **EXACT))
    prompt = ids_of(PROMPT, pair)
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for stateful in (False, True):
        main = cached_model.load(ModelSpec(pair / "main", "CPU", EXACT), stateful=stateful)
        for folder in ("draft", "main"):
            draft = DraftModelProposer(
                cached_model.load(ModelSpec(pair / folder, "CPU", EXACT), stateful=stateful), main.vocab_size
            )
            for rule in (FixedDraftLength(4), AdaptiveDraftLength(Costs(0.1, {1: 1.0, 17: 2.0}))):
                result = Decoder(main, draft, rule).generate(prompt, config)
                assert result.tokens == expected
                assert result.acceptance_rate > 0.9 or folder == "draft"


@pytest.mark.long
@pytest.mark.parametrize("name", DROPPED_MASKS)
def test_model_whose_masks_paged_attention_drops_is_decoded_with_states(name, tiny_pair):
    """GenAI's pipeline gives the checkpoint's text without paged attention only: docs/upstream.md."""
    pair = tiny_pair(name)
    expected, _ = generate(openvino_genai.LLMPipeline(str(pair / "main"), "CPU", ATTENTION_BACKEND="SDPA", **EXACT))
    checkpoint = transformers.AutoModelForCausalLM.from_pretrained(pair.parent / "checkpoints/main")
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    prompt = torch.from_numpy(ids_of(PROMPT, pair))[None]
    found = checkpoint.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)
    assert found[0, prompt.shape[1] :].tolist() == expected and len(set(expected)) > 8
    paged, _ = generate(openvino_genai.LLMPipeline(str(pair / "main"), "CPU", **EXACT))
    assert paged != expected
    model = load_decoder(ModelSpec(pair / "main", "CPU", EXACT), ModelSpec(pair / "draft", "CPU", EXACT))
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert model.generate(prompt[0].numpy(), config).tokens == expected
    attention = next(
        finding for finding in check_pair(pair / "main", pair / "draft").findings if finding.what == "attention"
    )
    assert attention.level == "warning" and "GenAI's pipeline gives wrong text" in attention.message


def ids_of(text, pair):
    return openvino_genai.Tokenizer(str(pair / "main")).encode(text, add_special_tokens=False).input_ids.data[0]


def generate(pipeline, **options):
    """Tokens generated greedily, and the number of draft tokens accepted."""
    ids = pipeline.get_tokenizer().encode(PROMPT, add_special_tokens=False)
    config = openvino_genai.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, **options)
    result = pipeline.generate(ids, config)
    accepted = result.extended_perf_metrics.get_num_accepted_tokens() if options else 0
    return np.array(result.tokens[0]).tolist(), accepted


def test_old_chatglm_is_not_exported_by_the_pinned_transformers():
    """ChatGLM2, ChatGLM3 and the first GLM-4 ship their own code and do not export; GLM-4 as `glm`, `glm4` does.

    optimum-cli ends with "Maximum required is 4.55.4, got: 4.57.6". docs/supported-models.md says so: keep it in step.
    """
    assert parse(exporter.ChatGLM2OpenVINOConfig.MAX_TRANSFORMERS_VERSION) < parse(version("transformers"))
