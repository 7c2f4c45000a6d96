# SPDX-License-Identifier: Apache-2.0
"""What cannot be trained on is refused in one sentence; the mixture is what was asked for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.kvlink import folder
from recipes.kvlink.batch import SORTED_STEPS, Rows
from recipes.kvlink.examples import SHARES, DataError, Example, Mixture, parse, read
from recipes.kvlink.folder import ModelError
from tests.recipes.lab_folder import DOCUMENTS, MODEL, example, line, model_and_writer


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("qa", "[1]", "must be a mapping"),
        ("qa", "{", "is no JSON"),
        ("qa", json.dumps({"question": "a", "answer": "b"}), "has no 'documents'"),
        ("qa", line(documents=[]), "has no 'documents'"),
        ("qa", line(documents=["a", " "]), "each of 'documents' must be a text"),
        ("qa", json.dumps({"documents": ["a"], "question": "b"}), "has no text 'answer'"),
        ("qa", line(ordered=1), "must be true or false"),
        ("qa", line(questions=[1]), "each of 'questions' must be a mapping"),
        ("chat", json.dumps({"messages": [{"role": "user", "content": "a"}]}), "in turn"),
        ("summaries", json.dumps({"text": "a"}), "has no text 'summary'"),
        ("text", json.dumps({"text": ""}), "has no text 'text'"),
    ],
)
def test_a_bad_line_is_refused(kind: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        parse(text, kind, "data.jsonl:3")
    assert "data.jsonl:3" in str(refused.value)


def test_a_chat_of_one_turn_is_refused() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="one turn"):
        parse(json.dumps({"messages": said}), "chat", "x:1")
    found = parse(json.dumps({"messages": said + said}), "chat", "x:1")
    assert (found.documents, found.asked[0].answer, found.ordered) == (("a\nb",), "b", True)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no examples"):
        read(tmp_path / "empty.jsonl", "qa")


@pytest.mark.parametrize("token", ["<|kv_start|>", "<|kv_end|>", "<|link_1_1|>", "<|anchor_1|>"])
@pytest.mark.parametrize("where", ["documents", "question"])
def test_a_text_with_a_token_of_the_layout_is_refused(token: str, where: str) -> None:
    _, writer = model_and_writer(2, 2)
    held = f"w001 {token} w002"
    more: dict[str, Any] = {"documents": [held]}
    if where == "question":
        more = {"questions": [{"question": held, "answer": "n01"}]}
    with pytest.raises(DataError, match=r"data.jsonl:1 holds '<\|"):
        writer.row(example(**more))


def test_more_documents_than_link_tokens_are_refused() -> None:
    _, writer = model_and_writer(max_documents=2)
    with pytest.raises(DataError, match="3 documents, and there are link tokens for 2"):
        writer.row(example())
    assert writer.row(example("plain-qa"))


def test_a_row_that_is_too_long_is_refused_and_later_questions_are_left_out() -> None:
    _, writer = model_and_writer()
    whole = writer.row(example())
    _, shorter = model_and_writer(max_tokens=len(whole) - 1)
    assert max(shorter.row(example()).branch) == 1
    _, short = model_and_writer(max_tokens=40)
    with pytest.raises(DataError, match="raise --max-tokens"):
        short.row(example())


def test_a_model_without_rotary_positions_is_refused() -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    )
    with pytest.raises(ModelError, match="no rotary position embedding"):
        folder.require_rotary(model)


def test_a_model_that_knows_where_it_stands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_writer()
    folder.require_rotary(model)
    embed = model.model.embed_tokens.forward
    forward = model.forward

    def with_places(tokens: torch.Tensor, position_ids: torch.Tensor) -> Any:
        added = embed(tokens) + 0.1 * position_ids[..., None].float()
        return forward(inputs_embeds=added, position_ids=position_ids)

    monkeypatch.setattr(model, "forward", with_places)
    with pytest.raises(ModelError, match="positions are not relative"):
        folder.require_rotary(model)


def test_layers_with_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_writer()
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match="full attention only"):
        folder.require_rotary(model)


def test_a_tokenizer_that_lacks_a_promised_token_is_refused() -> None:
    from transformers import AutoTokenizer

    names = folder.names_for(1, 2, 8, 2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with pytest.raises(ModelError, match=r"promises the token '<.kv_start.>'"):
        folder.writer(tokenizer, names, 100)
    tokens = ["<|kv_start|>", "<|kv_end|>", "<|link_1_1|>", "<|link_2_1|>"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    with pytest.raises(ModelError, match=r"promises the token '<.anchor_1.>'"):
        folder.writer(tokenizer, names, 100)


def test_new_tokens_are_rows_of_the_embedding() -> None:
    model, writer = model_and_writer(5, 4, max_documents=8)
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows >= len(writer.tokenizer)
    assert rows % 64 == 0
    assert model.config.vocab_size == rows
    assert folder.known(model.config) == folder.names_for(5, 8, 8, 4)


def test_a_contradicting_folder_is_refused() -> None:
    model, _ = model_and_writer()
    model.config.segreuse["link_tokens"] = -1
    with pytest.raises(ModelError, match="link_tokens=-1"):
        folder.known(model.config)


def _examples(kind: str) -> list[Example]:
    return [example(documents=[f"{kind} {i}", "b", "c"], ordered=False) for i in range(5)]


def test_kinds_without_a_file_fall_out_and_the_others_keep_their_ratio() -> None:
    given = {kind: _examples(kind) for kind in ("qa", "instructions")}
    mixture = Mixture(given, SHARES, seed=0)
    drawn = [mixture.draw(number) for number in range(2000)]
    kinds = Counter(next(d.split()[0] for d in one.documents if " " in d) for one in drawn)
    assert 0.21 < kinds["qa"] / 2000 < 0.29
    assert kinds.total() == 2000


def test_documents_are_shuffled_unless_they_are_ordered() -> None:
    mixture = Mixture({"qa": [example(ordered=False)]}, {"qa": 1.0}, seed=0)
    assert len({mixture.draw(number).documents for number in range(60)}) == 6
    assert [mixture.draw(7), mixture.draw(8)] == [mixture.draw(7), mixture.draw(8)]
    ordered = Mixture({"qa": [example()]}, {"qa": 1.0}, seed=0)
    assert {ordered.draw(number).documents for number in range(20)} == {DOCUMENTS}


def test_a_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no data"):
        Mixture({"qa": [example()]}, {"qa": 0.0}, seed=0)


def test_a_summary_has_its_text_in_segments() -> None:
    _, writer = model_and_writer(2)
    given = {"text": " ".join(["w001"] * 250), "summary": "n01"}
    row = writer.row(parse(json.dumps(given | {"question": "read"}), "summaries", "x:1"))
    assert Counter(row.document) == {1: 102, 2: 102, 3: 52, 0: row.document.count(0)}


def test_the_template_keeps_the_models_own_behind_the_documents() -> None:
    class Tokenizer:
        chat_template = "own"

    found = folder.template_of(Tokenizer(), folder.names_for(3, 2), None)
    assert found.endswith("own")
    assert "set link_tokens = 3" in found
    assert "for message in" not in found


def test_rows_of_a_step_are_about_equally_long() -> None:
    _, writer = model_and_writer(1)
    data = [example(documents=DOCUMENTS[: 1 + number % 3]) for number in range(7)]
    mixture = Mixture({"qa": data}, {"qa": 1.0}, seed=0)
    step, window = 4, 4 * SORTED_STEPS
    given = Rows(mixture, writer, 0, 2 * window, step)
    rows = [given[number] for number in range(len(given))]
    lengths = [len(row) for row in rows]
    assert lengths[:window] == sorted(lengths[:window])
    assert lengths[window:] == sorted(lengths[window:])
    drawn = [writer.row(mixture.draw(number)).token for number in range(window)]
    assert sorted(row.token for row in rows[:window]) == sorted(drawn), "each is drawn once"
    later = Rows(mixture, writer, window + 3, 5, step)
    assert [later[i].token for i in range(5)] == [rows[window + 3 + i].token for i in range(5)]


def test_new_tokens_can_be_told_apart() -> None:
    model, writer = model_and_writer(2, 4, max_documents=3)
    known = writer.tokenizer.get_vocab()["<|kv_start|>"]
    rows = model.get_input_embeddings().weight.detach()
    new = rows[known : len(writer.tokenizer)]
    apart = torch.cdist(new, new) + torch.eye(len(new)) * 9
    old = rows[20:known]
    assert apart.min() > torch.cdist(old, old).median() / 2
