# SPDX-License-Identifier: Apache-2.0
"""The command: a folder that serves, the same weights after a stop, one sentence for bad input.

What trains needs accelerate and peft (requirements/kvlink.txt), which the package does not.
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.kvlink import folder, plot, train
from segreuse_extras.trained.layout import Names
from tests.recipes.lab_folder import MODEL, TEMPLATE, line

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate is not installed (requirements/kvlink.txt)",
)
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed (requirements/kvlink.txt)",
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "qa.jsonl"
    file.write_text(line() + "\n" + line(ordered=False) + "\n")
    return file


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    options = ["--qa", str(data), "--chat-template", str(TEMPLATE), "--cpu", "--link-tokens", "1"]
    options += ["--max-documents", "4", "--steps", "4", "--batch", "2", "--accumulate", "1"]
    options += ["--rate", "1e-3", "--warm-up", "1", "--save-every", "2", "--log-every", "1"]
    return [str(MODEL), str(out), *options, *more]


def refused(capsys: pytest.CaptureFixture[str], given: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        train.main(given)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def _accelerate_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_require_packages", lambda _: None)


@pytest.mark.usefixtures("_accelerate_is_there")
def test_bad_input_is_one_sentence(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    told = refused(capsys, [str(MODEL), str(out), "--qa", str(tmp_path / "bad.jsonl"), "--cpu"])
    assert "bad.jsonl:1 has no 'documents'" in told
    assert "no data: name a file with one of" in refused(capsys, [str(MODEL), str(out), "--cpu"])
    assert "No such file" in refused(capsys, [str(MODEL), str(out), "--qa", str(tmp_path / "no")])
    assert "3 documents" in refused(capsys, arguments(data, out, "--max-documents", "2"))
    assert "there are qa," in refused(capsys, arguments(data, out, "--shares", "quiz=1"))
    assert "link_tokens=-1" in refused(capsys, arguments(data, out, "--link-tokens", "-1"))
    assert not (out / "config.json").exists()


def test_missing_packages_are_named(
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "requirements/kvlink.txt" in refused(capsys, arguments(data, tmp_path / "out"))


class _Stopped(Exception):  # noqa: N818 - no error
    pass


@needs_accelerate
def test_a_stopped_training_ends_with_the_same_weights_and_serves(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.main(arguments(data, tmp_path / "whole"))
    whole_class = train.trainer_class(0.0)

    class Stopping(whole_class):  # type: ignore[misc, valid-type]
        def training_step(self, *given: Any, **options: Any) -> Any:
            if self.state.global_step == 3:
                raise _Stopped
            return super().training_step(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(train, "trainer_class", lambda _: Stopping)
        with pytest.raises(_Stopped):
            train.main(arguments(data, tmp_path / "stopped"))
    train.main(arguments(data, tmp_path / "stopped"))
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in _BOTH)
    before = load_file(MODEL / "model.safetensors")
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    norm = "model.norm.weight"
    assert whole[norm].dtype == before[norm].dtype == torch.bfloat16
    assert not torch.equal(whole[norm], before[norm])
    _check_serves(tmp_path / "whole")


_BOTH = ("whole", "stopped")


def _check_serves(out: Path) -> None:
    from transformers import AutoTokenizer

    names = Names.of_config(json.loads((out / "config.json").read_text())["segreuse"])
    assert names is not None
    tokenizer = AutoTokenizer.from_pretrained(out)
    layout = names.layout(tokenizer.get_vocab().get)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "? value v57 : v57"}],
        documents=[{"text": "let v57 = n01 ."}, {"text": "w001"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    spans = layout.spans(tokenizer.encode(prompt, add_special_tokens=False))
    assert [stop - start for start, stop in spans] == [7, 3]
    assert (out / "training.svg").read_text().startswith("<?xml")
    assert [json.loads(one)["step"] for one in (out / "curve.jsonl").read_text().splitlines()]


@needs_accelerate
def test_anchors_are_trained_in_two_stages(tmp_path: Path, data: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "let v57 = n01 . w001 let v57 = n01 . w002"}) + "\n")
    anchors = ["--anchor-tokens", "2", "--chunk-tokens", "4", "--steps", "2"]
    first = arguments(data, tmp_path / "text", *anchors)
    first[first.index("--qa") : first.index("--qa") + 2] = ["--text", str(text)]
    train.main(first)
    second = arguments(data, tmp_path / "out", "--steps", "2")
    train.main([str(tmp_path / "text"), *second[1:]])
    block = json.loads((tmp_path / "out" / "config.json").read_text())["segreuse"]
    assert block["anchors"]["anchor_tokens"] == 2
    assert block["link_tokens"] == 1


@needs_accelerate
@needs_peft
def test_low_rank_updates_are_merged(tmp_path: Path, data: Path) -> None:
    train.main(arguments(data, tmp_path / "out", "--lora", "4", "--steps", "2"))
    before = load_file(MODEL / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].shape == before[name].shape
    assert not torch.equal(after[name], before[name])


def test_the_picture_has_loss_and_accuracy(tmp_path: Path) -> None:
    entries = [{"step": step, "loss": 1 / step, "accuracy": 0.5} for step in (1, 2)]
    (tmp_path / "curve.jsonl").write_text("".join(json.dumps(one) + "\n" for one in entries))
    plot.write(tmp_path)
    assert "steps" in (tmp_path / "training.svg").read_text()


def layout_of(said: Names | None, *options: str) -> Names:
    """What training goes on with, of a folder that says so."""
    config = SimpleNamespace(segreuse=said and said.block())
    given = train.parser().parse_args(["FOLDER", "OUT", *options])
    return train.wanted_names(given, SimpleNamespace(config=config))


def test_a_folder_keeps_its_layout() -> None:
    made = folder.names_for(1, 4)
    assert layout_of(made) == layout_of(made, "--link-tokens", "1", "--max-documents", "4") == made
    assert layout_of(None) == folder.names_for(5, 10)
    assert layout_of(None, "--link-tokens", "0", "--anchor-tokens", "8") == folder.names_for(
        0, 10, 100, 8
    )


@pytest.mark.parametrize(
    ("said", "options", "told"),
    [
        (folder.names_for(1, 4), "--link-tokens 5", "--link-tokens 5 does not fit FOLDER, which"),
        (folder.names_for(1, 4), "--link-tokens 0", "which has 1: leave the option out"),
        (folder.names_for(1, 4), "--max-documents 10", "--max-documents 10 does not fit"),
        (folder.names_for(1, 4, 16, 8), "--anchor-tokens 0", "--anchor-tokens 0 does not fit"),
        (folder.names_for(1, 4), "--chunk-tokens 16", "give --anchor-tokens, too"),
        (None, "--chunk-tokens 16", "give --anchor-tokens, too"),
    ],
)
def test_another_layout_than_that_of_the_folder_is_refused(
    said: Names | None, options: str, told: str
) -> None:
    with pytest.raises(folder.ModelError, match=told):
        layout_of(said, *options.split())


def test_anchors_of_a_folder_may_be_others_than_before() -> None:
    made = folder.names_for(1, 4, 16, 8)
    assert made.anchors is not None
    named = replace(made, anchors=made.anchors._replace(anchor_token="<|a{index}|>"))
    assert layout_of(named) == named
    fewer = layout_of(named, "--anchor-tokens", "4").anchors
    assert fewer == (16, 4, "<|a{index}|>")
    assert layout_of(folder.names_for(1, 4), "--anchor-tokens", "4") == folder.names_for(
        1, 4, 100, 4
    )


def test_a_folder_says_what_it_was_trained_for() -> None:
    names = folder.names_for(5, 8, 16, 4)
    assert names.block()["anchors"] == {
        "chunk_tokens": 16,
        "anchor_tokens": 4,
        "anchor_token": "<|anchor_{index}|>",
    }
    assert "anchors" not in folder.names_for(5, 8).block()
