# SPDX-License-Identifier: Apache-2.0
"""Prefill on one engine, decoding on another: the same answers as of one engine, and no exact name
for approximate KV, whatever gets lost on the way."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from segreuse_extras.transfer.scheduler import EXACT_UNTIL
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, _answer, engine
from tests.e2e.stepping import abort, drain, hashes, preempt, resident, settle, submit
from tests.e2e.test_equality import assert_same

OPTIONS = NAMESPACE | {"segreuse_min_reused_tokens": 16}
PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}
NOISE = 2e-3  # of float32
ROUNDING = 2e-5  # of float32 where the same tokens are computed together
LIMITS = {"dtype": "float32", "max_model_len": 1536}
NUM_MIXED, NUM_PLAIN = 32, 10


def beside(folder: Path, role: str, **options: Any) -> dict[str, Any]:
    """Options of an engine whose KV comes and goes by a folder."""
    return {
        "spread_tokens": 0 if role == "kv_consumer" else 48,
        "beside": {
            "kv_connector": "FolderConnector",
            "kv_connector_module_path": "tests.e2e.folder_connector",
            "kv_role": role,
            "kv_connector_extra_config": {"folder": str(folder), **options},
            "kv_load_failure_policy": "recompute",
            "name_free": True,
        },
    }


@dataclass
class Case:
    """A request, what one engine answers, and what a prefill engine has handed over.

    Attributes:
        prompt: its tokens.
        options: that it has on both engines.
        whole: the answer of one engine with the plugin.
        cold: the answer of one engine that reuses nothing.
        ends_behind_document: whether its last token is the only one behind its last document.
        params: what goes to the decode engine.
        exact: tokens up to which its KV is exact.
    """

    prompt: list[int]
    options: dict[str, Any]
    whole: Answer
    cold: Answer
    ends_behind_document: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> int:
        return int(self.params[EXACT_UNTIL])

    @property
    def is_approximate(self) -> bool:
        return self.exact < len(self.prompt)

    @property
    def supplies_all_but_one(self) -> bool:
        """Whether one engine computes the last token alone, as a decode engine does."""
        report = self.whole.report
        return bool(report and report["reused_tokens"] and self.ends_behind_document)

    def decoding(self, **others: Any) -> dict[str, Any]:
        """Options of the request on the decode engine."""
        return self.options | {"kv_transfer_params": self.params | others}


def documents(text: Prompts) -> list[list[int]]:
    return [text.tokens(n) for n in (200, 131, 310, 96, 64)]


def mixed_prompts(
    text: Prompts, known: list[list[int]], count: int = NUM_MIXED
) -> Iterator[list[int]]:
    """One to four documents in any order, cut off or not, behind text of any length; some begin
    with a document, so that a part of them is exact, and some end one token behind one."""
    order = random.Random(5)
    for number in range(count):
        chosen = order.sample(known, order.randrange(1, 5))
        if number % 3 == 0:
            chosen[-1] = chosen[-1][: order.randrange(40, len(chosen[-1]) + 1)]
        gaps = [order.randrange(1, 70), 9, 2, order.randrange(5, 40)]
        if number % 2:
            gaps[len(chosen) % len(gaps)] = 1
        prompt = text.around(*chosen, gaps=tuple(gaps))
        if number % 4 == 0:
            prompt = known[number % len(known)] + prompt
        yield prompt


def handed_over(running: Engine, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Prefill of a request; what a router gives to the decode engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, extra_args=options | PREFILL)
    [output] = running.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    settle(running)
    return dict(output.kv_transfer_params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("handed_over")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    """Of a prefill engine that has gone since: vLLM has one connector per process."""
    with engine("qwen3", beside(folder, "kv_producer"), **LIMITS) as running:
        text = Prompts(running.vocab_size, seed=41)
        known = documents(text)
        asked = [(prompt, OPTIONS) for prompt in mixed_prompts(text, known)]
        asked += [(text.tokens(11 + 29 * n), [{}, OPTIONS][n % 2]) for n in range(NUM_PLAIN)]
        found = []
        for prompt, options in asked:
            running.reset()
            cold = running.ask(prompt)[0]
            _only_documents(running, known)
            whole = running.ask(prompt, options=options)[0]
            case = Case(prompt, options, whole, cold, options is OPTIONS and len(found) % 2 == 1)
            _only_documents(running, known)
            case.params = handed_over(running, prompt, options)
            running.check_idle()
            found.append(case)
        _check_prefill_engine(running, found)
        _abort_while_it_prefills(running, found[0])
        _reset_while_it_sends(running, found[0])
        spread = _handed_over_behind_others(running, known, found[1])
        found.append(spread)
    return found


def _only_documents(running: Engine, known: list[list[int]]) -> None:
    running.reset()
    running.ask(*known, options=NAMESPACE, max_tokens=1)


def _check_prefill_engine(running: Engine, found: list[Case]) -> None:
    """What either connector's halves tell each other arrives."""
    theirs = running.scheduler.connector.beside
    assert [it.num_layers for it in theirs.handshakes.values()] == [layers_of(running)]
    written = [name for report in theirs.reports for name in report.written]
    assert len(written) == len(found)
    assert theirs.heard["sent"] == {case.params["remote_request_id"] for case in found}
    assert theirs.heard["loaded"] == set()


def _abort_while_it_prefills(running: Engine, case: Case) -> None:
    """Its router has gone: nothing is handed over."""
    written = len(theirs(running).reports)
    name = submit(running, "aborted", case.prompt, case.options | PREFILL, max_tokens=8)
    running.llm.llm_engine.step()
    abort(running, name)
    settle(running)
    running.check_idle()
    assert len(theirs(running).reports) == written


def _reset_while_it_sends(running: Engine, case: Case) -> None:
    """Blocks that are read are not taken."""
    submit(running, "sent", case.prompt, case.options | PREFILL, max_tokens=1)
    while running.llm.llm_engine.has_unfinished_requests():
        running.llm.llm_engine.step()
    assert running.pool.get_num_free_blocks() < running.pool.num_gpu_blocks - 1
    assert not running.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        running.llm.reset_prefix_cache(reset_running_requests=True)
    settle(running)
    running.check_idle()


def _handed_over_behind_others(running: Engine, known: list[list[int]], case: Case) -> Case:
    """The same request, whose plan takes several steps since another one decodes."""
    _only_documents(running, known)
    other = submit(running, "decodes", known[0][:20], None, max_tokens=400, ignore_eos=True)
    for _ in range(2):
        running.llm.llm_engine.step()
    name = submit(running, "spread", case.prompt, case.options | PREFILL, max_tokens=1)
    params, set_aside = None, 0
    while params is None:
        ended = [it for it in running.llm.llm_engine.step() if it.finished]
        params = next((it.kv_transfer_params for it in ended), None)
        request = running.scheduler.requests.get(name)
        set_aside += request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert set_aside > 1, "its plan took several steps"
    abort(running, other)
    settle(running)
    running.check_idle()
    assert theirs(running).heard["loaded"] == set(), "the other connector loaded nothing"
    return replace(case, params=dict(params), ends_behind_document=False)


@pytest.fixture(scope="module")
def decoding(cases: list[Case], folder: Path) -> Iterator[Engine]:
    with engine("qwen3", beside(folder, "kv_consumer"), **LIMITS) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    if "decoding" not in request.fixturenames:
        yield
        return
    running: Engine = request.getfixturevalue("decoding")
    running.reset()
    yield
    settle(running)
    running.check_idle()
    assert not running.scheduler.requests
    status = running.scheduler.connector.scheduler_side.status()
    assert status["transfers"] == {"loading": 0, "sending": 0}


@pytest.fixture
def approximate(cases: list[Case]) -> Case:
    """One whose KV is exact in front only."""
    return next(case for case in cases if case.exact >= 2 * BLOCK_SIZE and case.is_approximate)


@pytest.fixture
def exact(cases: list[Case]) -> Case:
    """One of several blocks, whose KV is exact."""
    return next(c for c in cases if not c.is_approximate and len(c.prompt) > 4 * BLOCK_SIZE)


def exact_names(running: Engine) -> set[bytes]:
    """Exact names of all blocks of the pool."""
    named = [running.pool.name_of(block.block_id) for block in running.pool.blocks]
    return {it[0] for it in named if it is not None and it[1]}


def names_of(running: Engine, tokens: list[int]) -> set[bytes]:
    """Exact names of the whole blocks of a text."""
    return {make_block_hash_with_group_id(it, 0) for it in hashes(running, tokens)}


def asked(running: Engine, case: Case, **others: Any) -> Answer:
    return running.ask(case.prompt, options=case.decoding(**others))[0]


def layers_of(running: Engine) -> int:
    return int(running.llm.llm_engine.model_config.hf_config.num_hidden_layers)


def theirs(running: Engine) -> Any:
    return running.scheduler.connector.beside


def test_what_is_handed_over_is_approximate_as_often_as_it_is_reused(cases: list[Case]) -> None:
    """Or the tests below would show nothing."""
    mixed = [case for case in cases if case.is_approximate]
    assert len(mixed) > NUM_MIXED * 0.8
    assert all(case.whole.report["reused_tokens"] for case in mixed)
    assert sum(case.exact >= BLOCK_SIZE for case in mixed) > 5
    assert sum(case.exact < BLOCK_SIZE for case in mixed) > 5
    differ = [case for case in mixed if case.whole.logprobs[0] != case.cold.logprobs[0]]
    assert len(differ) == len(mixed), "approximate KV answers otherwise than exact KV"


def test_the_report_of_the_prefill_engine_goes_with_the_blocks(cases: list[Case]) -> None:
    for case in cases:
        report = case.params.get("segreuse")
        if report is not None:
            assert report["reused_tokens"] == case.whole.report["reused_tokens"]
        reused = bool(report and report["reused_tokens"])
        assert case.exact == (report["prefix_tokens"] if reused else len(case.prompt))


@pytest.mark.patches("block_pool")
def test_answers_are_those_of_one_engine(decoding: Engine, cases: list[Case], folder: Path) -> None:
    """KV is the same to the last bit; no block has an exact name but those in front of the
    approximate ones."""
    same = 0
    for case in cases:
        decoding.reset()
        check_answer(decoding, folder, case)
        same += case.supplies_all_but_one
    assert same > NUM_MIXED * 0.3
    moved = theirs(decoding)
    assert len(moved.heard["loaded"]) == len(cases)
    assert [it.num_layers for it in moved.handshakes.values()] == [layers_of(decoding)]


def check_answer(decoding: Engine, folder: Path, case: Case) -> Answer:
    """A decode engine that knows nothing else answers as one engine would; KV is the same to the
    last bit, and nothing that is approximate has an exact name, in the whole pool."""
    answer = asked(decoding, case)
    assert answer.token_ids == case.whole.token_ids
    # Where the same tokens are computed together, only the rounding of a product of matrices is
    # left, which depends on where memory lies.
    assert_same(answer, case.whole, ROUNDING if case.supplies_all_but_one else NOISE)
    _check_blocks(decoding, folder, case)
    whole = case.prompt + answer.token_ids
    exact = whole[: case.exact] if case.is_approximate else whole[:-1]
    assert exact_names(decoding) == names_of(decoding, exact)
    return answer


def _check_blocks(decoding: Engine, folder: Path, case: Case) -> None:
    """But of the last one, whose last token the decode engine computes."""
    name, worker = case.params["remote_request_id"], get_kv_transfer_group().beside
    block_ids = worker.filled[name][:-1]
    content = torch.load(folder / name)
    assert len(worker.pages) == layers_of(decoding)
    for layer, pages in worker.pages.items():
        wanted = content[layer][-len(block_ids) - 1 : -1]
        assert torch.equal(worker.by_block(pages)[block_ids], wanted)


def test_engines_that_forget_nothing_name_nothing_else(decoding: Engine, cases: list[Case]) -> None:
    """All requests together, and again, in batches; then plain requests with the same prompts."""
    allowed: set[bytes] = set()
    for case in cases:
        whole = case.prompt if case.is_approximate else case.prompt + case.whole.token_ids
        allowed |= names_of(decoding, whole[: case.exact] if case.is_approximate else whole)
    for _ in range(2):
        each: list[Any] = [case.decoding() for case in cases]
        answers = decoding.ask(*[case.prompt for case in cases], options=each)
        for case, answer in zip(cases, answers, strict=True):
            assert_same(answer, case.whole, NOISE)
        assert exact_names(decoding) <= allowed
    for case in cases:
        answer = decoding.ask(case.prompt)[0]
        assert_same(answer, case.cold, NOISE)


def test_a_second_request_computes_what_is_not_exact(decoding: Engine, approximate: Case) -> None:
    asked(decoding, approximate)
    again = decoding.ask(approximate.prompt)[0]
    assert again.cached_tokens == approximate.exact // BLOCK_SIZE * BLOCK_SIZE
    assert_same(again, approximate.cold, NOISE)
    # Its own computation is exact, and so are its names.
    assert len(resident(decoding, approximate.prompt)) == len(approximate.prompt) // BLOCK_SIZE


def test_nothing_that_was_handed_over_donates(decoding: Engine, approximate: Case) -> None:
    asked(decoding, approximate)
    assert len(decoding.index) == 0
    other = Prompts(decoding.vocab_size, seed=43).tokens(20) + approximate.prompt
    assert (
        decoding.ask(other, options=OPTIONS)[0].report["bypass_reason"] == "too_few_reused_tokens"
    )


@pytest.mark.parametrize(
    "told",
    [None, "640", -1, True, 640.0, [640]],
    ids=["dropped", "text", "-1", "true", "640.0", "list"],
)
def test_38_nothing_is_exact_where_a_router_has_lost_or_changed_the_key(
    decoding: Engine, cases: list[Case], exact: Case, told: Any
) -> None:
    for case in (cases[0], cases[5], exact):
        decoding.reset()
        params = case.params | {EXACT_UNTIL: told}
        if told is None:
            del params[EXACT_UNTIL]
        options = case.options | {"kv_transfer_params": params}
        answer = decoding.ask(case.prompt, options=options)[0]
        assert_same(answer, case.whole, NOISE)
        assert exact_names(decoding) == set()
        cold = decoding.ask(case.prompt)[0]
        assert cold.cached_tokens == 0
        assert_same(cold, case.cold, NOISE)


def test_a_request_without_extra_keys_is_named_as_the_sender_tells(
    decoding: Engine, approximate: Case
) -> None:
    """The router has dropped them."""
    options = {"kv_transfer_params": approximate.params}
    answer = decoding.ask(approximate.prompt, options=options)[0]
    assert_same(answer, approximate.whole, NOISE)
    assert exact_names(decoding) == names_of(decoding, approximate.prompt[: approximate.exact])


def test_decoding_behind_approximate_kv_leaves_no_exact_name(
    decoding: Engine, approximate: Case
) -> None:
    more = {"max_tokens": 3 * BLOCK_SIZE, "ignore_eos": True}
    options = approximate.decoding()
    answer = decoding.ask(approximate.prompt, options=options, **more)[0]
    assert len(answer.token_ids) == 3 * BLOCK_SIZE
    assert exact_names(decoding) == names_of(decoding, approximate.prompt[: approximate.exact])


def test_decoding_behind_exact_kv_is_named(decoding: Engine, exact: Case) -> None:
    more = {"max_tokens": 3 * BLOCK_SIZE, "ignore_eos": True}
    answer = decoding.ask(exact.prompt, options=exact.decoding(), **more)[0]
    whole = exact.prompt + answer.token_ids
    assert exact_names(decoding) == names_of(decoding, whole[:-1])


# What goes wrong.


def test_38_a_preempted_request_computes_all_of_it_and_is_exact(
    decoding: Engine, approximate: Case
) -> None:
    name = submit(decoding, "one", approximate.prompt, approximate.decoding(), max_tokens=40)
    for _ in range(20):
        decoding.llm.llm_engine.step()
        if decoding.scheduler.running:
            break
    [request] = decoding.scheduler.running
    assert request.request_id == name
    assert exact_names(decoding) == names_of(decoding, approximate.prompt[: approximate.exact])
    preempt(decoding, request)
    drain(decoding)
    assert len(resident(decoding, approximate.prompt)) == len(approximate.prompt) // BLOCK_SIZE
    decoding.reset()
    assert_same(decoding.ask(approximate.prompt)[0], approximate.cold, NOISE)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_38_an_abort_while_blocks_are_on_their_way_leaks_nothing(
    decoding: Engine, approximate: Case, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    worker = _worker_of(decoding)
    monkeypatch.setattr(worker, "steps", 5)
    name = submit(decoding, "one", approximate.prompt, approximate.decoding())
    for _ in range(steps):
        decoding.llm.llm_engine.step()
    abort(decoding, name)
    if steps:
        assert decoding.pool.get_num_free_blocks() < decoding.pool.num_gpu_blocks - 1
    settle(decoding)
    decoding.check_idle()
    assert exact_names(decoding) == set()
    assert_same(decoding.ask(approximate.prompt)[0], approximate.cold, NOISE)


def _worker_of(running: Engine) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    assert connector is not running.scheduler.connector
    return connector.beside


@pytest.mark.parametrize("reports_blocks", [False, True], ids=["request", "blocks"])
@pytest.mark.parametrize("recomputes", [True, False], ids=["recompute", "fail"])
def test_38_kv_that_does_not_arrive_is_computed_or_fails_the_request(
    decoding: Engine,
    approximate: Case,
    monkeypatch: pytest.MonkeyPatch,
    recomputes: bool,
    reports_blocks: bool,
) -> None:
    monkeypatch.setattr(decoding.scheduler, "recompute_kv_load_failures", recomputes)
    monkeypatch.setattr(_worker_of(decoding), "reports_blocks", reports_blocks)
    answer = asked(decoding, approximate, remote_request_id="no such request")
    if recomputes:
        assert_same(answer, approximate.cold, NOISE)
        whole = approximate.prompt + answer.token_ids
        if not reports_blocks:  # vLLM's own: it starts anew, so that all of it is exact
            assert exact_names(decoding) == names_of(decoding, whole[:-1])
        assert exact_names(decoding) <= names_of(decoding, whole[:-1])
    else:
        assert answer.token_ids == []
        assert exact_names(decoding) == set()
    assert_same(decoding.ask(approximate.prompt)[0], approximate.cold, NOISE)


def test_38_blocks_that_are_being_filled_are_not_taken_by_a_reset(
    decoding: Engine, approximate: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker_of(decoding), "steps", 4)
    submit(decoding, "one", approximate.prompt, approximate.decoding())
    decoding.llm.llm_engine.step()
    assert not decoding.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        decoding.llm.reset_prefix_cache(reset_running_requests=True)
    assert_same(drain_unchecked(decoding)["one"], approximate.whole, NOISE)


def drain_unchecked(running: Engine) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    while running.llm.llm_engine.has_unfinished_requests():
        for output in running.llm.llm_engine.step():
            if output.finished:
                answers[output.request_id] = _answer(output)
    return answers
