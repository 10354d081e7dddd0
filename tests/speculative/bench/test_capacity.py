"""The simulated replica against arithmetic and against the batch decoder; properties of a simulated cluster."""

import dataclasses
import itertools
import time
import types

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino_genai import GenerationConfig

from speculative.batch_decoder import BatchDecoder
from speculative.bench.capacity.cluster import MAX_SIMULATED, ROUTINGS, ClosedLoop, serve
from speculative.bench.capacity.costs import Costs, Draft, ModelCosts, Outside, median
from speculative.bench.capacity.measuring import DraftPass, Iteration, draft_while_decoding, drafts_of, outside_of
from speculative.bench.capacity.planner import Goals, Planner, break_even_point, percentiles
from speculative.bench.capacity.replica import PIECE_SECONDS, Replica, Settings, SimulatedRequest
from speculative.bench.capacity.sharing import ServerCosts, SharedCores
from speculative.bench.capacity.workload import Workload, answer_drafts, lengths, read_trace
from speculative.drafting.batch_policy import BatchDraftLength
from speculative.models import cached_model
from speculative.models.batch_model import BatchModel
from speculative.models.block_pool import BlockPool
from speculative.models.spec import ModelSpec
from speculative.serving.engine.engine_thread import PIECE_INTERVAL
from tests.support.paths import DRAFT, MAIN

LARGE = ModelCosts({1: 0.1, 4: 0.12, 16: 0.2, 64: 0.6, 256: 2.2})
SMALL = ModelCosts({1: 0.006, 16: 0.01, 64: 0.03}, further={1: 0.005, 16: 0.01, 64: 0.03})
COSTS = Costs(LARGE, SMALL, Outside(0.001, 0.0003, 0.0002, 0.0001, 0.001))
SHORT = Workload(lengths("40"), lengths("24"), 0.7)
RIGHT, WRONG = Draft([0.9], 1), Draft([0.9], 0)


class Always(BatchDraftLength):
    """Drafts K tokens for each request and learns no costs."""

    def __init__(self, costs, k):
        policy = costs.policy()
        super().__init__(policy.main, policy.draft, policy.draft_further)
        for curve in (self.main, self.draft, self.draft_further):
            curve.update = lambda *_: None
        self.k = k

    def choose(self, estimates, tokens, anyway, forced=False):
        super().choose(estimates, tokens, anyway, forced)
        return [i for i, estimate in enumerate(estimates) if estimate.drafted < self.k]


def alone(costs, request, with_draft=False, policy=None):
    """Simulate one request on an idle replica."""
    environment = simpy.Environment()
    environment.run(Replica(environment, costs, Settings(with_draft), policy).submit(request))
    return request


def test_policy_begins_with_the_costs_that_the_engine_measures():
    """Up to 64 tokens. It decides how many prompt tokens join a forward pass by extrapolated costs of longer ones."""
    main = ModelCosts({1: 0.1, 48: 0.5, 64: 0.6, 256: 9.0})
    curve = Costs(main, SMALL).policy().main
    assert [curve(n) for n in (1, 48, 64)] == pytest.approx([0.1, 0.5, 0.6])
    assert curve(256) == pytest.approx(0.6 + 192 * 0.1 / 16)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_request_takes_the_sum_of_its_costs():
    """600 prompt tokens are read in passes over 256, 256 and 88 tokens; only the last has logits, of one token."""
    main = ModelCosts({1: 0.011, 256: 0.266}, 0.0001, change=0.002, context=1e-5, attention=1e-6)
    got = alone(Costs(main, outside=Outside(0.003, 0.0005, 9.0, 9.0, 0.02)), SimulatedRequest(600, 10))
    outside, three = 0.0035, (0.266 - 0.0256, 0.266 - 0.0256, 0.098 - 0.0087)
    over_context = 1e-5 * (256 + 512) + 1e-6 * (256 * 256 + 512 * 88)
    # the first pass, and the third, have another size
    ttft = 0.02 + sum(three) + over_context + 2 * 0.002 + 3 * outside
    decoding = sum(0.011 + 1.1e-5 * (600 + generated) + outside for generated in range(1, 10)) + 0.002
    assert got.first == pytest.approx(ttft) and got.end == pytest.approx(ttft + decoding)


def test_request_with_a_draft_takes_the_sum_of_its_costs():
    """Prefill yields 1 token; then 2 of 3 draft tokens are accepted three times: 1 + 3 * 3 tokens. The draft's forward
    passes are over 22 tokens, and then over 1 each."""
    costs = Costs(
        ModelCosts({1: 0.11, 64: 0.74}), ModelCosts({1: 0.02, 64: 0.65}, change=0.004, further={1: 0.011, 64: 0.641}),
        Outside(0.001, 0.01, 0.0002, 0.0001),
    )  # fmt: skip
    request = SimulatedRequest(20, 11, drafts=[RIGHT, *[RIGHT, RIGHT, WRONG] * 4])
    got = alone(costs, request, True, Always(costs, 3))
    prompt = 0.1 + 0.01 * 20 + 0.01 + 0.001
    reading = 0.01 + 0.01 * 22  # the draft reads the prompt, too: 21 tokens, padded to 22
    drafting = 2 * (0.001 + 0.01) + 3 * 0.0003
    main = 0.1 + 0.04 + 0.011
    others = 2 * (0.02 + drafting + main)
    last = 0.11 + 0.011  # a single token is left: none is drafted
    assert got.end == pytest.approx(prompt + reading + drafting + main + others + last + 2 * 0.004)
    assert (got.proposed, got.accepted, got.iterations) == (9, 6, 4)


def test_draft_pass_after_full_acceptance_has_two_tokens():
    costs = Costs(ModelCosts({1: 0.1}), ModelCosts({1: 0.01, 64: 0.64}))
    read = []
    recorded = dataclasses.replace(costs, draft=recording(costs.draft, read))
    alone(recorded, SimulatedRequest(8, 20, drafts=[RIGHT] * 20), True, Always(costs, 2))
    assert read[:5] == [9, 1, 2, 1, 2]


def recording(model, into):
    """The costs of a model that also record the tokens of its forward passes."""
    recorded = types.SimpleNamespace(**{name: getattr(model, name) for name in ("passes", "further")})
    recorded.seconds = lambda tokens, *others, **named: into.append(tokens) or model.seconds(tokens, *others, **named)
    return recorded


# ---- the engine -----------------------------------------------------------------------------------------------------


def test_simulated_passes_match_the_batch_decoder():
    """Five requests, two at a time, with prompts that do not fit in one pass, and three draft tokens each."""
    models = [BatchModel(cached_model.load(ModelSpec(one), capacity=2048), share=False) for one in (MAIN, DRAFT)]
    decoder = BatchDecoder(*models, Always(COSTS, 3))
    random, main, draft = np.random.default_rng(0), [], []
    for model, passes in ((decoder.main, main), (decoder.draft, draft)):
        logits = model.logits
        model.logits = lambda parts, logits=logits, passes=passes: (
            passes.append(sum(part.missing for part in parts)) or logits(parts)
        )
    sizes = [(300, 20), (30, 9), (270, 12), (5, 30), (700, 4)]
    waiting = [(random.integers(1, 500, prompt), GenerationConfig(max_new_tokens=output)) for prompt, output in sizes]
    for _, config in waiting:
        config.ignore_eos = True
    requests = []
    while waiting or decoder.has_unfinished_requests:
        while waiting and sum(not request.finished for request in requests) < 2:
            requests.append(decoder.add_request(*waiting.pop(0)))
        decoder.step()
    results = [request.result for request in requests]

    seen_main, seen_draft = [], []
    costs = dataclasses.replace(COSTS, main=recording(LARGE, seen_main), draft=recording(SMALL, seen_draft))
    environment = simpy.Environment()
    replica = Replica(environment, costs, Settings(max_num_seqs=2), Always(COSTS, 3))
    done = [
        replica.submit(SimulatedRequest(prompt, output, drafts=drafts_in(result)))
        for (prompt, output), result in zip(sizes, results, strict=True)
    ]
    environment.run(simpy.AllOf(environment, done))
    assert seen_main == main
    assert seen_draft == draft
    assert len(set(main)) > 5 and sum(map(sum, (result.accepted for result in results)))


def drafts_in(result):
    """A draft token at each position of the output, accepted or not as in this result."""
    drafts = [WRONG]  # the token of the prompt's forward pass
    for gained, accepted in zip(result.gained, result.accepted, strict=True):
        drafts += [RIGHT] * accepted + [WRONG] * (gained - accepted)
    return drafts


# ---- properties -----------------------------------------------------------------------------------------------------

WORKLOADS = st.builds(
    Workload,
    st.sampled_from(["5", "uniform:1:700", "exponential:60"]).map(lengths),
    st.sampled_from(["1", "2", "uniform:1:20"]).map(lengths),
    st.sampled_from([0.0, 0.6, 1.0]),
    cached=st.sampled_from([0.0, 0.5, 1.0]),
    turns=st.sampled_from([0, 3]),
)


@settings(max_examples=25, deadline=None)
@given(WORKLOADS, st.integers(1, 3), st.sampled_from(["balanced", "prefix"]), st.booleans(), st.integers(0, 99))
def test_every_request_is_answered_or_rejected(workload, replicas, router, with_draft, seed):
    tight = Settings(with_draft, max_num_seqs=2, max_queue=3, cache_tokens=640)
    served = serve(COSTS, tight, replicas, workload, 8.0, 30, router, seed)
    assert len(served.requests) == 21  # without the first and the last ones
    for one in served.requests:
        if one.refused:
            assert one.end == one.sent and not one.first
        else:
            assert one.sent < one.first <= one.end <= served.seconds and one.generated == one.output
            assert 0 <= one.cached < one.prompt and one.prefilled == one.prompt
            assert one.accepted <= one.proposed and one.accepted + one.iterations == one.output - 1
    assert 0 < served.utilisation <= 1 and 1 <= served.batch <= 2


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_more_replicas_do_not_raise_the_ttft(seed, with_draft):
    p95 = [
        np.quantile(serve(COSTS, Settings(with_draft), n, SHORT, 3.0, 50, "balanced", seed).ttft(), 0.95)
        for n in (1, 2, 4, 20)
    ]
    assert all(more <= 1.15 * fewer for fewer, more in itertools.pairwise(p95)), p95


def test_same_seed_gives_same_result_and_another_seed_does_not():
    runs = [serve(COSTS, Settings(), 2, SHORT, 2.0, 30, "balanced", seed).ttft() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_full_queue_rejects_requests_which_miss_the_goals():
    planner = Planner(COSTS, SHORT, Goals(9.0, 9.0), count=60)
    row = planner.row(100.0, Settings(max_num_seqs=1, max_queue=1), 1)
    assert row["refused"] > 0.7 * row["requests"] and row["ttft_percentile"] is None and not row["holds"]


def test_rejected_requests_add_no_throughput():
    planner, settings = Planner(COSTS, SHORT, Goals(9.0, 9.0), count=60), Settings(max_num_seqs=1, max_queue=1)
    row = planner.row(2.0, settings, 1)
    full = planner.closed_loop(settings, [1], "", 300.0).rounds[1][0].throughput
    assert row["refused"] > 0.5 * row["requests"] and row["throughput"] == pytest.approx(full, rel=0.1)


# ---- drafting -------------------------------------------------------------------------------------------------------


def test_drafts_that_are_never_accepted_do_not_help():
    never, always = (
        Planner(COSTS, dataclasses.replace(SHORT, acceptance=acceptance), Goals(1, 1)).drafting(
            Settings(max_num_seqs=4)
        )
        for acceptance in (0.0, 1.0)
    )
    assert break_even_point(never, 24)[0] == 1 and break_even_point(always, 24) is None
    assert all(0.7 < row["speedup"] < 1.0 for row in never if row["speedup"])
    assert next(row for row in always if row["speedup"])["speedup"] > 2


def test_break_even_load_is_in_requests():
    alone = [{"clients": n, "throughput": 48.0 * n, "speedup": None} for n in (1, 2, 4)]
    draft = [{"clients": n, "throughput": 0.0, "speedup": speedup} for n, speedup in ((1, 1.5), (2, 1.0), (4, 0.8))]
    assert break_even_point(alone + draft, output=24) == (2, 4.0)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_measured_drafts_are_those_of_the_batch_decoder(k):
    """Drafts of `k` tokens are accepted in the simulation as in the engine, and the draft is as confident in them."""
    specs = [ModelSpec(one, "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"}) for one in (MAIN, DRAFT)]
    models = [BatchModel(cached_model.load(spec, capacity=256), share=False) for spec in specs]
    decoder, tokens = BatchDecoder(*models, Always(COSTS, k)), 40
    random = np.random.default_rng(3)
    prompts = [random.integers(1, 500, 8) for _ in range(3)]
    accepted = 0
    for prompt in prompts:
        request = decoder.add_request(prompt, GenerationConfig(max_new_tokens=tokens, ignore_eos=True))
        confidences = recording_confidences(request.policy)
        while decoder.has_unfinished_requests:
            decoder.step()
        drafts = drafts_of(decoder, prompt, tokens)
        assert len(drafts) == tokens - 2
        simulated = SimulatedRequest(len(prompt), tokens, drafts=[*drafts[:1], *drafts])
        policy = Always(COSTS, k)
        estimate = policy.estimate()
        policy.estimate = lambda estimate=estimate: estimate
        of_simulation = recording_confidences(estimate)
        alone(COSTS, simulated, True, policy)
        assert of_simulation == pytest.approx(confidences, abs=0.006) and len(set(confidences)) > 9
        real = request.result.accepted, request.result.proposed
        assert (simulated.accepted, simulated.proposed, simulated.iterations) == (*map(sum, real), len(real[0]))
        accepted += simulated.accepted
    assert accepted and not decoder.has_unfinished_requests and decoder.has_room(250)


def recording_confidences(estimate):
    """The confidences that this estimate is given from now on."""
    confidences, draft = [], estimate.draft
    estimate.draft = lambda confidence: confidences.append(confidence) or draft(confidence)
    return confidences


def test_no_draft_is_measured_without_room_or_a_draft_model():
    main, draft = (BatchModel(cached_model.load(ModelSpec(one), capacity=64), share=False) for one in (MAIN, DRAFT))
    ids = np.arange(1, 9)
    assert drafts_of(BatchDecoder(main, None, COSTS.policy()), ids, 9) == []
    while main.has_room(64):
        main.slot(64)
    assert drafts_of(BatchDecoder(main, draft, COSTS.policy()), ids, 56) == []


def test_draft_longer_than_the_measured_one_continues_with_the_next():
    drafts = [Draft([0.9, 0.8], 2), Draft([0.1], 0), Draft([0.7, 0.6], 1), Draft([0.5], 0)]
    request = SimulatedRequest(8, 9, drafts=drafts)
    assert [request.verdict(i) for i in range(4)] == [(0.9, True), (0.8, True), (0.7, True), (0.6, False)]
    request.generated = 1
    assert [request.verdict(i) for i in range(3)] == [(0.1, False), (0.7, True), (0.6, False)]


def test_drafting_ends_where_the_draft_model_proposes_nothing():
    """After one token in the first iteration, before any in the second."""
    nothing = Draft([], 0)
    request = SimulatedRequest(8, 6, drafts=[RIGHT, RIGHT, nothing, nothing, RIGHT, RIGHT])
    alone(COSTS, request, True, Always(COSTS, 3))
    assert (request.proposed, request.accepted, request.iterations) == (2, 2, 3)


def test_measured_drafts_keep_their_order():
    texts = [[Draft([0.5], 1), Draft([0.4], 0)], [Draft([0.9], 1)]]
    random = np.random.default_rng(0)
    drawn = [answer_drafts(texts, 3, random) for _ in range(50)]
    assert all(len(text) >= 3 for text in drawn)
    pairs = {(one.confidences[0], other.confidences[0]) for text in drawn for one, other in itertools.pairwise(text)}
    assert (0.5, 0.9) not in pairs and (0.5, 0.4) in pairs
    accepted = [one.accepted for one in answer_drafts(0.3, 20_000, random)]
    assert np.mean(accepted) == pytest.approx(0.3, abs=0.02)


def test_measured_text_belongs_to_its_prompt():
    texts = [[Draft([0.5], 1), Draft([0.4], 0)], [Draft([0.9], 1)] * 9]
    workload, random = Workload([20, 30], lengths("6"), texts), np.random.default_rng(0)
    for number, prompt in ((4, 20), (7, 30)):
        request = workload.numbered(number, random)
        of_text = [texts[number % 2][0], *texts[number % 2]][:6]  # the first token of an answer is not drafted
        assert request.prompt == prompt and request.drafts[: len(of_text)] == of_text and len(request.drafts) >= 6


def test_prompt_whose_text_was_not_measured_takes_drafts_of_others():
    workload = Workload([20, 30], lengths("6"), [[], [Draft([0.9], 1)] * 9])
    request = workload.numbered(4, np.random.default_rng(0))
    assert request.prompt == 20 and len(request.drafts) >= 6 and all(one == Draft([0.9], 1) for one in request.drafts)


# ---- prefixes -------------------------------------------------------------------------------------------------------


def test_cached_prefixes_shorten_ttft_and_prefix_routing_finds_them():
    chats = Workload(lengths("512"), lengths("8"), 0.5, cached=0.75, turns=8)
    cold = Planner(COSTS, dataclasses.replace(chats, cached=0.0), Goals(9, 9), count=200)
    found = {name: Planner(COSTS, chats, Goals(9, 9), name, count=200) for name in ("balanced", "prefix")}
    plain = Settings(with_draft=False)
    rows = {name: planner.row(0.4, plain, 8) for name, planner in found.items()} | {"cold": cold.row(0.4, plain, 8)}
    assert rows["cold"]["cached"] == 0 < rows["balanced"]["cached"] < 0.5 * rows["prefix"]["cached"]
    assert rows["prefix"]["ttft"] < 0.6 * rows["cold"]["ttft"]
    many = found["balanced"].row(3.2, plain, 64)["cached"], found["prefix"].row(3.2, plain, 64)["cached"]
    assert many[0] < 0.6 * rows["balanced"]["cached"] and many[1] == pytest.approx(rows["prefix"]["cached"], abs=0.1)


def test_prefix_shared_by_all_requests_is_found_on_every_replica():
    same = Workload(lengths("512"), lengths("8"), 0.5, cached=0.75)
    row = Planner(COSTS, same, Goals(9, 9), count=50).row(4.0, Settings(), MAX_SIMULATED + 4)
    assert row["cached"] == pytest.approx(0.75)


def test_shared_block_counts_once_and_stays_while_in_use():
    """As in the engine's pool of blocks: 12 blocks for each request, of which all but 8 are shared."""
    environment = simpy.Environment()
    replica = Replica(environment, COSTS, Settings(with_draft=False, cache_tokens=30 * 32))
    pool, tokens = BlockPool(30, 32), np.arange(320)
    fitting, tables = [], []
    for seconds in (4.0, 1.0, 1.0, 1.0):  # time for a prefill
        fitting.append(pool.has_room(384))
        if fitting[-1]:
            tables.append(pool.reserve(384))
            tables[-1].match_prefix(tokens[:256])
            tables[-1].blocks(320)
            tables[-1].cache_full_blocks(tokens[:256])
        before = len(replica.running)
        replica.submit(SimulatedRequest(320, 64, shared=256))
        environment.run(until=environment.now + seconds)
        assert (len(replica.running) > before) == fitting[-1]
        assert replica._reserved() == pool.reserved * 32
    assert fitting == [True, True, True, False]


def test_prefix_routing_balances_without_common_prefixes():
    rows = [Planner(COSTS, SHORT, Goals(9, 9), name, count=200).row(9.0, Settings(), 8) for name in ROUTINGS]
    assert rows[0] == rows[1]


# ---- shared cores ---------------------------------------------------------------------------------------------------

SERVER = ServerCosts(cores=2.0, threads=2, idle=0.1, request=0.02, piece=0.001, latency=0.015)
BOTH = 2  # servers run in benchmark_serving.py


def test_server_costs_are_fitted_from_processor_times():
    rows = []
    for seconds, requests, pieces in ((10, 20, 400), (10, 60, 900), (20, 30, 2000), (10, 90, 2500)):
        used = BOTH * 0.2 * seconds + 0.02 * requests + 0.001 * pieces
        time = {"seconds": seconds, "requests": requests, "pieces": pieces, "servers": used - 0.1, "clients": 0.1}
        rows.append({"processor_time": time})
    facts = {"cores": 4, "replicas": 2, "threads": 2, "round_trip": 0.015}
    found = ServerCosts.of({"environment": facts, "rows": [*rows, {}]})
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(SERVER))
    with pytest.raises(ValueError, match=r"benchmark_serving\.py"):
        ServerCosts.of({"environment": facts, "rows": [{}]})
    with pytest.raises(ValueError, match="no processor times"):
        ServerCosts.of({"environment": {"cores": 4}, "rows": rows})


def test_server_costs_are_never_negative():
    """Least squares alone would find -0.1 processor seconds for each request."""
    rows = [
        {"processor_time": {"seconds": 1, "requests": n, "pieces": 10 * n, "servers": 5 - 0.1 * n, "clients": 0}}
        for n in (1, 4, 16)
    ]
    found = ServerCosts.of({"environment": {"cores": 2, "replicas": 1, "threads": 1, "round_trip": 0}, "rows": rows})
    assert found.idle == pytest.approx(4.3 / BOTH) and found.request == found.piece == 0


def test_server_work_slows_down_busy_replicas():
    environment = simpy.Environment()
    cores = SharedCores(environment, SERVER, replicas=2)
    assert cores.slowdown("one") == cores.slowdown("one") == 1.0  # 2 of 4 cores
    assert cores.slowdown("other") == pytest.approx(4 / 3.8)
    cores.use(requests=10, pieces=100)  # 0.3 processor seconds, over half a second
    assert cores.slowdown("one") == pytest.approx(4 / 3.2)
    environment.run(until=60)
    assert cores.slowdown("one") == pytest.approx(4 / 3.8)
    cores.use(requests=10_000)
    assert cores.slowdown("one") == pytest.approx(10)
    cores.leave("one")
    assert cores.slowdown("other") == pytest.approx(5)


def test_idle_servers_take_cores_too():
    """The other one of a benchmark of two servers. A planned cluster has only one."""
    both = dataclasses.replace(SERVER, servers=BOTH)
    one, other = (SharedCores(simpy.Environment(), costs, replicas=2) for costs in (SERVER, both))
    for cores in (one, other):
        cores.slowdown("one")
    assert one.slowdown("two") == pytest.approx(4 / 3.8) and other.slowdown("two") == pytest.approx(4 / 3.6)


def test_request_takes_longer_on_shared_cores_and_through_a_server():
    slow = dataclasses.replace(COSTS, server=dataclasses.replace(SERVER, idle=1.0, request=0, piece=0))  # half the time
    shared, own = (ClosedLoop(costs, Settings(False), SHORT, 0).run(1, 20.0, 0) for costs in (slow, COSTS))
    assert shared.answers[0].ttft == pytest.approx(0.015 + 2 * own.answers[0].ttft)
    assert shared.answers[0].tpot == pytest.approx(2 * own.answers[0].tpot)
    assert shared.throughput < 0.52 * own.throughput
    open_loop = serve(slow, Settings(False), 1, SHORT, 0.0001, 5, "balanced", 0)
    assert open_loop.ttft() == pytest.approx([shared.answers[0].ttft] * len(open_loop.requests))


def test_text_is_streamed_in_as_many_chunks_as_by_the_server():
    assert PIECE_SECONDS == PIECE_INTERVAL
    environment = simpy.Environment()
    cores = SharedCores(environment, dataclasses.replace(SERVER, request=0.0), replicas=1)
    used = []
    cores.use = lambda requests, pieces: used.append((round(environment.now, 4), requests, pieces))
    replica = Replica(environment, Costs(ModelCosts({1: 0.015})), Settings(False), cores=cores)
    environment.run(replica.submit(SimulatedRequest(1, 6)))  # a token each 0.015 s, with two cores for two threads
    assert len(used) == 3 and [pieces for _, _, pieces in used] == [1] * 3  # tokens 1, 4 and 6
    assert [requests for _, requests, _ in used] == [1, 0, 0]
    assert not cores._busy


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plan_is_the_smallest_number_of_replicas():
    planner = Planner(COSTS, SHORT, Goals(1.5, 0.25), count=80)
    for with_draft in (False, True):
        plan = planner.plan(2.0, Settings(with_draft))
        n = plan.choice["replicas"]
        assert [row["replicas"] for row in plan.rows] == sorted({row["replicas"] for row in plan.rows})
        assert n == 1 or not planner.row(2.0, Settings(with_draft), n - 1)["holds"]


def test_plan_sustains_its_load_even_in_a_short_simulation():
    """In a very short simulation, requests have no time to miss their goal, however few the replicas are."""
    planner, settings = Planner(COSTS, SHORT, Goals(20.0, 9.0), count=50), Settings(with_draft=False, max_num_seqs=4)
    full = planner.closed_loop(settings, [4], "").rounds[4][0].throughput
    for rate in (10.0, 60.0, 9.5 * full / SHORT.output.parameters[0]):  # nine replicas have no time to fall behind
        least = rate * SHORT.output.parameters[0] / full
        choice = planner.plan(rate, settings).choice
        assert least / 1.02 <= choice["replicas"] <= 1.25 * least + 1
        assert choice["throughput"] == pytest.approx(rate * SHORT.output.parameters[0], rel=0.1)
    overloaded = planner.row(rate, settings, 1)
    assert overloaded["throughput"] == pytest.approx(full, rel=0.1) and not overloaded["holds"]


def test_plan_that_needs_too_many_replicas_reports_it():
    plan = Planner(COSTS, SHORT, Goals(9.0, 9.0), count=20).plan(1e8, Settings(False))
    assert plan.choice is None and "more than 1,000,000" in plan.why_not


def test_unreachable_percentile_ends_the_search():
    """With the goal between the percentile of a lone request and that of the load, no number of replicas helps."""
    workload = Workload(lengths("lognormal:40:1"), lengths("8"), 0.7)
    planner, settings = Planner(COSTS, workload, Goals(9.0, 9.0), count=40), Settings(with_draft=False)
    idle = planner.row(0.001, settings, 1)["ttft_percentile"]
    failed = 0
    for goal in (0.1 * idle, 0.3 * idle, 0.5 * idle, 0.7 * idle, 0.9 * idle, 0.97 * idle, 0.99 * idle):
        planner.goals = Goals(goal, 9.0)
        plan = planner.plan(1.0, settings)
        failed += plan.choice is None
        assert plan.choice or ("TTFT" in plan.why_not and len(plan.rows) < 60), goal
    assert failed


def test_every_goal_has_to_be_met():
    planner = Planner(COSTS, SHORT, Goals(9.0, 9.0), count=500)
    row = planner.row(1.0, Settings(with_draft=False), 1)
    assert row["holds"]
    for goals in (Goals(0.9 * row["ttft_percentile"], 9.0), Goals(9.0, 0.9 * row["tpot_percentile"])):
        planner.goals = goals
        assert not planner.row(1.0, Settings(with_draft=False), 1)["holds"]


def test_percentile_between_two_requests_is_that_of_the_slower_one():
    assert percentiles([1.0, 2.0, 3.0, 4.0], 95) == (3.0, 4.0)


def test_unreachable_goals_are_named():
    why = [Planner(COSTS, SHORT, goals).plan(1.0, Settings()).why_not for goals in (Goals(0.1, 9), Goals(9, 0.01))]
    assert "TTFT" in why[0] and "TPOT" in why[1]
    assert "do not fit" in Planner(COSTS, SHORT, Goals(9, 9)).plan(1.0, Settings(cache_tokens=30)).why_not


def test_requests_that_do_not_fit_have_no_break_even_load():
    assert Planner(COSTS, SHORT, Goals(9, 9)).drafting(Settings(cache_tokens=30)) == []
    assert Planner(COSTS, SHORT, Goals(9, 9)).drafting(Settings(max_num_seqs=2)) != []


def test_cache_size_is_rounded_to_whole_blocks():
    workload = Workload(lengths("900"), lengths("100"), 0.7)
    [plan] = [Planner(COSTS, workload, Goals(99, 9), count=20).plan(0.01, Settings(max_num_seqs=1, cache_tokens=1000))]
    assert plan.rows and not plan.why_not


def test_closed_loop_clients_send_same_requests_for_any_settings():
    workload = Workload(lengths("lognormal:40:1"), lengths("uniform:8:60"), 0.7)
    sent = []
    for setting in (Settings(False), Settings(True, max_num_seqs=2)):
        loop = ClosedLoop(COSTS, setting, workload, 0)
        spans = [loop.run(clients, 40.0, 0).answers for clients in (1, 4)]
        sent.append([{answer.number: answer.tokens for answer in answers} for answers in spans])
    for first, second in zip(*sent, strict=True):
        common = first.keys() & second.keys()
        assert len(common) > 5 and all(first[number] == second[number] for number in common)
    assert sent[0][0] != sent[0][1]


def test_closed_loop_clients_wait_for_their_responses():
    loop = ClosedLoop(COSTS, Settings(), SHORT, 0)
    span = loop.run(3, 20.0, 7)
    assert (
        len({answer.number for answer in span.answers}) == len(span.answers)
        and min(answer.number for answer in span.answers) == 7
    )
    for at in np.linspace(0, 19.9, 50):
        assert sum(answer.sent <= at < answer.end for answer in span.answers) <= 3


def test_without_latency_a_clients_next_request_joins_next_iteration():
    """As in benchmark_batching.py, which adds a request as soon as one has ended; each iteration takes 0.1 s."""
    costs, workload = Costs(ModelCosts({1: 0.1, 256: 0.1})), Workload(lengths("8"), lengths("uniform:2:9"), 0.0)
    answers = ClosedLoop(costs, Settings(with_draft=False), workload, 0).run(4, 5.0, 0).answers
    assert len(answers) > 20 and all(answer.ttft == pytest.approx(0.1) for answer in answers)


# ---- costs and workloads --------------------------------------------------------------------------------------------


def recorded(iterations, arrivals):
    """A recorder of `iterations` and of requests that took these times to add."""
    return types.SimpleNamespace(iterations=iterations, arrivals=arrivals, tokenizing=[0.001 + one for one in arrivals])


def test_overheads_are_fitted_from_iterations():
    random, found = np.random.default_rng(0), []
    for i, (requests, rounds) in enumerate(random.integers((1, 0), (16, 4), (400, 2)).tolist()):
        prompts = i % 3 % 2
        beyond = 0.002 + 0.0007 * requests + 0.0003 * rounds + 0.0001 * requests * rounds + 0.0005 * prompts
        beyond += random.normal(0, 1e-5) + (i % 20 == 0)  # sometimes a second
        expected = 0.001 * (1 + i % 7)
        size = next(n for n in (16, 8, 4, 1) if requests > {16: 11, 8: 5, 4: 2, 1: 0}[n])
        main = expected * (1.3 if prompts else 1.4 if rounds else 1.1) * (1 + size / 100) + (i % 19 == 0)
        found.append(Iteration(beyond, requests, rounds, requests * rounds, prompts, main, expected))
    outside = outside_of([recorded(found, [0.001, 0.002, 0.5])])
    numbers = [getattr(outside, one.name) for one in dataclasses.fields(Outside)][:7]
    assert numbers == pytest.approx([0.002, 0.0007, 0.0003, 0.0001, 0.002, 0.0005, 0.003], rel=0.05)
    for factors, factor in ((outside.plain_factors, 1.1), (outside.draft_factors, 1.4), (outside.prompt_factors, 1.3)):
        assert factors == pytest.approx({size: factor * (1 + size / 100) for size in (1, 4, 8, 16)}, rel=0.01)


def test_factor_of_a_pass_kind_without_measurements_is_one():
    found = [Iteration(0.001, 1, 0, 0, 0, 0.012, 0.01)] * 5 + [
        Iteration(0.001, 1, 0, 0, 1, 0.5 * i, 0.01) for i in (1, 2)
    ]
    outside = outside_of([recorded(found, [0.001])])
    assert outside.plain_factors == pytest.approx(dict.fromkeys((1, 4, 8, 16), 1.2))
    assert set(outside.draft_factors.values()) == {1.0} and outside.prompt_factors[1] > 10
    nothing = [Iteration(0.001, 1, 0, 0)]
    assert outside_of([recorded(nothing, [0.001])]).plain_factors[1] == 1.0


def test_prompts_and_slow_pass_factors_lengthen_a_request():
    """Two requests: a pass of their prompts, and one for their second tokens, of 0.1 s each. Two sequences are half as
    far from one as from four, by ratio."""
    outside = Outside(prompt=0.01, plain_factors={1: 1.1, 4: 1.3}, prompt_factors={1: 1.5})
    environment = simpy.Environment()
    replica = Replica(environment, Costs(ModelCosts({1: 0.1, 64: 0.1}), outside=outside), Settings(with_draft=False))
    requests = [SimulatedRequest(20, 2), SimulatedRequest(20, 2)]
    environment.run(simpy.AllOf(environment, [replica.submit(request) for request in requests]))
    first = 0.15 + 2 * 0.01
    assert [(got.first, got.end) for got in requests] == [pytest.approx((first, first + 0.12))] * 2


def test_requests_of_one_thread_are_sent_one_after_another():
    """Each is tokenized, sent and added before the next one; a pass over their prompts takes 0.1 s."""
    costs = Costs(ModelCosts({1: 0.1, 64: 0.1}), outside=Outside(arrival=0.01, tokenize=0.02))
    ttft = {}
    for in_process in (True, False):
        environment = simpy.Environment()
        replica = Replica(environment, costs, Settings(with_draft=False, in_process=in_process))
        requests = [SimulatedRequest(20, 1) for _ in range(3)]
        environment.run(simpy.AllOf(environment, [replica.submit(request) for request in requests]))
        ttft[in_process] = [request.first - request.sent for request in requests]
    assert ttft[True] == pytest.approx([0.17, 0.14, 0.11])
    assert ttft[False] == pytest.approx([0.13] * 3)  # a server tokenizes on another thread, before
    assert costs.latency == 0.02


def test_slower_draft_passes_while_decoding_are_fitted():
    alone, passes = ModelCosts({1: 0.001, 64: 0.064}, further={1: 0.0005, 64: 0.032}), []
    for n, changed, further in itertools.product((1, 2, 7, 40), (False, True), (False, True)):
        longer = 0.0002 + 0.0001 * further + 0.003 * changed
        passes.append(DraftPass(n, alone.seconds(n, n, further=further) + longer, changed, further))
    found = draft_while_decoding(alone, passes)
    assert found.change == pytest.approx(0.003)
    assert found.passes == pytest.approx({1: 0.0012, 64: 0.0642})
    assert found.further == pytest.approx({1: 0.0008, 64: 0.0323})


def test_no_draft_pass_costs_less_than_the_shortest_measured():
    """While decoding, it took a fifth of that: without a limit, a pass over one token would count as 0 s."""
    alone = ModelCosts({1: 0.004, 64: 0.1})
    passes = [DraftPass(64, 0.02, changed, further) for changed in (False, True) for further in (False, True)]
    found = draft_while_decoding(alone, passes)
    assert found.passes == found.further == pytest.approx({1: 0.02, 64: 0.02})


def test_several_starts_are_combined_by_medians():
    def start(seconds):
        main = ModelCosts({1: seconds, 4: 2 * seconds}, sequence=seconds / 10)
        return Costs(main, SMALL, Outside(seconds), [{1: [RIGHT]}], [8], outside_alone=Outside(seconds / 2))

    found = median([start(0.1), start(0.5), start(0.2)])
    assert found == start(0.2)
    assert found.main.seconds(4, 4, sequences=3) == pytest.approx(0.4 + 2 * 0.02)
    assert median([dataclasses.replace(start(1.0), draft=None)]).draft is None


def test_main_model_alone_has_no_draft_overhead():
    costs = Costs(ModelCosts({1: 0.1}), SMALL, Outside(0.05), [{1: [WRONG] * 9}], [9], outside_alone=Outside(0.01))
    found = alone(costs, SimulatedRequest(1, 4))
    assert found.end == pytest.approx(4 * 0.11)


@pytest.mark.parametrize(("text", "mean"), [("7", 7), ("uniform:10:20", 15), ("exponential:50", 50)])
def test_lengths_have_their_mean(text, mean):
    random = np.random.default_rng(0)
    assert np.mean([lengths(text).draw(random) for _ in range(4000)]) == pytest.approx(mean, rel=0.05)


def test_lognormal_lengths_have_their_median():
    random = np.random.default_rng(0)
    assert np.median([lengths("lognormal:500:1.0").draw(random) for _ in range(4000)]) == pytest.approx(500, rel=0.1)


TRACES = {
    "json": """
{"arrival": 5, "prompt_tokens": 10, "output_tokens": 2}

{"arrival": 6.5, "prompt_tokens": 7, "output_tokens": 1}
""",
    "azure": """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,10,2
2023-11-16 18:15:48.1805900,7,1
""",
    "burstgpt": """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,10,2,12,Conversation log
5.5,ChatGPT,9,0,9,API log
6.5,GPT-4,7,1,8,API log
""",
}


@pytest.mark.parametrize("kind", TRACES)
def test_traces_of_each_format_are_read(kind, tmp_path):
    (tmp_path / "trace").write_text(TRACES[kind], encoding="utf-8")
    requests = read_trace(tmp_path / "trace")
    assert [tuple(one) for one in requests] == [(0.0, 10, 2), (1.5, 7, 1)]
    workload = Workload(lengths("1"), lengths("1"), 0.0, requests)
    assert workload.trace_rate == pytest.approx(1 / 1.5)
    arrivals = workload.arrivals(10.0, 50, np.random.default_rng(0)).requests
    assert {(one.prompt, one.output) for one in arrivals} == {(10, 2), (7, 1)}
    assert (arrivals[-1].sent - arrivals[0].sent) / 49 == pytest.approx(0.1, rel=0.05)


def test_times_of_a_trace_have_any_number_of_decimals(tmp_path):
    """Before 3.11, Python reads three or six."""
    rows = [f"2024-05-10 00:00:0{time},1,1" for time in ("0.5Z", "1Z", "2.00993Z", "3.1234567Z")]
    (tmp_path / "trace").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    arrivals = [request.arrival for request in read_trace(tmp_path / "trace")]
    assert arrivals == pytest.approx([0, 0.5, 1.50993, 2.623456], abs=1e-5)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows sets the time zone of a process in another way")
def test_times_of_a_trace_do_not_depend_on_the_time_zone_here(tmp_path, monkeypatch):
    """In Europe, clocks went from 2 to 3 on that morning."""
    rows = [f"2024-03-31 0{hour}:30:00,1,1" for hour in (1, 2, 3)]
    (tmp_path / "trace").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        arrivals = [request.arrival for request in read_trace(tmp_path / "trace")]
    time.tzset()
    assert arrivals == [0, 3600, 7200]
