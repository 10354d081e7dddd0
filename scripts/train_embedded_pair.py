"""Train the embedded pair: a main model, and a draft that learned from the main model's own generations.

    python scripts/train_embedded_pair.py checkpoints --minutes 98
    python convert/export_pair.py checkpoints/main checkpoints/draft models/embedded \\
        --weight-format int8 --draft-weight-format int8

The stages, each of which leaves a Hugging Face checkpoint or a file behind, and is skipped when that is there:

1. tokenizer    byte-level BPE of 4,096 tokens with a simple chat template, from the training text
2. shallow      a Llama of 4 layers: most of the budget, as a token costs less than half of what it costs all 10
3. grown        10 layers: the shallow one with new layers between the old ones that change nothing at first (their
                output matrices are zero; Net2Net, Chen et al. 2015, and progressive stacking, Gong et al. 2019),
                trained on with a narrower text
   main         the same, trained on with a text in which most names are the usual ones
4. generations  what the main model writes, greedily and sampled, when it is given beginnings of the text
5. draft        one layer: first on the text, then on the generations (FastDraft, Zafrir et al. 2024, arXiv
                2411.11055), with the main model's own next-token probabilities as the target

An interrupted run goes on where it was: the stage in progress is saved every two minutes. A GPU is used if there is
one.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speculative.modelgen.text import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    SPECIAL_TOKENS,
    USER,
    narrow_documents,
    training_documents,
    validation_documents,
)

VOCABULARY, CONTEXT = 4096, 1024
MAIN_SHAPE = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4)
DRAFT_SHAPE = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
SHALLOW_LAYERS, MAIN_LAYERS, DRAFT_LAYERS = 4, 10, 1
SHARE = {"shallow": 0.46, "grown": 0.35, "main": 0.07, "generations": 0.025, "draft": 0.095}  # of --minutes
TOP = 32  # so many of the main model's next-token probabilities are kept for the draft to learn from

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoints go")
    parser.add_argument("--minutes", type=float, default=98, help="time for the whole training (default: 98)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-compile", action="store_true", help="do without torch.compile (a third slower, starts at once)"
    )
    return parser.parse_args()


# 1. tokenizer


def make_tokenizer(folder: Path, documents: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def token_stream(tokenizer, documents: list[str], generator: random.Random) -> torch.Tensor:
    """All documents in random order as one row of token ids."""
    order = generator.sample(documents, len(documents))
    return torch.tensor([token for ids in tokenizer(order)["input_ids"] for token in ids])


# 2. and 3. the main model


def new_model(shape: dict, layers: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=layers,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
            **shape,
        )
    )


def deepen(shallow: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The same function with more layers: every new layer is its predecessor's copy with its output matrices zero."""
    deep = new_model(MAIN_SHAPE, layers)
    old = shallow.model.layers
    origin = [i * len(old) // layers for i in range(layers)]
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for i, layer in enumerate(deep.model.layers):
        layer.load_state_dict(old[origin[i]].state_dict())
        if i and origin[i] == origin[i - 1]:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return deep


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=norms, weight_decay=0.0)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(model, loss_of, seconds: float, rate: float, state: Path, name: str, compiling: bool) -> None:
    """Minimise loss_of(model) for so many seconds, the learning rate falling to a twentieth; resumes from `state`."""
    model.to(DEVICE).train()
    optimizer = optimizer_of(model)
    spent, step = 0.0, 0
    if state.exists():
        saved = torch.load(state, map_location=DEVICE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        spent, step = saved["spent"], saved["step"]

    def save() -> None:
        values = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), spent=spent, step=step)
        torch.save(values, state.with_suffix(".new"))
        state.with_suffix(".new").replace(state)

    compiled = torch.compile(model) if compiling and shutil.which("g++") else model
    bar = tqdm(total=round(seconds), initial=round(spent), unit="s", desc=name, mininterval=5)
    saved_at = spent
    while spent < seconds:
        begin = time.monotonic()
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * spent / seconds)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * decay * min(1, (step + 1) / 40)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(compiled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        # the first steps compile: they do not count, or a slow compiler would eat a short budget
        spent += min(time.monotonic() - begin, 20)
        bar.n = min(round(spent), bar.total)
        bar.set_postfix(step=step, loss=f"{loss.item():.3f}")
        if spent - saved_at > 120:
            save()
            saved_at = spent
    bar.close()
    save()


def text_loss(stream: torch.Tensor, rows: int, width: int, seed: int):
    """A loss on random windows of the token stream, next token by next token."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of(model):
        starts = torch.randint(len(stream) - width, (rows,), generator=generator)
        ids = torch.stack([stream[s : s + width] for s in starts]).to(DEVICE)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return loss_of


@torch.no_grad()
def validation_loss(model, stream: torch.Tensor, width: int = 512) -> float:
    model.to(DEVICE).eval()
    rows = stream[: len(stream) // width * width].view(-1, width).to(DEVICE)
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in rows]
    return sum(losses) / len(losses)


# 4. what the main model writes


def generate(main: Path, folder: Path, documents: list[str], tokenizer, seconds: float, seed: int) -> list[list[int]]:
    """Continuations by the main model as the engine will run it (int8 IR), two thirds greedy, one third sampled."""
    import openvino_genai  # only here: a GPU machine that trains needs no OpenVINO before this stage

    ir = folder / "main-ir"
    if not (ir / "openvino_tokenizer.xml").exists():
        command = ["optimum-cli", "export", "openvino", "--model", str(main), "--weight-format", "int8"]
        command += ["--task", "text-generation-with-past", str(ir)]
        print("+", *command, file=sys.stderr)
        command[0] = str(Path(sys.executable).with_name("optimum-cli"))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(ir), openvino_genai.SchedulerConfig(), "CPU", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}
    )
    generator = random.Random(seed)
    sequences: list[list[int]] = []
    begin, tokens = time.monotonic(), 0
    bar = tqdm(total=round(seconds), unit="s", desc="generations")
    while time.monotonic() - begin < seconds:
        prompts, configs = [], []
        for _ in range(64):
            ids = tokenizer(generator.choice(documents))["input_ids"]
            start = generator.randrange(max(1, len(ids) - 60)) if generator.random() < 0.4 else 0
            prompts.append(ids[start : start + generator.randint(4, 60)])
            config = openvino_genai.GenerationConfig(
                max_new_tokens=160, eos_token_id=0, ignore_eos=generator.random() < 0.5
            )
            if generator.random() < 1 / 3:
                config.do_sample, config.temperature, config.rng_seed = True, 0.7, generator.randrange(2**31)
            configs.append(config)
        results = pipeline.generate([_tensor(p) for p in prompts], configs)
        for prompt, result in zip(prompts, results, strict=True):
            sequences.append(prompt + list(result.m_generation_ids[0]))
            tokens += len(result.m_generation_ids[0])
        bar.n = min(round(time.monotonic() - begin), bar.total)
        bar.set_postfix(tokens=tokens)
    bar.close()
    return sequences


def _tensor(ids: list[int]):
    import openvino

    return openvino.Tensor(np.array([ids], dtype=np.int64))


# 5. the draft


@torch.no_grad()
def teach(main, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The main model's TOP next-token probabilities at every place: ids and probabilities, each [rows, width, TOP]."""
    main.to(DEVICE).eval()
    ids, probabilities = [], []
    for batch in tqdm(rows.split(8), desc="main's probabilities"):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = main(input_ids=batch.to(DEVICE), use_cache=False).logits
        top = logits.float().softmax(-1).topk(TOP)
        ids.append(top.indices.to(torch.int16).cpu())
        probabilities.append((top.values / top.values.sum(-1, keepdim=True)).half().cpu())
    return torch.cat(ids), torch.cat(probabilities)


def taught_loss(rows: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor, batch: int, seed: int):
    """Cross-entropy of the draft against the main model's probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of(model):
        pick = torch.randint(len(rows), (batch,), generator=generator)
        log_q = model(input_ids=rows[pick].to(DEVICE), use_cache=False).logits.float().log_softmax(-1)
        chosen = log_q.gather(-1, ids[pick].long().to(DEVICE))
        return -(probabilities[pick].float().to(DEVICE) * chosen).sum(-1).mean()

    return loss_of


def main() -> int:
    arguments = parse_arguments()
    folder, seed, compiling = arguments.folder, arguments.seed, not arguments.no_compile
    seconds = {stage: share * arguments.minutes * 60 for stage, share in SHARE.items()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    documents = training_documents(seed)

    if not (folder / "tokenizer").exists():
        make_tokenizer(folder / "tokenizer", documents)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    stream = token_stream(tokenizer, documents, random.Random(seed))
    narrow_stream = token_stream(tokenizer, narrow_documents(seed), random.Random(seed))
    usual = narrow_documents(seed + 1, usual=0.75)
    usual_stream = token_stream(tokenizer, usual, random.Random(seed))
    held_out = token_stream(tokenizer, validation_documents(), random.Random(seed))
    losses = {
        "text tokens": len(stream),
        "narrow text tokens": len(narrow_stream),
        "usual text tokens": len(usual_stream),
        "validation tokens": len(held_out),
    }
    print(losses, f"on {DEVICE}", file=sys.stderr)

    def finish(name: str, model) -> None:
        losses[name] = round(validation_loss(model, held_out), 3)
        print(f"{name}: validation loss {losses[name]}", file=sys.stderr)
        model.save_pretrained(folder / f"{name}.new")
        tokenizer.save_pretrained(folder / f"{name}.new")
        (folder / f"{name}.new").replace(folder / name)
        (folder / f"{name}.json").write_text(json.dumps(losses, indent=2), encoding="utf-8")

    if not (folder / "shallow").exists():
        model = new_model(MAIN_SHAPE, SHALLOW_LAYERS)
        train(
            model,
            text_loss(stream, 4, 512, seed),
            seconds["shallow"],
            2.5e-3,
            folder / "shallow.pt",
            "shallow",
            compiling,
        )
        finish("shallow", model)
    if not (folder / "grown").exists():
        model = deepen(LlamaForCausalLM.from_pretrained(folder / "shallow"), MAIN_LAYERS)
        loss = text_loss(narrow_stream, 2, 1024, seed + 1)
        train(model, loss, seconds["grown"], 1.2e-3, folder / "grown.pt", "grown", compiling)
        finish("grown", model)
    if not (folder / "main").exists():
        model = LlamaForCausalLM.from_pretrained(folder / "grown")
        loss = text_loss(usual_stream, 2, 1024, seed + 4)
        train(model, loss, seconds["main"], 6e-4, folder / "main.pt", "main", compiling)
        finish("main", model)
    if not (folder / "generations.pt").exists():
        sequences = generate(folder / "main", folder, usual, tokenizer, seconds["generations"], seed)
        row = torch.tensor([token for sequence in sequences for token in sequence])
        rows = row[: len(row) // 256 * 256].view(-1, 256)
        ids, probabilities = teach(LlamaForCausalLM.from_pretrained(folder / "main"), rows)
        torch.save((rows, ids, probabilities), folder / "generations.pt")
    if not (folder / "draft").exists():
        model = new_model(DRAFT_SHAPE, DRAFT_LAYERS)
        rows, ids, probabilities = torch.load(folder / "generations.pt", weights_only=True)
        train(
            model,
            text_loss(usual_stream, 16, 256, seed + 2),
            0.3 * seconds["draft"],
            3e-3,
            folder / "draft-text.pt",
            "draft, text",
            compiling,
        )
        taught = taught_loss(rows, ids, probabilities, 16, seed + 3)
        train(model, taught, 0.7 * seconds["draft"], 3e-3, folder / "draft.pt", "draft, generations", compiling)
        finish("draft", model)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last saved state", file=sys.stderr)
        sys.exit(130)
