# SPDX-License-Identifier: Apache-2.0
"""`bench reuse` on tiny models with random weights: the decoder against Transformers' own, moved
KV, and what leads have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bench import harness
from bench.english.prompts import Prompts
from bench.english.tasks.base import Example
from bench.quality import seeds
from bench.reuse import command, heads, ingestion, laboratory, leads, records
from bench.reuse.attribution import attributions
from bench.reuse.decoder import NAME, Decoder
from bench.reuse.laboratory import Wanted
from bench.reuse.scene import Asked, Scene, computed_in, in_full

pytestmark = pytest.mark.slow  # of a laboratory, which no user runs

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": None,
    "attn_implementation": NAME,
}
WINDOW = 12
FAMILIES: dict[str, Any] = {
    "qwen2": lambda **own: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **own)),
    "llama": lambda **own: LlamaForCausalLM(LlamaConfig(**SHAPE, **own)),
    "gemma3": lambda **own: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            **own,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
}
PROMPT = [int(one) for one in torch.randint(5, 4000, (60,), generator=torch.manual_seed(3))]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = FAMILIES[request.param]().eval()
    for weight in made.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.2)  # attention that is far from even
    return made


@pytest.fixture
def decoder(model: Any) -> Decoder:
    return Decoder(model, None)


def in_one(decoder: Decoder, tokens: list[int]) -> tuple[Any, torch.Tensor]:
    kv = decoder.empty(len(tokens))
    return kv, decoder.compute(kv, tokens, torch.arange(len(tokens)), logits=len(tokens))


def test_full_prefill_is_that_of_transformers(model: Any, decoder: Decoder) -> None:
    _, logits = in_one(decoder, PROMPT)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_scattered_tokens_beside_exact_kv_are_as_in_full_prefill(decoder: Decoder) -> None:
    kv, logits = in_one(decoder, PROMPT)
    keys = kv.keys.clone()
    some = torch.tensor([0, 3, 17, 18, 40, 59])
    kv.keys[:, :, some] = 9.0
    found = decoder.compute(kv, torch.tensor(PROMPT)[some], some, logits=len(some))
    torch.testing.assert_close(found, logits[some], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv.keys, keys, rtol=1e-4, atol=1e-4)


def test_moved_keys_are_those_of_the_other_position(decoder: Decoder) -> None:
    kv, _ = in_one(decoder, PROMPT)
    later = decoder.empty(140)
    decoder.compute(later, PROMPT, torch.arange(80, 140), logits=0)
    # The first layer sees nothing but the token and its position.
    moved = decoder.moved(kv, 10, 30, 90)
    torch.testing.assert_close(moved.keys[0], later.keys[0, :, 90:110], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moved.values, kv.values[:, :, 10:30])
    there_and_back = decoder.moved(decoder.moved(kv, 0, 60, 500), 0, 60, -500)
    torch.testing.assert_close(there_and_back.keys, kv.keys, rtol=1e-4, atol=1e-4)


def example(documents: int = 3) -> Example:
    texts = [f"document {i} " + " ".join(f"word{i}-{j}" for j in range(20)) for i in range(9)]
    return Example(
        task="one-hop",
        kind="",
        documents=tuple(texts[:documents]),
        others=tuple(texts[documents : documents + 2]),
        question=" which word is the first one of all ?",
        answers=("word",),
    )


class Words:
    """A tokenizer: a word is a token."""

    chat_template = None
    bos_token_id = None

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        ids = [self.known.setdefault(word, len(self.known)) for word in text.split()]
        return SimpleNamespace(input_ids=ids)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(Words())


@pytest.fixture
def asked(decoder: Decoder, prompts: Prompts) -> Asked:
    return in_full(decoder, prompts, example())


def scene_of(decoder: Decoder, prompts: Prompts, asked: Asked, source: str = "siblings") -> Scene:
    texts = [f"strange {i} " + " ".join(f"odd{i}-{j}" for j in range(20)) for i in range(6)]
    donors = ingestion.SOURCES[source](decoder, prompts, example(), lambda: texts, Random(1))
    return Scene(decoder, asked, donors)


@pytest.mark.parametrize("source", ingestion.SOURCES)
def test_all_tokens_recomputed_are_full_prefill(
    decoder: Decoder, prompts: Prompts, asked: Asked, source: str
) -> None:
    scene = scene_of(decoder, prompts, asked, source)
    moved_only = scene.answered(torch.empty(0, dtype=torch.int64))
    assert not torch.allclose(moved_only.logits, asked.logits, rtol=1e-3, atol=1e-3)
    everything = scene.answered(scene.is_document.nonzero()[:, 0])
    torch.testing.assert_close(everything.logits, asked.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *leads.LEADS,
        "layers=1+2",
        "heads=1.0+2.3",
        "further=.5",
        "keys=1.1",
        "carried=.2+.4+3",
        "levelled=.5",
        "carried=.2+.4+3/.1+.3+4",
        "carried=.2+.4+3/.1+.3+4/.1+.2+3/.2+.1+5",
    ],
)
def test_a_lead_computes_no_more_than_its_share(
    decoder: Decoder, prompts: Prompts, asked: Asked, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = replace(
        scene_of(decoder, prompts, asked), chooser=scene_of(decoder, prompts, asked, "alone")
    )
    computed: list[int] = []
    compute = Decoder.compute

    def counted(self: Decoder, kv: Any, tokens: Any, positions: torch.Tensor, **own: Any) -> Any:
        within = positions[positions < len(asked.tokens)]
        computed.append(int(scene.is_document[within].sum()))
        return compute(self, kv, tokens, positions, **own)

    monkeypatch.setattr(Decoder, "compute", counted)
    number = round(0.3 * scene.num_reused)
    logits = leads.lead(name).lead(scene, number).logits
    if name == "helpers":
        del computed[0]  # what they attend to in full prefill, which no server knows
    assert logits.shape == asked.logits.shape
    assert sum(computed) <= number + 2  # shares of documents are rounded
    if name not in ("shift", "exact"):
        assert sum(computed) >= number - 2


def test_no_lead_changes_the_scene(decoder: Decoder, prompts: Prompts, asked: Asked) -> None:
    scene = scene_of(decoder, prompts, asked)
    scene.chooser = scene
    before = [one.clone() for one in (scene.kv.keys, scene.kv.values, scene.paid)]
    exact = asked.exact.keys.clone()
    for lead in leads.LEADS.values():
        lead(scene, 12)
    assert torch.equal(asked.exact.keys, exact)
    for one, other in zip(before, (scene.kv.keys, scene.kv.values, scene.paid), strict=True):
        assert torch.equal(one, other)


def test_an_answer_goes_its_own_way_where_it_leaves_the_full_one(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked)
    answered = scene.answered(scene.best(leads.focus_scores(scene), 9))
    said = answered.own(asked.answer)
    differ = [i for i, (a, b) in enumerate(zip(said, asked.answer, strict=True)) if a != b]
    assert differ, "or this shows nothing"
    assert said != answered.logits.argmax(-1).tolist(), "which follows the full answer"
    # The same answer token by token.
    kv, position = answered.kv.copy(), len(asked.tokens)
    for given, following in pairwise(said):
        logits = decoder.compute(kv, [given], torch.tensor([position]))
        assert int(logits.argmax()) == following
        position += 1
    everything = scene.answered(scene.is_document.nonzero()[:, 0])
    assert everything.own(asked.answer) == asked.answer


def test_exact_kv_of_all_tokens_is_full_prefill(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked, "alone")
    found = leads.LEADS["exact"](scene, scene.num_reused)
    torch.testing.assert_close(found.logits, asked.logits, rtol=1e-4, atol=1e-4)


def test_an_attribution_is_what_a_step_towards_exact_kv_changes(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked, "alone")
    found = attributions(scene)
    assert not found[~scene.is_document].any()
    token, step = int(found.abs().argmax()), 1e-2

    def divergence(share: float) -> float:
        kv = scene.kv.copy()
        for mine, exact in ((kv.keys, asked.exact.keys), (kv.values, asked.exact.values)):
            mine[:, :, token] += share * (exact[:, :, token] - mine[:, :, token])
        first = scene.answered(torch.empty(0, dtype=torch.int64), kv).logits[:1]
        of_full = asked.logits[:1].log_softmax(-1)
        return float((of_full.exp() * (of_full - first.log_softmax(-1))).sum())

    slope = (divergence(step) - divergence(-step)) / (2 * step)
    assert float(found[token]) == pytest.approx(-slope, rel=0.05)


def test_heads_tell_by_themselves_what_the_policy_tells_by_all(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked)
    everything = heads.Told.of(scene, 1.0)
    assert everything.policy == pytest.approx(1)
    torch.testing.assert_close(everything.heads, torch.ones(4, 4))
    some = heads.Told.of(scene, 0.2)
    assert 0 < some.policy < 1
    # One head of the second half: the policy with no other.
    scene.paid[:, :, [0, 1, 3]] = scene.paid[[0, 1, 3]] = 0
    assert heads.Told.of(scene, 0.2).policy == pytest.approx(float(some.heads[2, 2]))


def test_the_best_heads_are_best_on_average_and_in_no_last_layer() -> None:
    def told(*rows: list[float]) -> heads.Told:
        return heads.Told(torch.tensor(rows), 0.5)

    found = [
        told([0.5, 0.1], [0.2, 0.6], [1.0, 1.0]),
        told([0.1, 0.3], [0.5, 0.4], [1.0, 1.0]),
    ]
    best = heads.best(found, 3)
    assert [*best] == [(1, 1), (1, 0), (0, 0)]
    assert [*best.values()] == pytest.approx([0.5, 0.35, 0.3])


def test_heads_are_ranked_on_tuning_examples_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert command.main(["--model", str(tmp_path), "--rank-heads", "4"]) == 2
    assert "BENCH_QUALITY_SEEDS=tuning" in capsys.readouterr().err


def test_further_goes_beyond_what_is_computed(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked)
    chosen = scene.best(leads.focus_scores(scene), 9)
    none = scene.answered(chosen, further=0.0).logits
    assert torch.equal(scene.answered(chosen).logits, none)
    half = scene.answered(chosen, further=0.5).logits
    assert not torch.allclose(half, none, rtol=1e-3, atol=1e-3)


def test_a_second_round_leaves_what_the_first_has_computed(
    decoder: Decoder, prompts: Prompts, asked: Asked
) -> None:
    scene = scene_of(decoder, prompts, asked)
    best = scene.best(leads.levelled_scores(scene), 20)
    first, second = best[::2], best[1::2]
    kv = scene.kv.copy()
    scene.read(kv, first, carry=leads.carry_from(scene, first))
    others = scene.is_document.clone()
    others[best] = False
    others = others.nonzero()[:, 0]
    assert not torch.equal(kv.values[:, :, others], scene.kv.values[:, :, others])
    found = scene.answered(second, kv, carry=leads.carry_from(scene, second, there=first)).kv
    assert torch.equal(found.values[:, :, first], kv.values[:, :, first])
    assert torch.equal(found.keys[:, :, first], kv.keys[:, :, first])
    assert not torch.equal(found.values[:, :, others], kv.values[:, :, others])


def test_hidden_tokens_are_attended_to_by_nobody(decoder: Decoder) -> None:
    kv, _ = in_one(decoder, PROMPT)
    last = torch.tensor([59])
    kv.hidden = torch.tensor([50, 51])
    one = decoder.compute(kv.copy(), PROMPT[59:], last)
    kv.values[:, :, 50:52] += 100
    torch.testing.assert_close(decoder.compute(kv.copy(), PROMPT[59:], last), one)
    kv.hidden = None
    assert not torch.allclose(decoder.compute(kv.copy(), PROMPT[59:], last), one)


def test_a_mean_of_equal_contexts_is_the_context(
    decoder: Decoder, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = example()
    siblings = ingestion.SOURCES["siblings"](decoder, prompts, one, tuple, Random(1))
    same = ingestion.SOURCES["mean-2"](decoder, prompts, one, lambda: one.others, _InOrder())
    for mine, other in zip(same, siblings, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)


class _InOrder(Random):
    """Draws the first ones."""

    def sample(self, population: Any, k: int, **_: Any) -> Any:
        return list(population)[:k]


def test_the_nearest_have_most_rare_words_in_common() -> None:
    base = [
        "the red apple falls",
        "the blue sea roars",
        "the red apple rots",
        "the blue sea sleeps",
    ]
    drawn = replace(example(), documents=tuple(base[:2]))
    assert [pair[-1] for pair in ingestion.nearest(drawn, base)] == [base[2], base[3]]


def test_a_text_that_no_prompt_has_is_named(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="1 of 2 texts"):
        computed_in(decoder, [[1, 2, 3, 4]], [[2, 3], [7, 7]])


def test_a_text_is_taken_from_the_last_prompt_that_has_it(decoder: Decoder) -> None:
    first, last = [9, 8, *PROMPT[:6]], [*PROMPT[20:29], *PROMPT[:6], 5]
    [found] = computed_in(decoder, [first, last], [PROMPT[:6]])
    kv, _ = in_one(decoder, last)
    torch.testing.assert_close(found.values, kv.values[:, :, 9:15], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("far", "focus", "0.1"), "no source 'far'"),
        (("alone", "guess", "0.1"), "no lead 'guess'"),
        (("alone", "layers=x", "0.1"), "no lead 'layers=x'"),
        (("alone", "heads=3", "0.1"), "no lead 'heads=3'"),
        (("alone", "focus", "1.5"), "a share of 1.5"),
    ],
)
def test_what_is_not_there_is_named(names: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wanted.named(*names)


def outcome(kl: float, agreement: float = 1.0, score: float = 1.0) -> records.Outcome:
    return records.Outcome(first_kl=kl, answer_kl=kl / 2, agreement=agreement, score=score)


def test_differences_are_of_the_same_examples_and_share() -> None:
    def record(number: int, **found: records.Outcome) -> records.Record:
        return records.Record("chat", number, "alone", 4, 500, 400, 1.0, found)

    both = [
        record(i, **{"default@0.1": outcome(0.4), "norms@0.1": outcome(0.2 + i / 100)})
        for i in range(4)
    ]
    former = record(5, **{"focus@0.1": outcome(0.3), "norms@0.1": outcome(0.1)})
    more = record(9, **{"default@0.1": outcome(8.0, 0.5)})
    rows = records.figures([*both, former, more])["rows"]
    default = next(row for row in rows if row["lead"] == "default")
    norms = next(row for row in rows if row["lead"] == "norms")
    assert default["examples"] == 5
    assert default["same_answers"] == 0.8
    assert norms["first_kl_less_default"] == pytest.approx(-0.185)
    assert norms["answer_kl_less_default"] == pytest.approx(-0.0925)
    assert norms["answer_kl_less_default_low"] < -0.0925 < norms["answer_kl_less_default_high"]
    assert norms["answer_kl_less_focus"] == pytest.approx(-0.1)
    assert "answer_kl_less_default" not in default
    assert "answer_kl_less_focus" not in default
    again = [records.Record.read(one.entry) for one in both]
    assert again == both


def test_only_answers_count_that_full_prefill_can_give() -> None:
    def record(number: int, full: float, score: float) -> records.Record:
        found = {"focus@0.25": outcome(0.1, score=score)}
        return records.Record("chat", number, "alone", 4, 500, 400, full, found)

    # Full prefill answers the even numbers, so the odd ones count.
    asked = [record(0, 1.0, 0.0), record(2, 1.0, 0.0), record(1, 0.0, 0.0), record(3, 0.5, 0.25)]
    [row] = records.figures(asked)["rows"]
    assert row["counted"] == 2
    assert row["over_full"] == 0.5
    assert row["less_full_low"] < -0.125 < row["less_full_high"]
    assert row["work"] == pytest.approx((100 + 0.25 * 400) / 500)


class Asks:
    """Stands for the laboratory: every lead is as good as the other."""

    def __init__(self, *_: Any) -> None:
        pass

    def measured(self, task: str, number: int, wanted: Wanted) -> Iterator[records.Record]:
        names = [f"{one.name}@{share:g}" for one in wanted.leads for share in wanted.shares]
        found = {name: outcome(0.1) for name in names}
        for source in wanted.sources:
            yield records.Record(task, number, source, 4, 500, 400, 1.0, found)


def test_a_second_start_goes_on_with_the_same_leads_and_code_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(laboratory, "Laboratory", Asks)
    monkeypatch.setattr(harness, "commit", lambda: "abc")
    file = tmp_path / "out.json"

    def run(examples: int, leads: str) -> int:
        given = ["--model", str(tmp_path), "--tasks", "chat", "--examples", str(examples)]
        return command.main([*given, "--leads", leads, "--json", str(file)])

    assert run(1, "focus,each") == 0
    assert run(2, "focus,each") == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["examples"] for row in rows} == {2}
    assert run(2, "focus,norms") == 2
    assert "leads focus,each, not focus,norms" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(seeds, "SETS", {**seeds.SETS, "reporting": "another"})
        assert run(3, "focus,each") == 2
        assert "not another" in capsys.readouterr().err
    monkeypatch.setattr(harness, "commit", lambda: "def")
    assert run(3, "focus,each") == 2
    assert "commit abc, this is def" in capsys.readouterr().err
