# SPDX-License-Identifier: Apache-2.0
"""What a training row computes is what the server computes: prompts of their own, step by step."""

from typing import Any

import pytest
import torch

from recipes.kvlink import attention, mask
from recipes.kvlink.batch import Collator
from recipes.kvlink.rows import UNLEARNT, Row, Writer
from tests.recipes.lab_folder import DOCUMENTS, QUESTIONS, example, model_and_writer

CLOSE = 1e-4
Kv = list[tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def logits_of(model: Any, rows: list[Row], has_anchors: bool = False) -> torch.Tensor:
    attention.register()
    model.set_attn_implementation(attention.NAME if has_anchors else "sdpa")
    batch = Collator(model, 0, has_anchors, False)(rows)
    del batch["labels"]
    found: torch.Tensor = model(**batch).logits
    return found


def of_branch(row: Row, number: int, shared: bool) -> list[int]:
    return [i for i, branch in enumerate(row.branch) if branch == number or (shared and not branch)]


@torch.no_grad()
def isolated_logits(model: Any, writer: Writer, tokens: list[int]) -> torch.Tensor:
    """Of one prompt, each document seeing itself only."""
    model.set_attn_implementation("sdpa")
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for start, stop in writer.layout.spans(tokens):
        sees[start:stop, :start] = False
    added = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
    found: torch.Tensor = model(torch.tensor([tokens]), attention_mask=added[None, None]).logits[0]
    return found


@pytest.mark.parametrize("link_tokens", [0, 1, 5])
def test_every_question_of_a_row_is_computed_as_in_its_own_prompt(link_tokens: int) -> None:
    model, writer = model_and_writer(link_tokens)
    row = writer.row(example())
    short = writer.row(example(documents=DOCUMENTS[:1]))
    found = logits_of(model, [row, short])
    for number in range(1, len(QUESTIONS) + 1):
        where = of_branch(row, number, shared=True)
        tokens = [row.token[i] for i in where]
        assert [row.position[i] for i in where] == list(range(len(where)))
        wanted = isolated_logits(model, writer, tokens)
        assert (found[0, where] - wanted).abs().max() < CLOSE
    where = of_branch(short, 1, shared=True)
    wanted = isolated_logits(model, writer, [short.token[i] for i in where])
    assert (found[1, where] - wanted).abs().max() < CLOSE, "padding was seen"


def test_plain_context_is_computed_causally() -> None:
    model, writer = model_and_writer()
    row = writer.row(example("plain-qa"))
    assert not writer.layout.special.intersection(row.token)
    wanted = isolated_logits(model, writer, row.token)
    assert (logits_of(model, [row])[0] - wanted).abs().max() < CLOSE


def test_only_answers_are_learnt() -> None:
    _, writer = model_and_writer()
    row = writer.row(example())
    learnt = [label for label in row.label if label != UNLEARNT]
    words = writer.tokenizer.convert_ids_to_tokens(learnt)
    assert words == ["n23", ".", "<eos>", "n56", ".", "<eos>"]


class StepByStep:
    """A prompt with compressed documents as the server computes it: ordinary prompts, one by one.

    Only the anchors of a chunk are kept, moved to stand behind those of the chunk before.
    """

    def __init__(self, model: Any, writer: Writer) -> None:
        model.set_attn_implementation("sdpa")
        assert writer.anchors is not None
        self.model, self.anchors = model, writer.anchors

    def document(self, tokens: list[int]) -> Kv:
        """KV of start token, anchors and end token, from position 0 on."""
        start, *text, end = tokens
        _, entry = self.run([start], None, 0)
        place = 1
        for cut in range(0, len(text), self.anchors.chunk_tokens):
            part = text[cut : cut + self.anchors.chunk_tokens]
            behind = list(self.anchors.behind(len(part)))
            _, new = self.run([*part, *behind], entry, place)
            kept = [(k[:, :, len(part) :], v[:, :, len(part) :]) for k, v in new]
            entry = joined(entry, self.moved(kept, -len(part)))
            place += len(behind)
        _, new = self.run([end], entry, place)
        return joined(entry, new)

    @torch.no_grad()
    def run(self, tokens: list[int], known: Kv | None, place: int) -> tuple[torch.Tensor, Kv]:
        from transformers import DynamicCache

        cache = DynamicCache()
        count = known[0][0].shape[2] if known else 0
        for layer, (key, value) in enumerate(known or ()):
            cache.update(key, value, layer)
        positions = torch.arange(place, place + len(tokens))[None]
        out = self.model(
            torch.tensor([tokens]), past_key_values=cache, position_ids=positions, use_cache=True
        )
        new = [(one.keys[:, :, count:], one.values[:, :, count:]) for one in cache.layers]
        return out.logits[0], new

    def moved(self, kv: Kv, by: int) -> Kv:
        rotary = self.model.model.rotary_emb
        length = kv[0][0].shape[2]
        cos, sin = rotary(torch.zeros(1), torch.full((1, length), by))
        return [(attention.turned(key, cos, sin), value) for key, value in kv]


def joined(first: Kv, second: Kv) -> Kv:
    return [
        (torch.cat((a[0], b[0]), 2), torch.cat((a[1], b[1]), 2))
        for a, b in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("anchor_tokens", [2, 4])
def test_compressed_documents_are_computed_as_step_by_step(anchor_tokens: int) -> None:
    model, writer = model_and_writer(2, anchor_tokens)
    row = writer.row(example())
    found = logits_of(model, [row], has_anchors=True)[0]
    steps = StepByStep(model, writer)
    prompt, answer = writer.prompts(example())[0]
    known: Kv | None = None
    place, before = 0, 0

    def compute(tokens: list[int]) -> torch.Tensor:
        nonlocal known, place
        logits, new = steps.run(tokens, known, place)
        known, place = new if known is None else joined(known, new), place + len(tokens)
        return logits

    for start, stop in writer.layout.spans(prompt):
        compute(prompt[before:start])
        entry = steps.moved(steps.document(prompt[start:stop]), place)
        assert known is not None
        known, place, before = joined(known, entry), place + entry[0][0].shape[2], stop
    wanted = compute([*prompt[before:], *answer])
    where = of_branch(row, 1, shared=False)
    assert [row.position[i] for i in where][-1] == place - 1
    assert (found[where] - wanted[-len(where) :]).abs().max() < CLOSE


@pytest.mark.parametrize(("anchor_tokens", "saved"), [(4, 0.5), (2, 0.75)])
def test_anchors_stand_for_their_share_of_the_text(anchor_tokens: int, saved: float) -> None:
    _, writer = model_and_writer(0, anchor_tokens)
    row = writer.row(example(documents=["w001 " * 32]))
    text = sum(
        chunk > 0 and not anchor for chunk, anchor in zip(row.chunk, row.anchor, strict=True)
    )
    assert text == 32
    assert sum(row.anchor) == (1 - saved) * text


def test_half_of_a_text_is_compressed_and_the_other_learnt() -> None:
    _, writer = model_and_writer(2, 2)
    row = writer.row(example().__class__("x", text=" ".join(f"w{i:03d}" for i in range(40))))
    learnt = [label for label in row.label if label != UNLEARNT]
    assert writer.tokenizer.convert_ids_to_tokens(learnt) == [f"w{i:03d}" for i in range(20, 40)]
    assert sum(row.anchor) == 2 + 2 + 1


def test_flex_attention_gets_the_same_mask() -> None:
    _, writer = model_and_writer(1, 2)
    row = writer.row(example())
    places = mask.Places(
        *(torch.tensor([getattr(row, name)]) for name in ("document", "branch", "chunk", "anchor"))
    )
    length = len(row)
    blocks = mask.block_mask(places, True)
    index = torch.arange(length)
    of_blocks = blocks.mask_mod(
        torch.tensor(0), torch.tensor(0), index[:, None], torch.arange(2 * length)[None]
    )
    assert torch.equal(of_blocks, mask.seen(places, True)[0, 0])


def test_short_rows_are_computed_as_torch_computes_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, writer = model_and_writer(1, anchor_tokens=4)
    rows = [writer.row(example())]
    found = logits_of(model, rows, has_anchors=True)
    monkeypatch.setattr(attention, "SHORT", 0)
    monkeypatch.setattr(attention, "products", None)
    assert (logits_of(model, rows, has_anchors=True) - found).abs().max() < CLOSE
