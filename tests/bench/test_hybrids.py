# SPDX-License-Identifier: Apache-2.0
"""The study of hybrids: the delta rule, the model, and what segments put elsewhere come to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab import state_space
from lab.delta import Carried, Tokens, affine, scan
from lab.hybrid import Cached, Hybrid, HybridShape
from lab.hybrids import __main__ as command
from lab.hybrids import figures, states, worlds
from lab.hybrids.arms import HEADS, SOURCES, Prompt, in_pieces
from lab.hybrids.figures import Outcome, Record
from lab.segments import Memory, Reader

pytestmark = pytest.mark.slow  # a study of its own, which no user runs

SHAPE = HybridShape(512, hidden_size=32, intermediate_size=48, head_dim=16)
STATES_ONLY = 2e-5
"""By how much states of float32 may differ that were summed in another order."""


def _tokens(generator: torch.Generator, length: int, decay: float) -> Tokens:
    def draw(*sizes: int) -> Tensor:
        return torch.randn(2, 3, length, *sizes, generator=generator)

    keys = torch.nn.functional.normalize(draw(8), dim=-1)
    return Tokens(keys, draw(6), -decay * draw().abs(), draw().sigmoid())


def _one_by_one(tokens: Tokens, state: Tensor) -> Tensor:
    for token in range(tokens.keys.shape[2]):
        k, v = tokens.keys[:, :, token, :, None], tokens.values[:, :, token, None]
        strength = tokens.strength[:, :, token, None, None]
        state = tokens.decay[:, :, token, None, None].exp() * state
        state = state + strength * k @ (v - k.transpose(-1, -2) @ state)
    return state


def _part(tokens: Tokens, first: int, stop: int | None) -> Tokens:
    return Tokens(*(one[:, :, first:stop] for one in vars(tokens).values()))


@given(
    st.integers(0, 2**20), st.integers(1, 90), st.integers(1, 40), st.sampled_from([0, 0.01, 1, 30])
)
def test_chunks_read_what_tokens_one_by_one_read(
    seed: int, length: int, chunk: int, decay: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(generator, length, decay)
    state = torch.randn(2, 3, 8, 6, generator=generator)
    queries = torch.randn(2, 3, length, 8, generator=generator)
    read, behind = scan(tokens, state, queries, chunk)
    assert read is not None
    torch.testing.assert_close(behind, _one_by_one(tokens, state), rtol=1e-4, atol=1e-4)
    for token in (0, length - 1):
        seen = _one_by_one(_part(tokens, 0, token + 1), state)
        expected = (queries[:, :, token, None] @ seen)[:, :, 0]
        torch.testing.assert_close(read[:, :, token], expected, rtol=1e-4, atol=1e-4)


@given(
    st.integers(0, 2**20),
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.sampled_from([0, 0.01, 1, 30]),
)
def test_maps_of_segments_composed_make_the_state_that_reading_makes(
    seed: int, lengths: list[int], decay: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(generator, sum(lengths), decay)
    state = torch.randn(2, 3, 8, 6, generator=generator)
    read = scan(tokens, state)[1]
    composed, whole, first = state, None, 0
    for length in lengths:
        found = affine(_part(tokens, first, first + length))
        composed = found(composed)
        whole = found if whole is None else whole.then(found)
        first += length
    assert whole is not None
    torch.testing.assert_close(composed, read, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(state), read, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(affine(tokens).kept, whole.kept, rtol=1e-4, atol=1e-4)


@given(
    st.integers(0, 2**20),
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.sampled_from([0, 0.01, 1, 30]),
)
def test_states_that_fade_are_read_and_composed_as_tokens_one_by_one(
    seed: int, lengths: list[int], decay: float
) -> None:
    """Mamba-2."""
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(generator, sum(lengths), decay)
    state = composed = torch.randn(2, 3, 8, 6, generator=generator)
    queries = torch.randn(2, 3, sum(lengths), 8, generator=generator)
    read, behind = state_space.scan(tokens, state, queries)
    expected, seen, first = state, [], 0
    for token in range(sum(lengths)):
        k, v = tokens.keys[:, :, token, :, None], tokens.values[:, :, token, None]
        write = tokens.strength[:, :, token, None, None] * k @ v
        expected = tokens.decay[:, :, token, None, None].exp() * expected + write
        seen.append((queries[:, :, token, None] @ expected)[:, :, 0])
    torch.testing.assert_close(read, torch.stack(seen, 2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind, expected, rtol=1e-4, atol=1e-4)
    maps = []
    for length in lengths:
        maps.append(state_space.affine(_part(tokens, first, first + length)))
        composed = maps[-1](composed)
        first += length
    torch.testing.assert_close(composed, expected, rtol=1e-4, atol=1e-4)
    for earlier in maps[-2::-1]:
        maps[-1] = earlier.then(maps[-1])
    torch.testing.assert_close(maps[-1](state), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_fades_is_the_one_of_transformers() -> None:
    from transformers.models.bamba.configuration_bamba import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    shape = replace(SHAPE, fades=True, linear_num_value_heads=2, linear_value_head_dim=32)
    mine = _model(shape).layers[0].linear_attn
    config = BambaConfig(
        hidden_size=32,
        mamba_n_heads=2,
        mamba_d_head=32,
        mamba_d_state=shape.linear_key_head_dim,
        mamba_chunk_size=16,
        rms_norm_eps=shape.rms_norm_eps,
    )
    theirs = BambaMixer(config, 0).eval()
    theirs.load_state_dict(mine.state_dict())
    hidden = torch.randn(2, 75, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, carried, of_text = mine(hidden, mine.empty(2), mapped=True)
        expected = theirs(hidden)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_text(mine.empty(2).state), carried.state, rtol=1e-4, atol=1e-4)


def test_the_model_is_the_one_of_transformers() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    mine = _model(SHAPE)
    names = asdict(SHAPE)
    theta, factor = names.pop("rope_theta"), names.pop("partial_rotary_factor")
    interval = names.pop("full_attention_interval")
    assert not names.pop("fades")
    kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    config = Qwen3_5TextConfig(
        **names,
        layer_types=kinds * (SHAPE.num_hidden_layers // interval),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
            "mrope_section": [1, 1, 0],
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = Qwen3_5ForCausalLM(config).eval()
    theirs.model.load_state_dict({name: _theirs(name, one) for name, one in _weights(mine)})
    tokens = torch.randint(0, 512, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = mine.head(mine(tokens)), theirs(tokens).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _weights(model: Hybrid) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def _theirs(name: str, weight: Tensor) -> Tensor:
    """Their norms are 1 and a weight; all but those behind the delta rule."""
    return weight - 1 if "norm" in name and "linear_attn" not in name else weight


def _model(shape: HybridShape) -> Hybrid:
    """Random weights, with everything that begins as a constant moved from it."""
    torch.manual_seed(0)
    model = Hybrid(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(_model(SHAPE))


def _close(one: Memory, other: Memory) -> None:
    assert one.length == other.length
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert type(mine) is type(theirs)
        for name, tensor in vars(mine).items():
            torch.testing.assert_close(tensor, vars(theirs)[name], rtol=1e-4, atol=STATES_ONLY)


def _random(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (length,), generator=generator).tolist()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_a_prompt_read_in_segments_is_the_prompt_read_at_once(lengths: list[int]) -> None:
    reader = Reader(_model(SHAPE))
    tokens = _random(sum(lengths), 2)
    memory, hidden, first = reader.nothing(), [], 0
    for length in lengths:
        read = reader.read(tokens[first : first + length], memory)
        memory, first = read.memory, first + length
        hidden.append(read.hidden)
    at_once = reader.model(torch.tensor([tokens]))
    torch.testing.assert_close(torch.cat(hidden, 1), at_once, rtol=1e-4, atol=1e-4)


def test_segments_put_back_where_they_were_read_leave_what_reading_left(reader: Reader) -> None:
    memory = put = reader.read(_random(5, 3), reader.nothing()).memory
    for length in (1, 2, 40, 33):  # shorter than a convolution's tail, and longer
        read = reader.read(_random(length, length), memory, kept=True)
        assert read.segment is not None
        memory, put = read.memory, reader.put(read.segment, put)
    _close(put, memory)


def test_a_segment_put_elsewhere_has_its_keys_turned_and_its_states_composed(
    reader: Reader,
) -> None:
    """In the first layer nothing depends on what stands in front: all is as if it was read."""
    shallow = Reader(_model(replace(SHAPE, num_hidden_layers=1, full_attention_interval=1)))
    for one in (reader, shallow):
        there = one.read(_random(9, 4), one.nothing()).memory
        segment = one.read(_random(40, 5), there, kept=True).segment
        assert segment is not None
        here = one.read(_random(23, 6), one.nothing()).memory
        first = one.put(segment, here).layers[0]
        exact = one.read(_random(40, 5), here).memory.layers[0]
        if isinstance(first, Carried) and isinstance(exact, Carried):
            # A convolution looks at three tokens in front: they are other ones here.
            torch.testing.assert_close(first.tail, exact.tail)
            assert (first.state - exact.state).norm() < 0.2 * exact.state.norm()
        else:
            assert isinstance(first, Cached)
            torch.testing.assert_close(first.keys, exact.keys, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def prompt(reader: Reader) -> Prompt:
    return Prompt(reader, worlds.draw(3, "tuning"))


def test_full_recomputation_is_full_prefill(prompt: Prompt) -> None:
    answers = prompt.answers_of_full()
    assert prompt.apart_from_one_reading(answers) < 1e-4
    documents = prompt.donors("siblings")
    everything = torch.ones(prompt.questions.number, len(documents), dtype=torch.bool)
    read = prompt.with_read(documents, everything)
    again = prompt.questions.answered(prompt.reader, read, 1.0)
    torch.testing.assert_close(again.logits, answers.logits, rtol=1e-4, atol=1e-4)
    assert again.right == answers.right


def test_documents_of_the_prompt_itself_are_composed_to_full_prefill(prompt: Prompt) -> None:
    documents, memory = [], prompt.head
    for tokens in prompt.world.documents:
        documents.append(in_pieces(prompt.reader, tokens, memory))
        memory = prompt.reader.read(tokens, memory).memory
    _close(prompt.put(documents), prompt.full)
    _close(prompt.put(documents, HEADS[0]), prompt.full)
    none = torch.zeros(1, len(documents), dtype=torch.bool)
    _close(prompt.with_read(documents, none), prompt.full)


@pytest.mark.parametrize("source", SOURCES)
def test_arms_differ_and_read_what_they_say(prompt: Prompt, source: str) -> None:
    full = prompt.answers_of_full()
    arms = prompt.arms(prompt.donors(source))
    logits = {name: answers.logits for name, answers in arms.items()} | {"full": full.logits}
    names = list(logits)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            assert not torch.allclose(logits[one], logits[other], rtol=1e-5, atol=1e-6), (
                one,
                other,
            )
    kl = {
        name: sum(one.kl for one in figures.outcomes(full, answers))
        for name, answers in arms.items()
    }
    assert kl["exact-states"] < kl["composed"] < kl["no-states"]
    assert kl["heads-64"] < kl["composed"]
    words = worlds.DOCUMENTS * worlds.WORDS
    new = len(prompt.world.head) + prompt.questions.mean_length
    assert arms["composed"].work == pytest.approx(new / (new + words))
    assert arms["heads-16"].work == pytest.approx((new + 16 * worlds.DOCUMENTS) / (new + words))
    two = new + 2 * worlds.WORDS + prompt.questions.mean_length
    assert arms["documents-2"].work == pytest.approx(two / (new + words))


def test_documents_that_are_read_are_those_which_the_question_looks_at(prompt: Prompt) -> None:
    documents = prompt.donors("alone")
    chosen = prompt.choices(prompt.put(documents), 2)
    assert chosen.sum(1).tolist() == [2] * prompt.questions.number
    # One row by itself comes to the same as all rows together.
    together = prompt.with_read(documents, chosen)
    for row in range(prompt.questions.number):
        alone = prompt.with_read(documents, chosen[row : row + 1])
        _close(alone, together.rows(torch.tensor([row])))


def test_a_source_that_is_not_there_is_named(prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="no source 'reversed'; there are alone, siblings"):
        prompt.donors("reversed")


def test_worlds_ask_for_every_kind_what_their_documents_say() -> None:
    world = worlds.draw(5, "tuning")
    assert [len(one) for one in world.documents] == [worlds.WORDS] * worlds.DOCUMENTS
    assert [len(one) for one in world.siblings] == [worlds.WORDS] * worlds.SIBLINGS
    assert {one.kind for one in world.questions} == set(worlds.KINDS)
    assert world == worlds.draw(5, "tuning") != worlds.draw(6, "tuning")


def test_heads_keep_less_the_further_they_look_and_maps_cost_what_they_are(reader: Reader) -> None:
    some = [worlds.draw(number, "tuning") for number in range(2)]
    kept = list(states.heads_kept(reader, some).values())
    assert 1 > kept[0] >= kept[1] >= kept[2]
    assert kept[0] > kept[2]
    exact, rounded = (
        states.composing_error(reader, some[0], dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact < 1e-4 < rounded < 0.05
    segment = reader.read(some[0].documents[0], reader.nothing(), kept=True).segment
    assert segment is not None
    found = states.costs(reader, segment)
    layers = SHAPE.num_hidden_layers * 3 // 4
    a_head = SHAPE.linear_key_head_dim * (SHAPE.linear_key_head_dim + SHAPE.linear_value_head_dim)
    of_maps = layers * (SHAPE.linear_num_value_heads * a_head + 3 * SHAPE.convolved)
    assert found["maps_kib"] == of_maps * 4 / 1024
    assert found["maps_in_tokens"] / worlds.WORDS == pytest.approx(
        found["maps_kib"] / found["kv_kib"]
    )


def _record(number: int, right: list[bool], full: list[bool]) -> Record:
    arms = {"full": [Outcome(one, 0.0) for one in full], "a": [Outcome(one, 0.5) for one in right]}
    return Record(0, number, "alone", ["hop 0", "hop 1"], arms, {"full": 1.0, "a": 0.2})


def test_rows_are_shares_of_worlds_beside_full_prefill() -> None:
    some = [_record(number, [number < 3, False], [True, number > 0]) for number in range(8)]
    found = {(row["kind"], row["arm"]): row for row in figures.rows(some)}
    row = found["all", "a"]
    assert (row["worlds"], row["questions"], row["work"]) == (8, 16, 0.2)
    assert row["right"] == pytest.approx(3 / 16, abs=1e-4)
    assert row["of_full"] == pytest.approx(3 / 15, abs=1e-4)
    assert row["right_low"] < row["right"] < row["right_high"]
    assert row["of_full_low"] < row["of_full"] < row["of_full_high"]
    assert found["hop 1", "a"]["right"] == 0
    assert found["hop 0", "full"]["of_full"] == 1


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    from bench.quality import language

    shape = replace(SHAPE, vocab_size=language.VOCABULARY_SIZE)
    file = tmp_path / "model.pt"
    torch.save({"shape": asdict(shape), "model": _model(shape).state_dict()}, file)
    return file


def test_the_command_goes_on_where_it_was(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BENCH_QUALITY_SEEDS", "tuning")
    monkeypatch.setattr(states, "SPANS", (8, 16, 32))
    monkeypatch.setattr(command, "STATES", 1)
    file = tmp_path / "hybrids.json"
    lines_file = file.with_suffix(".jsonl")
    for number in (1, 2):
        assert command.main([str(trained), "--worlds", str(number), "--json", str(file)]) == 0
        # Stopped between the two records of a world.
        lines_file.write_text("".join(lines_file.read_text().splitlines(keepends=True)[:-1]))
    assert command.main([str(trained), "--worlds", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["suite"] == "hybrids"
    assert {row["worlds"] for row in result["rows"]} == {2}
    assert {row["source"] for row in result["rows"]} == set(SOURCES)
    assert result["summary"]["survives"] is False
    assert len(lines_file.read_text().splitlines()) == 1 + 2 * len(SOURCES)
    assert command.main([str(tmp_path / "none.pt")]) == 2
    torch.save({"shape": {}}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no model")
    for name in ("other.pt", "text.pt"):
        assert command.main([str(tmp_path / name)]) == 2
        assert "is no model of `python -m lab DIR --kind hybrid`" in capsys.readouterr().err
