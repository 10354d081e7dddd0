"""Types of the JSON object that the measuring programs print as their last line: each key with its unit and meaning.

    result: BenchmarkResult = json.loads(output.splitlines()[-1])
    RESULTS["benchmark"]  # BenchmarkResult: the type of the result of scripts/benchmark.py

Unless a comment says otherwise, times are in seconds, sizes in bytes, throughput is in new tokens per second, a range
is [lowest, highest] over the rounds, and a value is the median over them. None means not measured or not known. The
keys of a class with total=False may be missing. The metrics are defined in speculative/sequence/metrics.py.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Properties = dict[str, str | int | bool]
"""OpenVINO properties by name."""

Range = list[float]
"""[lowest, highest]."""

# ---- environment ----------------------------------------------------------------------------------------------------


class InstructionSets(TypedDict, total=False):
    """What results of before 28 November 2026 lack."""

    instruction_sets: str  # of the CPU, like "AVX2, AVX-512, VNNI"; "" if not known


class Machine(InstructionSets):
    """The machine, and the versions of its software."""

    date: str  # of the measurement, like "2026-11-22 19:29 UTC"
    processor: str  # name of the CPU
    cores: int  # CPU cores the program may use
    memory: str  # main memory, like "24 GiB"
    os: str  # operating system and its version
    python: str  # version
    openvino: str  # version
    openvino_genai: str  # version and build


class Environment(Machine):
    """Environment of a published result. PairEnvironment has the keys that the models and a measurement add."""

    command: str  # the program and its arguments
    properties: Properties  # given with --property


class MainEnvironment(Environment):
    """The environment of a program that measures a main model on a device."""

    main: str  # folder of the main model
    device: str  # of the main model, as given: "CPU", "AUTO:GPU,CPU"
    device_name: str  # full names of its devices
    main_precision: str  # formats of its weights, and inference precision
    other_load: float  # share of the processor time that other programs used, from 0 to 1


class PairEnvironment(MainEnvironment, total=False):
    """The environment of a program that measures one pair on one device each, or a main model without a draft."""

    draft: str  # as of the main model; missing without a draft, as are the next three
    draft_device: str
    draft_device_name: str
    draft_precision: str


class BenchmarkEnvironment(PairEnvironment):
    """The environment of scripts/benchmark.py."""

    prompts: str  # number and source, like "8 of embedded_code.jsonl"
    context: int  # tokens of other text before each prompt
    huge_pages: bool  # whether memory was moved into huge pages
    temperature: float | None  # of the sampled methods; None if there are none
    max_new_tokens: int  # new tokens per text
    starts: int  # of each process
    rounds: int  # complete rounds, over all starts


class BatchingEnvironment(PairEnvironment):
    """The environment of scripts/benchmark_batching.py."""

    prompts: str  # number and source
    max_new_tokens: int  # new tokens per text
    seconds: float  # duration of each measurement in a round
    starts: int  # of each process
    rounds: int  # complete rounds, over all starts
    huge_pages: bool  # whether memory was moved into huge pages
    cache_tokens: int  # size of the project's engine's KV cache, for all texts together


class ServingSettings(TypedDict):
    """The settings of scripts/benchmark_serving.py."""

    prompts: str  # number and source
    max_new_tokens: int  # new tokens per text, at most
    temperature: float  # 0: greedy
    seconds: float  # duration of each measurement in a round
    rounds: int  # complete rounds


class StartedServersEnvironment(PairEnvironment, ServingSettings):
    """The environment of scripts/benchmark_serving.py if it started the servers."""

    replicas: int  # of each server
    threads: int  # of each replica's engine, for inference
    round_trip: float  # seconds that a request takes without inference


class RunningServersEnvironment(Environment, ServingSettings):
    """The environment of scripts/benchmark_serving.py with --url."""

    servers: str  # their URLs
    other_load: float  # share of the processor time that other programs used on the clients' machine, from 0 to 1


class SweepEnvironment(PairEnvironment):
    """The environment of scripts/sweep_draft_length.py."""

    prompts: str  # number and source
    max_new_tokens: int  # new tokens per text
    rounds: int  # complete rounds


class TuneEnvironment(PairEnvironment, total=False):
    """The environment of scripts/tune.py; device and draft_device are the first of those tried."""

    machines: dict[str, str]  # of the cluster: name and kind


class _SwapEnvironment(Machine):
    command: str  # the program and its arguments
    main: str  # folder of the main model
    draft: str  # folder of the draft model
    devices: dict[str, str]  # label, and the full name or why it is missing
    properties: list[str]  # like "NPU:MAX_PROMPT_LEN=128"
    engine: str  # that decoded
    k: list[int | str]  # draft lengths asked for; "adaptive"
    prompts: int  # number of prompts
    max_new_tokens: int  # new tokens per text
    rounds: int  # per cell
    results: str  # file of the finished cells
    other_load: float  # largest share, of all cells, of the processor time that other programs used, from 0 to 1


class SwapEnvironment(_SwapEnvironment, total=False):
    """The environment of scripts/device_swap.py."""

    machines: dict[str, str]  # of the cluster: name and kind


# ---- parts of several results ---------------------------------------------------------------------------------------


class MethodRow(TypedDict):
    """A decoding method over its rounds, relative to the main model alone in the same rounds; decode only."""

    name: str  # like "GenAI, K = 4"
    engine: str  # id of the engine: GenAI's pipeline or the project's
    sampled: bool  # whether the temperature is above 0
    temperature: float  # 0: greedy
    draft_length: int | str  # 0: no draft; K; "adaptive"; "adaptive, two sources"; "confidence 0.4"; "lookup 5"; ...
    throughput: float  # tokens/s, prompts excluded
    throughputs: list[float]  # tokens/s, by round
    speedup: float  # over the main model alone
    speedup_range: Range
    gain_percent: float  # 100 * (speedup - 1)
    forward_speedup: float  # new tokens per main-model forward pass, those of the prompts included
    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    position_acceptance: list[float]  # share of the iterations with an i-th draft token that accepted it
    block_efficiency: float | None  # new tokens per main-model forward pass after the prompt
    mean_draft_length: float | None  # proposed draft tokens per iteration
    ttft: float | None  # seconds to the first token, prompt included; None with --context
    tpot: float  # seconds per output token after the first
    outside: float | None  # share of the time outside the models' forward passes, from 0 to 1
    repetition: float  # share of repeated 4-grams in the output, from 0 to 1
    same_text: int | None  # texts equal to the main model's; None if sampled
    texts: int  # texts per round
    output_sha256: str  # first 16 digits of a hash of the texts' tokens
    why: str  # what the adaptive draft length did last, and why


class IterationSplit(TypedDict):
    """Mean milliseconds per iteration of a method, by where they are spent."""

    name: str  # of the method
    draft_length: int | str  # as in MethodRow
    draft_ms: float  # in the draft's forward passes
    verify_ms: float  # in the main model's forward pass
    overhead_ms: float  # outside both


_CutOff = TypedDict("_CutOff", {"cut off": int})  # not a name, so not a key of a class


class Outcomes(_CutOff):
    """Number of requests by outcome. "cut off": by a broken connection, or an error that is not the API's."""

    answered: int  # completely
    refused: int  # with an API error
    lost: int  # without an end that the client can notice


class Drafting(TypedDict):
    """Use of the draft; None if it is not known."""

    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    block_efficiency: float | None  # new tokens per main-model forward pass after the prompt
    mean_draft_length: float | None  # draft tokens of a text per main-model forward pass


class ProcessorTime(TypedDict):
    """Processor seconds of a load, until its last answer. Servers that share the engines' cores slow them down."""

    seconds: float  # elapsed
    engines: float  # of the busiest threads of each replica: those of inference, and the engine's own
    servers: float  # of everything else in the servers: HTTP, proxies, Ray
    clients: float
    requests: int
    pieces: int  # of text, streamed


class _LoadRow(Outcomes, Drafting):
    """A method under load with a number of clients, relative to the main model alone in the same rounds."""

    name: str  # method and number of clients
    method: str  # name of the method
    clients: int  # that request at the same time; in process, texts decoded at once
    counted: str  # what `clients` counts: "client" or "text"
    throughput: float  # tokens/s of all clients together, prompts and queueing included
    throughputs: list[float]  # tokens/s, by round
    speedup: float | None  # over the main model alone; None for itself
    speedup_range: Range | None
    ttft: float | None  # seconds to the first token: median over the requests
    ttft_range: Range | None  # 5th and 95th percentile
    tpot: float | None  # seconds per output token after the first: median over the requests
    tpot_range: Range | None  # 5th and 95th percentile
    same_text: int | None  # answers equal to the baseline's; None if sampled
    texts: int  # answers compared with the baseline's
    requests: int  # sent


class LoadRow(_LoadRow, total=False):
    """Also with means, missing in earlier results, and with the processor time, where it is measured."""

    ttft_mean: float | None
    tpot_mean: float | None
    processor_time: ProcessorTime  # over all rounds; missing in process and with --url


class Loading(TypedDict):
    """Loading of the models in a decoding process."""

    load_seconds: float  # to load the models
    huge_bytes: int | None  # of the process in huge pages


class OneStart(TypedDict):
    """Loading of a pipeline and a short text in a new process."""

    seconds: float  # to load the models
    peak_bytes: int | None  # peak memory of the process
    cache_bytes: int | None  # of the KV caches; None in GenAI


# ---- scripts/benchmark.py -------------------------------------------------------------------------------------------


class CategoryRow(TypedDict):
    """A method with a draft on the prompts of one category."""

    category: str  # "other" for prompts without one
    name: str  # of the method
    speedup: float  # over the main model alone
    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    repetition: float  # share of repeated 4-grams in the output, from 0 to 1
    prompts: int  # of the category


class StartCost(TypedDict):
    """Loading of a pipeline, first with an empty model cache (CACHE_DIR), then with a filled one."""

    name: str  # of the pipeline
    first_seconds: float  # with an empty cache
    first_range: Range  # over the starts
    second_seconds: float  # with a filled cache
    second_range: Range  # over the starts
    peak_bytes: int | None  # largest peak memory of the process with an empty cache
    second_peak_bytes: int | None  # with a filled cache


class _Ratio(TypedDict):
    what: str  # the two methods, like "adaptive / ours alone, greedy"
    ratio: float  # of their speeds
    range: Range
    interval: Range | None  # 95 % confidence interval over the prompts; None if there is only one
    prompts: int  # compared


class Ratio(_Ratio, total=False):
    """Speed of a method relative to another one, from ratios.py."""

    where: str  # methods of the two engines that are compared on identical texts: "alone", "K = 4"


class ProcessStart(Loading):
    """One start of a decoding process."""

    name: str  # of the process
    start: int  # from 1


class TokenStep(TypedDict):
    """One iteration; pieces of text."""

    accepted: list[str]  # draft tokens
    rejected: list[str]  # draft tokens
    main: str  # the main model's own token


class TokenView(TypedDict):
    """One text, token by token."""

    prompt: str
    steps: list[TokenStep]


class _BenchmarkResult(TypedDict):
    program: Literal["benchmark"]
    summary: list[str]  # sentences
    environment: BenchmarkEnvironment
    rows: list[MethodRow]
    categories: list[CategoryRow]  # empty if the prompts have fewer than two
    iteration: list[IterationSplit]  # of the methods with a draft whose forward passes are timed
    starts: list[StartCost]  # empty with --no-starts
    comparisons: list[Ratio]
    processes: list[ProcessStart]


class BenchmarkResult(_BenchmarkResult, total=False):
    """The result of scripts/benchmark.py."""

    token_view: TokenView  # of the first prompt with the fastest drafted method; left out of docs/figures


# ---- scripts/benchmark_batching.py and benchmark_serving.py ---------------------------------------------------------


class LoadRatio(TypedDict):
    """Throughput of a method relative to another one, for a number of texts."""

    what: str  # the two methods and the number of texts
    ratio: float  # of their throughputs
    range: Range
    clients: int  # texts decoded at once
    same_text: int | None  # texts equal in both
    texts: int  # texts compared


class ProcessMemory(TypedDict):
    """Loading and memory of a process, up to the largest number of texts."""

    name: str  # of the process
    texts: int  # decoded at once, at most
    first_seconds: float  # to load the models
    peak_bytes: int | None  # peak memory, weights and caches included
    cache_bytes: int | None  # of the KV caches; None in GenAI


class BatchingResult(TypedDict):
    """The result of scripts/benchmark_batching.py."""

    program: Literal["benchmark_batching"]
    summary: list[str]  # sentences
    environment: BatchingEnvironment
    rows: list[LoadRow]
    comparisons: list[LoadRatio]
    starts: list[ProcessMemory]  # at the end of the first start; empty if that was interrupted


class ServingResult(TypedDict):
    """The result of scripts/benchmark_serving.py."""

    program: Literal["benchmark_serving"]
    summary: list[str]  # sentences
    environment: StartedServersEnvironment | RunningServersEnvironment
    rows: list[LoadRow]


# ---- scripts/benchmark_costs.py -------------------------------------------------------------------------------------


class InferenceCosts(TypedDict):
    """Milliseconds per forward pass."""

    context: int  # tokens in the KV caches
    main: dict[int, float]  # main model, by number of tokens; JSON has the numbers as strings
    draft: float  # draft, one token
    rollback: float  # additional milliseconds after a rollback


class SamplingCosts(TypedDict):
    """Microseconds outside the forward passes."""

    vocabulary: int  # tokens
    settings: str  # of sampling, like "top-k 50"
    distribution: float  # from logits to a distribution
    draw: float  # of one token
    verify_4: float  # verification of 4 draft tokens


class CostsStart(OneStart):
    """Seconds: median of several starts. Memory: the largest."""

    start: str  # model cache (CACHE_DIR): "no cache", "first" (empty), "second" (filled)


class WeightBytes(TypedDict):
    """Bytes of weights that one forward pass reads."""

    main: int
    draft: int


class LimitRun(TypedDict):
    """One text."""

    method: str  # "alone" or "draft"
    seconds: float  # after the first token
    tokens: int  # after the first
    bandwidth: float  # memory read bandwidth before or after the text, the higher one, in bytes/s


class BandwidthLimit(TypedDict):
    """Decoding relative to the time for reading the weights."""

    weight_bytes: WeightBytes
    runs: list[LimitRun]
    bandwidth: float  # memory read bandwidth, in bytes/s
    alone: float  # fraction of the limit reached without a draft
    draft: float  # with the draft


class CostsEnvironment(TypedDict):
    """The environment of scripts/benchmark_costs.py."""

    main: str  # folder of the main model
    draft: str  # folder of the draft model
    device: str  # of the main model
    draft_device: str  # of the draft model
    properties: Properties  # given with --property
    huge_pages: bool  # whether memory was moved into huge pages
    openvino_genai: str  # version
    python: str  # version
    machine: str  # architecture and cores


class CostsResult(TypedDict):
    """The result of scripts/benchmark_costs.py."""

    environment: CostsEnvironment
    inferences: list[InferenceCosts]
    sampling: list[SamplingCosts]
    starts: list[CostsStart]
    limit: BandwidthLimit


# ---- scripts/sweep_draft_length.py ----------------------------------------------------------------------------------


class SweepPoint(TypedDict):
    """One draft length at one temperature."""

    temperature: float  # 0: greedy
    k: int  # draft tokens per iteration
    engine: str  # as in MethodRow
    name: str  # of the method
    speedup: float  # over the main model alone in the same engine
    speedup_range: Range
    predicted: float  # speedup from block_efficiency, cost_ratio and verify_ratio
    predicted_from_alpha: float  # speedup from alpha, cost_ratio and verify_ratio
    forward_speedup: float  # new tokens per main-model forward pass, those of the prompts included
    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    block_efficiency: float  # tau: new tokens per main-model forward pass after the prompt
    alpha: float  # probability that a draft token is accepted, the same for all K of a temperature
    cost_ratio: float  # c: time of a draft step / time of a main-model step
    verify_ratio: float  # v(K): time of a main-model pass over K + 1 tokens / over one
    repetition: float  # share of repeated 4-grams in the output, from 0 to 1
    best: bool  # whether it has the highest speedup at its temperature


class SweepResult(TypedDict):
    """The result of scripts/sweep_draft_length.py."""

    program: Literal["sweep_draft_length"]
    summary: list[str]  # sentences
    environment: SweepEnvironment
    rows: list[MethodRow]
    sweep: list[SweepPoint]
    prediction_error: float  # mean of |predicted - speedup| / speedup over the points
    iteration: list[IterationSplit]  # empty for GenAI's pipeline


# ---- scripts/compare_sources.py -------------------------------------------------------------------------------------


class SourceRow(TypedDict):
    """A source of draft tokens at a temperature, with the time of forward passes by the cost model."""

    name: str  # source and temperature
    source: str
    temperature: float
    speedup: float  # over plain decoding
    speedup_range: Range | None  # 95 % confidence interval over prompts; None of a single one
    tokens_per_forward: float  # tokens per forward pass of the main model, after the prompt's
    draft_passes: float  # forward passes of the draft model per forward pass of the main model
    texts: int


class SourceCategory(TypedDict):
    """A source on the prompts of one category."""

    category: str  # "other" for prompts without one
    source: str
    temperature: float
    speedup: float  # over plain decoding
    texts: int


class SourceRatio(TypedDict):
    """Tokens per second of one source relative to another."""

    what: str
    ratio: float
    range: Range | None  # 95 % confidence interval over prompts; None of a single one


class PassCosts(TypedDict):
    """Seconds of forward passes, as `drafting.policy.Costs`."""

    draft: float
    main: dict[int, float]  # by number of tokens; JSON has the numbers as strings
    draft_further: float | None
    main_change: float


class SourcesEnvironment(PairEnvironment):
    """The environment of scripts/compare_sources.py."""

    prompts: str  # number and source
    max_new_tokens: int  # of each text
    seed: int
    samples: int  # texts per prompt above temperature 0


class SourcesResult(TypedDict):
    """The result of scripts/compare_sources.py."""

    program: Literal["compare_sources"]
    summary: list[str]  # sentences
    environment: SourcesEnvironment
    rows: list[SourceRow]
    categories: list[SourceCategory]
    ratios: list[SourceRatio]
    costs: PassCosts


# ---- scripts/device_swap.py -----------------------------------------------------------------------------------------


class _CellFacts(TypedDict):
    load_seconds: float  # to load the models
    other_load: float  # share of the processor time that other programs used, from 0 to 1
    main_precision: str  # formats of the main model's weights, and inference precision


class CellFacts(_CellFacts, total=False):
    """Facts about the measurement of a cell."""

    draft_precision: str  # likewise of the draft model, if there is one


class CellAnswer(CellFacts):
    """Result of the process of a cell, as saved in the results file."""

    rows: list[MethodRow]  # main model alone, then each draft length
    tokens: list[list[list[int]]]  # new token ids by row and prompt


class Difference(TypedDict):
    """The first difference of a cell's texts from those of the first cell."""

    prompt: str  # id of the prompt
    position: int  # among the new tokens, from 1
    expected: str  # token of the first cell's text
    seen: str  # this cell's token
    before: str  # the text before them
    expected_continuation: str  # the text from there on
    continuation: str  # this cell's
    different_texts: int  # number of texts that differ
    texts: int  # compared
    already_alone: bool  # whether the main model alone on this device differs, too
    margins: list[float]  # nats, in f32, at the first difference of each such text; empty: not judged


class CellProperties(TypedDict):
    """The properties of both models."""

    main: Properties
    draft: Properties


class _CellStatus(TypedDict):
    main_device: str  # label
    draft_device: str  # label; "none": the main model alone
    status: str  # "ok", "emulated", "failed", "timeout", "absent", "not run"
    reason: str  # caveat, or why there are no figures


class _CellMachine(TypedDict, total=False):
    machine: str  # of the cluster: name
    machine_kind: str  # processor, cores, devices, version


class _CellMeasured(TypedDict):
    measured: str  # when, UTC
    properties: CellProperties


class AbsentCell(_CellStatus, _CellMachine):
    """A cell that was not measured: "absent" or "not run"."""


class FailedCell(_CellStatus, _CellMachine, _CellMeasured):
    """A cell that was tried without success: "failed" or "timeout"."""


class MeasuredCell(_CellStatus, _CellMachine, _CellMeasured, CellFacts):
    """A cell with figures ("ok" or "emulated"): those of its fastest draft length, as in MethodRow."""

    draft_length: int | str
    throughput: float  # tokens/s, comparable between cells: the speedup x the main model alone, over all cells
    throughput_range: Range
    throughputs: list[float]  # tokens/s as measured in this cell, by round
    speedup: float
    speedup_range: Range
    acceptance_rate: float | None
    block_efficiency: float
    ttft: float
    tpot: float
    repetition: float
    same_text: bool  # as the first cell's, for all prompts
    first_difference: int | None  # `position` of the difference
    difference: Difference | None
    difference_is: str | None  # "near-tie, 0.12 nats", "real, 1.3 nats", "not judged"


CellResult = AbsentCell | FailedCell | MeasuredCell


class Matrix(TypedDict):
    """Main device x draft device."""

    main_devices: list[str]  # labels of the rows
    draft_devices: list[str]  # labels of the columns, "none" first
    cells: list[CellResult]


class SwapRow(MethodRow):
    """One method of a cell."""

    main_device: str  # label
    draft_device: str  # label; "none": the main model alone
    status: str  # of the cell


class SwapResult(TypedDict):
    """The result of scripts/device_swap.py."""

    program: Literal["device_swap"]
    summary: list[str]  # sentences
    environment: SwapEnvironment
    matrix: Matrix
    rows: list[SwapRow]  # every method of every cell with figures


# ---- scripts/tune.py ------------------------------------------------------------------------------------------------


class _MethodSettings(TypedDict):
    device: str  # of the main model
    properties: Properties  # of the main model


class MethodSettings(_MethodSettings, total=False):
    """Arguments to load and call a decoding method; the keys of the draft are missing without one."""

    scheduler: Properties  # of GenAI's SchedulerConfig
    max_ngram_size: int  # of suffix decoding, alone or beside the draft
    draft_device: str
    draft_properties: Properties
    num_assistant_tokens: int  # K; 0: adaptive or by confidence
    assistant_confidence_threshold: float  # 0: none


class RecommendedSettings(MethodSettings):
    """The fastest method of an engine."""

    throughput: float  # tokens/s, decode only
    speedup: float  # over the main model alone with its defaults
    speedup_range: Range


class QualityFigures(TypedDict, total=False):
    """The text of a property set compared with the main model's in f32 (quality.py); all keys or none."""

    agreement: float  # share of the positions with the same token, from 0 to 1
    near_ties: int  # other positions at which f32 prefers its own token by little
    real_differences: int  # the rest
    mean_kl: float  # divergence from f32, in nats per token
    grade: str  # "exact", "near-ties", "slight", "loss"


class CandidateSettings(MethodSettings, total=False):
    """The settings that were tried."""

    engine: str  # as in MethodRow; missing for a property set


class _CandidateRow(TypedDict):
    name: str  # the settings in words
    stage: str  # "properties" or "draft length"
    settings: CandidateSettings
    throughput: float | None  # tokens/s, decode only
    speedup: float  # over the main model alone with its defaults; of a property set: of one iteration
    spread: Range | None  # of the speedup; None if it was not in the last rounds
    remeasured: bool  # whether the figures are of new rounds after the choice
    dropped_in_round: str  # the round, or the reason; "" if it was kept


class CandidateRow(_CandidateRow, QualityFigures):
    """A property set or a decoding method that was tried."""


class FailedCandidate(TypedDict):
    """Settings that could not be measured."""

    name: str  # the settings in words
    failed: str  # the reason


class ModelFingerprint(TypedDict):
    """Identifies a model by its weights."""

    folder: str  # its name
    fingerprint: str  # hash of the graph and of samples of the weights


class Recommendation(TypedDict):
    """The content of recommended.json; see speculative/pair/recommendation.py."""

    program: Literal["scripts/tune.py"]
    date: str  # like "2026-11-22"
    use_draft: bool
    best: str  # the fastest of `settings`: "alone", "suffix" or an engine's id
    reason: str  # one sentence
    sentences: list[str]  # all findings
    settings: dict[str, RecommendedSettings]  # by "alone", "suffix" and engine
    quality: QualityFigures  # of the property set of `best`
    main: ModelFingerprint
    draft: ModelFingerprint | None  # None: tuned without one
    measured_on: dict[str, str]  # "openvino_genai": version; full names by device


class ExhaustiveCheck(TypedDict):
    """The choice compared with every setting, by decoding."""

    decoded: int  # number of settings
    choice: str  # the choice, in words
    fastest: str  # the fastest setting, in words
    ratio: float  # speed of the choice / speed of the fastest
    spread: Range  # of the ratio
    rounds: int  # of the finalists
    last: dict[str, float]  # tokens/s of each finalist


class TuneResult(TypedDict):
    """The result of scripts/tune.py."""

    program: Literal["tune"]
    summary: list[str]  # sentences and lines of code
    environment: TuneEnvironment
    rows: list[MethodRow]  # the finalists
    candidates: list[CandidateRow | FailedCandidate]
    recommendation: Recommendation | None  # None if nothing was decoded
    exhaustive: ExhaustiveCheck | None  # None without --exhaustive, or if it did not finish


# ---- scripts/plan_capacity.py ----------------------------------------------------------------------------------------


class CapacityGoals(TypedDict):
    """Goals of a plan."""

    ttft: float  # seconds to the first token
    tpot: float  # seconds per output token after the first
    percentile: float  # of the requests, from 0 to 100; refused ones do not meet the goals


class CapacityWorkload(TypedDict):
    """The simulated requests."""

    arrivals: str  # "Poisson", or the trace file
    prompt_tokens: str  # distribution, as given
    output_tokens: str  # distribution, as given
    acceptance: float | None  # mean probability that a draft token is accepted; None without a draft
    cached: float  # share of a prompt that an earlier request had, too
    turns: int  # requests of a chat; 0: all requests begin alike
    think: float  # seconds between the requests of a chat
    routing: str  # "balanced" or "prefix"
    requests: int  # simulated for each number of replicas
    seed: int  # of the random numbers


class CapacityEnvironment(Environment):
    """The environment of scripts/plan_capacity.py."""

    measured: dict[str, str | int | float | Properties]  # the environment in which the costs were measured


class CapacityRow(TypedDict):
    """A number of replicas at a load, as simulated."""

    rate: float  # requests per second, of all replicas together
    with_draft: bool
    max_num_seqs: int  # maximum batch size of a replica
    replicas: int
    ttft: float | None  # median; None if half of the requests were refused
    ttft_percentile: float | None  # at the percentile of the goals; None if so many requests were refused
    tpot: float | None  # likewise
    tpot_percentile: float | None
    throughput: float  # tokens/s, of all replicas together
    utilisation: float  # share of the time in which a replica runs iterations, from 0 to 1
    batch: float  # mean number of requests in an iteration
    requests: int  # counted
    refused: int  # with a full queue
    cached: float  # share of the prompt tokens from the prefix cache, from 0 to 1
    mean_draft_length: float  # draft tokens of a request per main-model forward pass
    holds: bool  # whether the goals are met


class CapacityPlan(TypedDict):
    """The smallest number of replicas for a rate and settings."""

    rate: float  # requests per second
    with_draft: bool
    max_num_seqs: int
    replicas: int | None  # None: no number of replicas meets the goals
    why_not: str  # reason; "" if there is a number


class CapacityCheck(TypedDict):
    """A row of a load benchmark beside a simulation of the same clients."""

    method: str  # name of the method
    clients: int  # that request at the same time
    throughput: float  # tokens/s, measured
    throughput_simulated: float
    ttft: float | None  # mean, measured
    ttft_simulated: float | None
    tpot: float | None  # mean, measured
    tpot_simulated: float | None
    mean_draft_length: float | None  # measured
    mean_draft_length_simulated: float | None


class CapacityResult(TypedDict):
    """The result of scripts/plan_capacity.py."""

    program: Literal["plan_capacity"]
    summary: list[str]  # sentences
    environment: CapacityEnvironment
    workload: CapacityWorkload
    goals: CapacityGoals
    plans: list[CapacityPlan]
    rows: list[CapacityRow]  # every number of replicas that was simulated
    drafting: list[LoadRow]  # of one replica by number of clients, simulated; empty without a draft
    checks: list[CapacityCheck]  # with --against


# ---- checks: scripts/smoke.py, check_pair.py and verify_lossless.py -------------------------------------------------


class EngineCheck(TypedDict):
    """An engine decoding with the draft."""

    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    block_efficiency: float | None  # new tokens per main-model forward pass after the prompt
    streamed_pieces: int  # of text, for all prompts


class _SmokeVerdict(TypedDict):
    ok: bool  # whether all checks pass
    problems: list[str]  # sentences


class SmokeFailure(_SmokeVerdict):
    """The result of scripts/smoke.py if the pair could not be loaded."""


class SmokeResult(_SmokeVerdict, EngineCheck):
    """The result of scripts/smoke.py; the keys of EngineCheck are GenAI's."""

    engine: EngineCheck  # this project's engine
    draft_length: int  # K
    new_tokens: int  # of all prompts together
    main: str  # folder of the main model
    draft: str  # folder of the draft model
    device: str  # of the main model
    draft_device: str  # of the draft model
    openvino_genai: str  # version


class PairFinding(TypedDict):
    """One finding of scripts/check_pair.py."""

    level: Literal["ok", "warning", "error"]
    what: str  # was checked
    message: str  # the finding, and what to do


class CheckResult(TypedDict):
    """The result of scripts/check_pair.py."""

    sound: bool  # whether there are no errors
    errors: int  # number of findings
    warnings: int  # number of findings
    main: str  # folder of the main model
    draft: str  # folder of the draft model
    device: str  # of the main model
    draft_device: str  # of the draft model
    findings: list[PairFinding]


class TextDifference(TypedDict):
    """First difference of a greedy text from the reference."""

    prompt: int  # number, from 1
    token: int  # new token, from 1
    margin: float  # the main model's logit of the reference's token minus that of the other
    near_tie: bool  # whether rounding explains it


class _Path(TypedDict):
    path: str  # decoding path, like "engine draft, K = 4"
    ours: bool  # whether it is this project's engine
    crashes: int  # number of requests
    acceptance_rate: float | None  # accepted / proposed draft tokens, from 0 to 1
    verdict: str  # in words
    holds: bool  # whether the path passes


class GreedyRow(_Path):
    """Greedy texts compared with the reference's."""

    prompts: int  # number of texts
    same: int  # number of equal texts
    differences: list[TextDifference]


class SampledRow(_Path):
    """Samples of a path; if every request crashed, they are not compared."""

    requests: int  # made
    crash: str  # message of the last crash


class ComparedRow(SampledRow):
    """Samples compared with their exact distribution."""

    draws: int  # samples
    cells: int  # of the distribution
    total_variation: float  # distance from the distribution, from 0 to 1
    noise: float  # expected distance of exact samples
    impossible: int  # samples that have probability 0
    p_value: float  # of the test
    detectable_total_variation: float | None  # distance that would have been detected; None if nothing was compared


class _Sampling(TypedDict):
    do_sample: bool
    temperature: float
    top_p: float


class Sampling(_Sampling, total=False):
    """Of the GenerationConfig."""

    top_k: int


class _LosslessEnvironment(TypedDict):
    """The environment of scripts/verify_lossless.py."""

    main: str  # folder of the main model
    device: str  # of the main model
    properties: Properties  # of both models
    sampling: Sampling
    max_new_tokens: int  # new tokens per greedy text
    draws: int  # samples per path of this project's engine
    genai_draws: int  # samples per path of GenAI
    power: float  # probability of detecting the detectable distance
    tokens: int  # per sample
    cells: int  # of the exact distribution
    seed: int  # of the random numbers
    openvino_genai: str  # version
    python: str  # version
    machine: str  # architecture and cores


class LosslessEnvironment(_LosslessEnvironment, total=False):
    """The environment of scripts/verify_lossless.py."""

    draft: str  # folder of the draft model; missing without one
    draft_device: str  # of the draft model; missing without one
    paths: list[str]  # chosen, of "engine", "genai" and "lookup"; results before version 0.1.0 have all


class LosslessResult(TypedDict):
    """The result of scripts/verify_lossless.py."""

    ok: bool  # whether the engine's paths pass; with --strict GenAI's, too
    reference: str | None  # path whose greedy texts the others are compared with; None if each crashed
    environment: LosslessEnvironment
    greedy: list[GreedyRow]
    sampled: list[SampledRow | ComparedRow]


# ---- all results ----------------------------------------------------------------------------------------------------

Result = (
    BenchmarkResult
    | BatchingResult
    | ServingResult
    | SweepResult
    | SourcesResult
    | SwapResult
    | TuneResult
    | CapacityResult
)
"""The results that scripts/report.py draws: those with `program`, `summary`, `environment` and `rows`."""

RESULTS = {
    "benchmark": BenchmarkResult,
    "benchmark_batching": BatchingResult,
    "benchmark_serving": ServingResult,
    "benchmark_costs": CostsResult,
    "sweep_draft_length": SweepResult,
    "compare_sources": SourcesResult,
    "device_swap": SwapResult,
    "tune": TuneResult,
    "plan_capacity": CapacityResult,
    "smoke": SmokeResult | SmokeFailure,
    "check_pair": CheckResult,
    "verify_lossless": LosslessResult,
}
"""The type of each program's result, by the program's name in scripts/ without ".py"."""


Drawn = Mapping[str, Any]
"""A result, or a row of one, as the report reads it: of any program, and perhaps of an earlier version, so that any key
may be missing."""


class RecordedResult(TypedDict):
    """A file in docs/figures, written by scripts/figures.py."""

    name: str  # of the file
    command: str  # that printed the result
    commit: str  # of this project
    machine: Machine
    minutes: float  # that the command took
    output: list[str]  # lines printed before the result
    result: Result | CostsResult | SourcesResult | LosslessResult
