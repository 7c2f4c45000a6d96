# SPDX-License-Identifier: Apache-2.0
"""What a worker keeps and compares, beside float64 and beside what `bench english` measures."""

import math

import pytest
import torch
from torch import Tensor

from bench.english.tape import divergences
from segreuse_extras.audit.messages import AuditOrders, AuditResult, Recording, Reference
from segreuse_extras.audit.recorder import Recorder, divergence
from vllm_segreuse.compat.sampler import Sampled

VOCABULARY, PROMPT = 50, 10


def logits(seed: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, VOCABULARY, generator=generator)).to(dtype)


def recording(tokens: int = 3) -> Recorder:
    recorder = Recorder()
    recorder.take(AuditOrders({"audited": Recording(PROMPT, tokens)}))
    return recorder


def begin(recorder: Recorder, *answer: int) -> None:
    recorder.take(AuditOrders(compare={"reference": Reference("audited", PROMPT, answer)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_is_that_of_bench_english(dtype: torch.dtype) -> None:
    for seed in range(20):
        full, other = logits(seed, dtype=dtype)[0], logits(seed + 100, dtype=dtype)[0]
        (expected,) = divergences([full.float()], [other.float()])
        assert float(divergence(full, other)) == expected


def test_the_divergence_of_small_differences_is_exact_and_not_negative() -> None:
    full = logits(1)[0]
    assert float(divergence(full, full.clone())) == 0
    p = torch.softmax(full.double(), -1)
    for size in (1e-2, 1e-3):
        other = full.double() + size * logits(2)[0].double()
        q = torch.softmax(other, -1)
        exact = float((p * (p.log() - q.log())).sum())
        assert float(divergence(full.double(), other)) == pytest.approx(exact, rel=1e-6)


def test_tokens_that_are_ruled_out_add_nothing_and_nan_is_seen() -> None:
    full, other = torch.tensor([1.0, 2.0, -math.inf]), torch.tensor([1.0, 2.0, -math.inf])
    assert float(divergence(full, other)) == 0
    assert math.isnan(float(divergence(torch.tensor([1.0, math.nan]), torch.ones(2))))
    assert math.isinf(float(divergence(torch.ones(2), torch.tensor([1.0, -math.inf]))))


def test_a_request_is_compared_from_its_first_token_on() -> None:
    recorder = recording()
    audited, full = logits(1, 3), logits(2, 3)
    full[1] = audited[1] + 1  # the same most likely token
    for position in range(3):
        recorder.see([Sampled("audited", 0, PROMPT + position)], audited[position : position + 1])
    begin(recorder, 7, 8, 9)
    for position in range(3):
        assert recorder.take_results() == {}
        rows = full[position : position + 1].clone()
        recorder.see([Sampled("reference", 0, PROMPT + position)], rows)
        assert int(rows.argmax()) == (7, 8, 9)[position], "it is made to say the same"
        assert rows.softmax(-1)[0, (7, 8, 9)[position]] == 1
    (kl,) = divergences([full[0]], [audited[0]])
    agreed = sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(audited, full, strict=True))
    assert 0 < agreed < 3
    assert recorder.take_results() == {"reference": AuditResult(kl, agreed, 3)}
    assert recorder.take_results() == {}
    assert recorder.is_idle


def test_rows_of_others_and_of_the_audited_are_only_read() -> None:
    recorder = recording()
    given = logits(3, 4)
    before = given.clone()
    recorder.see([Sampled("other", 0, PROMPT), Sampled("audited", 2, PROMPT)], given)
    assert torch.equal(given, before)
    begin(recorder, 5)
    recorder.see([Sampled("other", 0, 3), Sampled("reference", 3, PROMPT)], given)
    assert torch.equal(given[:3], before[:3])
    assert int(given[3].argmax()) == 5
    (result,) = recorder.take_results().values()
    assert result.kl == divergences([before[3]], [before[2]])[0], "the row of the request"


def test_what_is_kept_does_not_change_with_what_the_runner_does_to_its_logits() -> None:
    recorder = recording()
    given = logits(4)
    expected = given.clone()
    recorder.see([Sampled("audited", 0, PROMPT)], given)
    given.fill_(0)
    begin(recorder, 5)
    recorder.see([Sampled("reference", 0, PROMPT)], expected.clone())
    assert recorder.take_results() == {"reference": AuditResult(0.0, 1, 1)}


def test_parts_of_the_prompt_are_not_compared() -> None:
    recorder = recording()
    recorder.see([Sampled("audited", 0, PROMPT - 3)], logits(5))
    recorder.see([Sampled("audited", 0, PROMPT)], logits(6))
    recorder.see([Sampled("audited", 0, PROMPT)], logits(5))  # computed anew: it has answered
    begin(recorder, 5)
    chunk = logits(7)
    recorder.see([Sampled("reference", 0, PROMPT - 4)], chunk)
    assert torch.equal(chunk, logits(7))
    assert recorder.take_results() == {}
    recorder.see([Sampled("reference", 0, PROMPT)], logits(6))
    assert recorder.take_results() == {"reference": AuditResult(0.0, 1, 1)}


def test_positions_that_were_not_recorded_do_not_count() -> None:
    recorder = recording(tokens=2)
    for position in (0, 2):  # the second was not seen, the third is not wanted
        recorder.see([Sampled("audited", 0, PROMPT + position)], logits(8))
    begin(recorder, 1, 2, 3)
    for position in range(4):
        recorder.see([Sampled("reference", 0, PROMPT + position)], logits(8))
    assert recorder.take_results() == {"reference": AuditResult(0.0, 1, 1)}


def test_without_a_first_token_there_is_no_divergence() -> None:
    recorder = recording()
    begin(recorder, 1)
    recorder.see([Sampled("reference", 0, PROMPT)], logits(8))
    (result,) = recorder.take_results().values()
    assert math.isnan(result.kl)
    assert result.compared == 0


def test_what_is_forgotten_holds_nothing() -> None:
    recorder = recording()
    assert not recorder.is_idle
    recorder.see([Sampled("audited", 0, PROMPT)], logits(9))
    recorder.take(AuditOrders(forget=["audited", "stranger"]))
    assert recorder.is_idle
    begin(recorder, 1)
    assert recorder.is_idle, "there is nothing to compare it with"
    recorder = recording()
    compare = {"reference": Reference("audited", PROMPT, (1,))}
    recorder.take(AuditOrders(compare=compare, forget=["audited", "reference"]))
    assert recorder.is_idle, "it was aborted before it began"


def test_changing_logits_of_an_inference_is_allowed() -> None:
    recorder = recording()
    with torch.inference_mode():
        given = logits(1) + 0
    recorder.see([Sampled("audited", 0, PROMPT)], given)
    begin(recorder, 4)
    recorder.see([Sampled("reference", 0, PROMPT)], given)
    assert int(given.argmax()) == 4
