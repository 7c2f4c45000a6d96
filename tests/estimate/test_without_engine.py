# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse estimate` of traces, and of texts where there is no engine."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as FromBytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.harness import REPOSITORY
from bench.shapes import make_model
from segreuse_tools.commands import estimate as cli
from segreuse_tools.estimate.gain import Gain, SizeRow
from segreuse_tools.estimate.light_options import sizes
from segreuse_tools.estimate.light_rendering import (
    COMPLETION_TOKENS,
    MOST_SEQUENCES,
    BodyPrompts,
    ChatTokenizer,
)
from segreuse_tools.estimate.prompts import PromptTokens
from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.model_folder import InputError
from tests.estimate import logs
from tests.estimate.test_traces import MOONCAKE, ragpulse, turn, write_ragpulse, write_weka

LAB = REPOSITORY / "models" / "lab"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; (exit status, standard output, standard error)."""

    def running(path: Path, *options: str) -> tuple[int, str, str]:
        status = cli.main([str(path), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return running


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = random.Random(0)
    lines = [ragpulse(number, rng.sample(range(9), 2), number) for number in range(30)]
    return write_ragpulse(tmp_path, lines, tokens=150)


def test_a_trace_needs_neither_a_model_nor_an_engine(trace: Path) -> None:
    program = f"""
import sys
from segreuse_tools.cli import main
status = main(["estimate", {str(trace)!r}, "--json"])
found = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
print(found, file=sys.stderr)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert json.loads(done.stdout)["requests"] == 30


def test_the_table_and_json_say_the_same(trace: Path, run: Any) -> None:
    status, out, err = run(trace, "--json", "--cache-tokens", "1K,unlimited", "--policy", "auto")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert [*found] == [it.name for it in fields(Gain)]
    assert [*found["sizes"][0]] == [it.name for it in fields(SizeRow)]
    assert [row["cache_tokens"] for row in found["sizes"]] == [1000, None]
    status, out, _ = run(trace, "--cache-tokens", "unlimited,1K", "--policy", "auto")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(
        "log       RAGPulse: 30 requests, 10,470 prompt tokens (median about"
    )
    for name, field in (("prefix caching", "prefix_share"), ("any position, this plugin", None)):
        rows = [line.strip() for line in lines if line.strip().startswith(f"{name}  ")]
        cells = [row.removeprefix(name).split() for row in rows]
        field = field or "any_position_share"
        assert cells[0] == [f"{row[field]:.1%}" for row in found["sizes"]]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_enough_is_no_error(form: list[str], trace: Path, to_nobody: Any) -> None:
    assert to_nobody(lambda: cli.main([str(trace), "--policy", "shift", *form])) == (1, "")


def test_a_slice_begins_with_empty_caches(trace: Path, run: Any) -> None:
    options = ("--json", "--policy", "shift", "--cache-tokens", "unlimited")
    whole = json.loads(run(trace, *options)[1])
    first = json.loads(run(trace, *options, "--requests", "10")[1])
    one = json.loads(run(trace, *options, "--start", "29")[1])
    assert [it["requests"] for it in (whole, first, one)] == [30, 10, 1]
    assert one["sizes"][0]["prefix_share"] == 0 < first["sizes"][0]["prefix_share"]
    status, out, err = run(trace, *options, "--start", "30")
    assert (status, out) == (2, "")
    assert "holds nothing behind the first 30 requests that can be replayed" in err


def test_what_is_written_gains_what_the_trace_does(tmp_path: Path, run: Any) -> None:
    rng = random.Random(1)
    lines = [ragpulse(5 + number / 4, rng.sample(range(9), 2), number) for number in range(20)]
    trace, file = write_ragpulse(tmp_path, lines, tokens=160), tmp_path / "written" / "ids.jsonl"
    options = ("--json", "--policy", "shift", "--cache-tokens", "2K,unlimited")
    status, _, err = run(trace, *options, "--write", str(file))
    assert (status, f"cannot write {file}" in err) == (2, True)
    file.parent.mkdir()
    status, out, _ = run(trace, *options, "--write", str(file), "--start", "4")
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert (status, len(written)) == (0, 16)
    assert [line["timestamp"] for line in written[:3]] == [0, 250, 500], "milliseconds"
    assert {line["input_length"] for line in written} == {16 * (2 + 20 + 1)}
    assert all(16 * len(line["hash_ids"]) == line["input_length"] for line in written)
    assert max(id for line in written for id in line["hash_ids"]) < 1 << 53
    found, again = json.loads(out), json.loads(run(file, *options)[1])
    for one, other in zip(found["sizes"], again["sizes"], strict=True):
        assert one["prefix_share"] == pytest.approx(other["prefix_share"], abs=0.02)
        assert one["any_position_share"] == pytest.approx(other["any_position_share"], abs=0.02)
    status, *_ = run(trace, *options, "--write", str(file), "--write-block-size", "1")
    lengths = [json.loads(line)["input_length"] for line in file.read_text().splitlines()]
    assert (status, sum(lengths)) == (0, json.loads(run(trace, *options)[1])["prompt_tokens"])


def test_what_is_read_is_not_overwritten(trace: Path, tmp_path: Path, run: Any) -> None:
    content, link = trace.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(trace)
    for option in ("--write", "--plot"):
        for out in (trace, link):
            status, found, err = run(trace, option, str(out))
            assert (status, found) == (2, "")
            assert f"{out} is read, and would be overwritten: name another file" in err
    assert run(trace.parent, "--write", str(trace))[0] == 2, "it is one of the folder's files"
    assert trace.read_bytes() == content


def test_conversations_are_written_one_behind_the_other(tmp_path: Path, run: Any) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for name in ("a", "b"):
        turns = [turn(3 + 10 * n, 64 * (n + 1), [*range(n + 1)]) for n in range(2)]
        write_weka(traces / f"{name}.json", *turns)
    file = tmp_path / "ids.jsonl"
    assert run(traces, "--policy", "shift", "--write", str(file))[0] == 0
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["timestamp"] for line in written] == [0, 10_000, 10_000, 20_000]
    assert written[1]["hash_ids"][:4] == written[0]["hash_ids"]
    assert not {*written[3]["hash_ids"]} & {*written[1]["hash_ids"]}


def test_lines_that_are_left_out_or_sorted_are_said(tmp_path: Path, run: Any) -> None:
    lines = [MOONCAKE | {"timestamp": time} for time in (4, 5, 2)]
    file = logs.write(tmp_path / "t.jsonl", [*lines, {"prompt": "a"}])
    status, out, _ = run(file, "--policy", "shift")
    assert status == 0
    assert "left out  1 request (line 4): is no line of a trace of hash ids\n" in out
    assert "sorted    1 request (line 3): its time is before that of a line in front of it\n" in out
    assert "In Mooncake's traces an id stands for a block and all in front of it" in out
    status, out, err = run(file, "--strict")
    assert (status, out) == (2, "")
    assert "line 3: its time is before that of a line in front of it" in err


def test_nothing_that_can_be_replayed_is_bad_input(tmp_path: Path, run: Any) -> None:
    file = logs.write(tmp_path / "t.jsonl", [MOONCAKE | {"input_length": None}])
    status, out, err = run(file)
    assert (status, out) == (2, "")
    assert "holds nothing that can be replayed: 1 request (line 1): input_length=None" in err


def test_conversations_that_only_grow_are_told_what_helps_them(tmp_path: Path, run: Any) -> None:
    turns = [turn(n, 640 * (n + 1), [*range(10 * (n + 1))]) for n in range(9)]
    status, out, _ = run(write_weka(tmp_path / "c.json", *turns), "--cache-tokens", "1K,1M")
    assert status == 0
    assert "reuse at any position adds nothing here" in out
    assert "8 requests do not fit into 1K tokens" in out


def test_a_plot_is_written(trace: Path, tmp_path: Path, run: Any) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    file = tmp_path / "plot.svg"
    assert run(trace, "--plot", str(file), "--policy", "shift")[0] == 0
    assert "<svg" in file.read_text(encoding="utf-8")
    status, out, err = run(trace, "--plot", str(tmp_path / "no" / "plot.svg"), "--policy", "shift")
    assert (status, "cannot write" in err) == (2, True)
    assert "RAGPulse: 30 requests" in out, "what was found is said all the same"
    assert pyplot.get_fignums() == [], "a service that draws thousands does not keep them"


def test_times_come_from_a_data_sheet_or_a_measurement(
    trace: Path, tmp_path: Path, run: Any
) -> None:
    options = ("--json", "--policy", "shift", "--cache-tokens", "1M")

    def times(*device: str) -> list[float]:
        status, out, err = run(trace, *options, *device)
        assert status == 0, err
        return json.loads(out)["sizes"][0]["policies"][0]["first_token_s"]

    plain = times("--prefill-tokens-per-second", "1000")
    assert 0.1 < plain[0] <= plain[1] < 0.36
    slower = times(
        *("--prefill-tokens-per-second", "1000", "--attention-pairs-per-second", "100000")
    )
    assert slower[0] > 1.5 * plain[0]
    file = tmp_path / "speed.json"
    rows = [
        {"shape": "s", "mode": "full", "prompt_tokens": n, "median_ms": n + n * (n + 1) / 200}
        for n in (100, 1000, 10_000)
    ]
    file.write_text(json.dumps({"rows": rows}))
    assert times("--speed", str(file)) == pytest.approx(slower, rel=0.02)
    for wrong in ("{}", "[]", '{"rows": [1]}'):
        file.write_text(wrong)
        status, _, err = run(trace, *options, "--speed", str(file))
        assert (status, "has no times of full prefills" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--num-blocks", "9"], "--num-blocks needs vLLM and a log of texts"),
        (["--concurrency", "2"], "--concurrency needs vLLM and a log of texts"),
        (["--max-model-len", "9"], "unknown arguments: --max-model-len 9"),
        (["--policy", "exact"], "policy exact finds what prefix caching finds"),
        (["--attention-pairs-per-second", "9"], "needs --prefill-tokens-per-second"),
        (["--speed", "none.json"], "cannot read none.json"),
        (["--write-block-size", "9"], "--write-block-size needs --write FILE.jsonl"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str], why: str, trace: Path, run: Any
) -> None:
    status, out, err = run(trace, *options)
    assert (status, out) == (2, "")
    assert why in err


@pytest.mark.parametrize("size", ["15", "268435457", "1G", "9", "x", "-1M", "", "1T", "nan", "inf"])
def test_sizes_of_caches_are_tokens(size: str, trace: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(trace), f"--cache-tokens={size}"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("16", (16,)),
        ("268435456", (1 << 28,)),
        ("1M,unlimited,0.3k, 100_000 ", (300, 100_000, 1_000_000, None)),
        ("0.2G,0.2g", (200_000_000,)),
    ],
)
def test_sizes_of_caches_ascend(text: str, found: tuple[int | None, ...]) -> None:
    assert sizes(text) == found


def test_what_is_not_given_is_what_the_help_says(trace: Path, run: Any) -> None:
    usual = [
        *("--block-size", "16", "--cache-tokens", "100K,300K,1M,unlimited", "--engines", "1"),
        *("--router", "session", "--layers", "32", "--answer-tokens", "128", "--start", "0"),
    ]
    options = ("--json", "--policy", "sparsex")
    assert run(trace, *options) == run(trace, *options, *usual)
    found = json.loads(run(trace, *options)[1])
    assert (found["block_size"], found["engines"], found["tier_tokens"]) == (16, 1, 0)
    assert found["sizes"][0]["tier_prefix_share"] is None
    written = trace.parent / "ids.json.txt"
    assert run(trace, *options, "--write", str(written))[0] == 0
    by_default = written.read_text()
    assert run(trace, *options, "--write", str(written), "--write-block-size", "16")[0] == 0
    assert written.read_text() == by_default


def test_a_terminal_is_shown_how_much_has_been_read(
    trace: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, str]] = []

    def update(self: Any, task: Any, *, completed: int, description: str) -> None:
        moved.append((completed, description))

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.progress.Progress.update", update)
    options = ("--policy", "shift", "--cache-tokens", "1K")
    run(trace, *options)
    assert moved == [], "a movement every fifty prompts"
    text = trace.read_text()
    trace.write_text(text * 4)
    run(trace, *options)
    # All of it is read before the first is replayed: they are sorted by their times.
    size = trace.stat().st_size
    assert moved == [(size, "RAGPulse: 50 requests"), (size, "RAGPulse: 100 requests")]


def test_engines_and_tiers_are_those_that_are_asked_for(trace: Path, run: Any) -> None:
    options = ("--json", "--policy", "shift", "--cache-tokens", "1K,unlimited")
    more = ("--engines", "2", "--router", "documents", "--tier-tokens", "2K", "--block-size", "8")
    found = json.loads(run(trace, *options, *more)[1])
    names = ("engines", "router", "tier_tokens", "block_size")
    assert [found[name] for name in names] == [2, "documents", 2000, 8]
    small, unlimited = found["sizes"]
    assert small["tier_any_position_share"] > 0
    assert unlimited["tier_any_position_share"] is None


LEAST_AND_MOST = [
    ("--start", "0", "-1"),
    ("--requests", "1", "0"),
    ("--block-size", "1", "0"),
    ("--num-blocks", "2", "1"),
    ("--kv-gib", "0", "-0.1"),
    ("--concurrency", "1", "0"),
    ("--tokens-per-second", "1", "0.9"),
    ("--answer-tokens", "1", "0"),
    ("--engines", "1", "0"),
    ("--engines", "1024", "1025"),
    ("--layers", "2", "1"),
    ("--layers", "4096", "4097"),
    ("--trace-block-size", "1", "0"),
    ("--prefill-tokens-per-second", "1", "0.9"),
    ("--attention-pairs-per-second", "1", "0.9"),
    ("--write-block-size", "1", "0"),
    ("--tier-tokens", "16", "unlimited"),
]


@pytest.mark.parametrize(("option", "last", "beyond"), LEAST_AND_MOST)
def test_numbers_are_bounded(
    option: str, last: str, beyond: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is within bounds is refused for another reason: there is no such file."""
    assert cli.main(["none.jsonl", f"{option}={last}"]) == 2
    assert "cannot read none.jsonl" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["none.jsonl", f"{option}={beyond}"])
    assert ended.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_options_are_not_abbreviated(trace: Path, run: Any) -> None:
    status, _, err = run(trace, "--cache-tok", "1M")
    assert (status, "unknown arguments: --cache-tok 1M" in err) == (2, True)


# Texts.


def test_texts_are_replayed_without_an_engine(tmp_path: Path, run: Any) -> None:
    file = logs.write(tmp_path / "log.jsonl", logs.bodies(30))
    model = str(make_model("llama"))
    options = ("--model", model, "--extra-keys", "docs", "--json", "--policy", "shift")
    status, out, err = run(file, *options, "--without-engine", "--cache-tokens", "unlimited")
    assert status == 0, err
    (size,) = json.loads(out)["sizes"]
    assert size["whole_prefix_share"] is None
    assert size["any_position_share"] > 0.5
    assert size["prefix_share"] < 0.3


def test_texts_with_an_engine_have_its_options(tmp_path: Path, run: Any) -> None:
    file = logs.write(tmp_path / "log.jsonl", logs.bodies(3))
    status, _, err = run(file, "--model", str(LAB), "--cache-tokens", "1M")
    assert (status, "--cache-tokens is for traces of ids, or --without-engine" in err) == (2, True)
    status, _, err = run(file, "--without-engine", "--write", "ids.jsonl")
    assert (status, "--write is for traces of ids" in err) == (2, True)
    for options in ([], ["--without-engine"]):
        status, _, err = run(file, *options)
        assert (status, "name a model for its texts (--model)" in err) == (
            2,
            True,
        )


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images, audio or video"),
        ({"messages": "Who?"}, "messages must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "each message must be an object with a role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content must be a text, or a list"),
        ({"prompt": 7}, "prompt must be a text, or ids of tokens below"),
        ({"prompt": [10**6]}, "prompt must be a text, or ids of tokens below"),
        ({"prompt": []}, "has no tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"prompt": "a", "n": "x"}, "n must be at least 1, got 'x'"),
        ({"prompt": "a", "n": 10**9}, "n must be at most 16384 (VLLM_MAX_N_SEQUENCES), got 10"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n must be 1 with temperature=0, got 2"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a text that is not empty"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt must be a text that is not empty"),
        ({"prompt": "a", "extra_keys": [7]}, "extra_keys: the key 7 must be a string"),
        ({"prompt": "a", "extra_keys": 7}, "extra_keys=7 must be a string or a list of 1 to 16"),
        ({"prompt": "a", "extra_keys": []}, "extra_keys=[] (0 keys) must be a string or a list"),
        ({"prompt": "a", "extra_keys": ""}, "extra_keys: the key '' must be 1 to 256 bytes"),
        ({"prompt": "a", "vllm_xargs": {"extra_keys": True}}, "extra_keys=True must be a string"),
        (
            {"prompt": "a", "extra_keys": "a", "vllm_xargs": {"extra_keys": "b"}},
            "extra_keys is given twice",
        ),
        ({"prompt": "a\ud83d"}, "holds half of a surrogate pair"),
        ({"prompt": "a", "answer": "\udc00"}, "holds half of a surrogate pair"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, "must be a text"),
        ({"messages": [{"role": "assistant", "content": [None]}]}, "content must be a text"),
        ({"input": "a"}, "must be the body of a completion"),
        ([], "must be the body of a completion"),
    ],
)
def test_a_bad_text_is_named_and_counted(line: Any, why: str, tmp_path: Path, run: Any) -> None:
    file = logs.write(tmp_path / "log.jsonl", [{"prompt": "Who may sign?"}, line])
    options = ("--model", str(LAB), "--without-engine", "--policy", "shift")
    status, out, err = run(file, *options, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["requests"] == 1
    ((reason),) = found["left_out"]
    assert (reason["requests"], reason["lines"]) == (1, [2])
    assert why in reason["reason"]
    status, out, err = run(file, *options, "--strict")
    assert (status, out) == (2, "")
    assert "line 2" in err


@pytest.mark.parametrize("options", [(), ("--without-engine", "--model", str(LAB))])
def test_a_log_that_can_be_read_once_only_is_refused(options: tuple[str, ...], run: Any) -> None:
    read, write = os.pipe()
    os.write(write, b'{"prompt": "a"}\n')
    os.close(write)
    file = Path(f"/dev/fd/{read}")
    status, out, err = run(file, *options)
    os.close(read)
    assert (status, out) == (2, "")
    assert err.endswith(
        f"{file} is no regular file, and logs are read more than once: write it to one\n"
    )


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A tokenizer of bytes, so that the text can be read off the tokens."""
    letters = {letter: id for id, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(letters, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = FromBytes()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text_of(folder: Path, template: Any = None, **body: Any) -> str:
    """What a template makes of a conversation; None: the folder's own."""
    if template is not None:
        write_tokenizer(folder, chat_template=template)
    tokens = ChatTokenizer(folder).chat("here", {"messages": WHO} | body)
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens.tolist()))


WHO = [{"role": "user", "content": "Who?"}]


def test_the_chat_template_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for it in messages %}{{ it.role }}: {{ it.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    write_tokenizer(tmp_path, bos_token="<bos>", chat_template="another")
    (tmp_path / "chat_template.jinja").write_text(template)
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "signs?"}]
    messages = [{"role": "user", "content": parts}]
    text = "<bos>user: Who\nsigns?\n"
    assert text_of(tmp_path, messages=messages) == f"{text}assistant:"
    assert text_of(tmp_path, messages=messages, add_generation_prompt=False) == text


def test_parts_with_a_text_are_read_whatever_their_kind(tmp_path: Path) -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Who?"},
            {"type": "output_text", "text": "Two."},
            {"type": "refusal", "refusal": "No names."},
            {"type": "input_text", "text": "Sorry."},
            "Bye.",
        ],
    }
    template = "{% for it in messages %}{{ it.content }};{% endfor %}"
    said = "Who?\nTwo.\nNo names.\nSorry.\nBye.;"
    assert text_of(tmp_path, template, messages=[turn]) == said
    (tmp_path / "config.json").write_text("{}")
    file = logs.write(tmp_path / "log.jsonl", [{"messages": [turn]}])
    (prompt,) = BodyPrompts(file, str(tmp_path), (), LeftOut()).prompts()
    assert len(prompt.tokens) == len(said), "a token is a byte"


def prompts_of(tmp_path: Path, *lines: Any, keys: tuple[str, ...] = ()) -> list[PromptTokens]:
    file = logs.write(tmp_path / "log.jsonl", [*lines])
    return [*BodyPrompts(file, str(LAB), keys, LeftOut()).prompts()]


def test_answers_are_as_long_as_they_were_or_may_be(tmp_path: Path) -> None:
    lengths: list[tuple[dict[str, Any], int]] = [
        ({}, 128),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 128}, 128),
        ({"max_tokens": 129}, 128),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": None, "max_tokens": 9}, 9),
        ({"max_completion_tokens": 5, "max_tokens": None}, 5),
        ({"max_completion_tokens": None, "max_tokens": None}, 128),
        ({"max_tokens": 9, "answer": ""}, 1),
        ({"max_tokens": 1, "answer": "Who may sign?"}, 0),
    ]
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(LAB / name, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = {"messages": [{"role": "user", "content": "Who may sign?"}]}
    file = logs.write(tmp_path / "chats.jsonl", [chat | it for it, _ in lengths])
    found = [*BodyPrompts(file, str(folder), (), LeftOut()).prompts()]
    (of_answer,) = prompts_of(tmp_path, {"prompt": "Who may sign?"})
    count = len(of_answer.tokens)
    assert count > 1
    assert [it.answer_tokens for it in found] == [most or count for _, most in lengths]


def test_answers_to_completions_have_16_tokens_unless_bodies_say_how_many(tmp_path: Path) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert CompletionRequest(prompt="a").max_tokens == COMPLETION_TOKENS
    bodies: list[dict[str, Any]] = [
        *({}, {"max_tokens": 17}, {"max_tokens": None}, {"max_tokens": 129}),
        {"max_completion_tokens": 5},  # is none of a completion's
    ]
    found = prompts_of(tmp_path, *({"prompt": "Who may sign?"} | it for it in bodies))
    assert [it.answer_tokens for it in found] == [16, 17, 128, 128, 16]


def test_each_prompt_and_each_answer_to_it_counts(tmp_path: Path) -> None:
    found = prompts_of(
        tmp_path,
        {"prompt": ["a b", "c"], "n": 2},
        {"prompt": [1, 2]},
        {"prompt": [[1, 2, 3], [0]], "n": 1},
    )
    assert [it.tokens.tolist() for it in found[4:]] == [[1, 2], [1, 2, 3], [0]]
    assert [it.is_alone for it in found[4:]] == [True, False, False]
    assert found[0].tokens.tolist() == found[1].tokens.tolist() != found[2].tokens.tolist()
    assert found[2].tokens.dtype == found[4].tokens.dtype == "int32"


def test_so_many_answers_count_as_a_server_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": [1], "n": 3, "temperature": it} for it in (0.5, None, 1e-9)]
    lines += [{"prompt": [1], "n": 1, "temperature": 0}]
    assert len(prompts_of(tmp_path, *lines)) == 10
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "2")
    with pytest.raises(LogError, match="n must be at most 2"):
        prompts_of(tmp_path, *lines)


def test_the_most_answers_are_those_of_vllm() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    SamplingParams(n=MOST_SEQUENCES, temperature=1e-9)
    for over in ({"n": MOST_SEQUENCES + 1}, {"n": 2, "temperature": 0}):
        with pytest.raises(VLLMValidationError):
            SamplingParams(**over)


def test_prompts_have_the_session_the_documents_and_the_namespace_of_their_body(
    tmp_path: Path,
) -> None:
    text = {"prompt": "one\n\ntwo"}
    both = {"user": "u", "session_id": "s"}
    xargs = {"vllm_xargs": {"extra_keys": ["a", "b"]}}
    lines = [text, text | both, text | {"user": "u"}, text | {"user": 7}, text | xargs]
    lines += [text | {"extra_keys": ["a", "b"]}, text | {"extra_keys": "a"}]
    found = prompts_of(tmp_path, *lines)
    assert [it.session for it in found] == [None, "s", "u", None, None, None, None]
    passed_on = {"vllm_xargs": {"session_id": "x"}, "user": "u"}
    vllms = [text | passed_on, text | passed_on | both, text | {"vllm_xargs": 7, "user": "u"}]
    assert [it.session for it in prompts_of(tmp_path, *vllms)] == ["x", "s", "u"]
    unnamed = [text | {"session_id": "", "user": user} for user in ("", "u")]
    assert [it.session for it in prompts_of(tmp_path, *unnamed)] == [None, "u"]
    salted = [text | {"cache_salt": salt} | xargs for salt in ("a", "b", "a", None)]
    found_by_salt = prompts_of(tmp_path, *salted)
    assert [it.salt for it in found_by_salt] == ["a", "b", "a", ""]
    assert [it.namespace for it in found_by_salt] == [0, 1, 0, 2]
    asking = [text | {"prompt_logprobs": 0} | xargs, text | {"prompt_logprobs": None} | xargs]
    assert [it.namespace for it in prompts_of(tmp_path, *asking, keys=("a",))] == [None, 0]
    assert {tuple(it.documents) for it in found} == {("one", "two")}
    assert [it.namespace for it in found] == [None, None, None, None, 0, 0, 1]
    assert [it.namespace for it in prompts_of(tmp_path, *lines, keys=("a",))] == [
        *(0, 0, 0, 0, 1, 1, 0),
    ]


def test_templates_may_stand_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    plain = "{{ messages[0].content }} {{ tools | tojson }}{{ eos_token }}"
    said = {"messages": [{"role": "user", "content": "<é>"}], "tools": [{"name": "<é>"}]}
    text, eos = '<é> [{"name": "<é>"}]!', {"eos_token": {"content": "!"}}
    folder = write_tokenizer(tmp_path, chat_template=plain, **eos)
    assert text_of(folder, **said) == text
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": plain}]
    write_tokenizer(folder, chat_template=named, eos_token="!")
    assert text_of(folder, **said) == text
    blocks = "  {% for it in messages %}\n{{ it.role }}\n  {% break %}\n{% endfor %}\n"
    assert text_of(folder, blocks, **said) == "user\n"


def test_a_configuration_that_nobody_can_read_is_as_none(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    assert list(ChatTokenizer(folder).completion("here", "a")) != []


def test_templates_get_the_documents_of_a_body(tmp_path: Path) -> None:
    template = "{% for it in documents or [] %}{{ it.text }};{% endfor %}{{ messages[0].content }}"
    documents = [{"text": "May"}, {"text": "June"}]
    assert text_of(tmp_path, template, documents=documents) == "May;June;Who?"
    assert text_of(tmp_path, template) == "Who?"
    by_kwargs = {"chat_template_kwargs": {"documents": [{"text": "July"}]}}
    assert text_of(tmp_path, template, **by_kwargs) == "July;Who?"
    assert text_of(tmp_path, template, documents=documents, **by_kwargs) == "May;June;Who?"


def test_arguments_of_a_template_do_not_count_more_than_the_body(tmp_path: Path) -> None:
    template = "{{ style }} {{ messages[0].content }}{% if add_generation_prompt %} I:{% endif %}"
    given = {"style": "brief", "add_generation_prompt": False, "messages": []}
    assert text_of(tmp_path, template, chat_template_kwargs=given) == "brief Who? I:"


def test_templates_may_say_how_json_is_written(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson(ensure_ascii=False) }}{{ tools | tojson(ensure_ascii=True) }}"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}"
    )
    text = r'[{"b": "é", "a": 1}][{"b": "\u00e9", "a": 1}][{"a":1,"b":"é"}]'
    assert text_of(tmp_path, template, tools=[{"b": "é", "a": 1}]) == text


def test_what_training_marks_in_a_template_is_text(tmp_path: Path) -> None:
    template = "a{% generation %}{{ messages[0].content }}{% endgeneration %}z"
    assert text_of(tmp_path, template) == "aWho?z"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"city": "Bern"}', "city=Bern"),
        ({"city": "Bern"}, "city=Bern"),
        ("", "none"),
        (None, "none"),
        ('{"city": ', "none"),
        ("[7]", "none"),
    ],
)
def test_templates_get_the_arguments_of_tools_as_objects(
    arguments: Any, found: str, tmp_path: Path
) -> None:
    """As vLLM hands them over: bodies have them as a text."""
    template = (
        "{% for name, value in messages[0].tool_calls[0].function.arguments.items() %}"
        "{{ name }}={{ value }}{% else %}none{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert text_of(tmp_path, template, messages=messages) == found
    assert call["function"] == {"name": "weather", "arguments": arguments}, "the body's own stays"


@pytest.mark.parametrize("calls", [[], None])
def test_a_turn_that_calls_no_tool_has_no_calls(calls: Any, tmp_path: Path) -> None:
    template = "{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}"
    messages = [{"role": "assistant", "content": "I.", "tool_calls": calls}]
    assert text_of(tmp_path, template, messages=messages) == "FalseI."


def test_a_turn_without_a_text_has_an_empty_one(tmp_path: Path) -> None:
    template = (
        "{% for it in messages %}[{{ 'none' if it.content is none else it.content }}]{% endfor %}"
    )
    messages = [{"role": "assistant", "content": None}, {"role": "assistant"}]
    assert text_of(tmp_path, template, messages=messages) == "[][]"


def test_prompts_are_neither_cut_off_nor_filled_up_as_in_training(tmp_path: Path) -> None:
    plain = ChatTokenizer(write_tokenizer(tmp_path))
    expected = plain.completion("here", "Who may sign?").tolist()
    assert len(expected) > 2
    file = tmp_path / "tokenizer.json"
    for size in (2, 512):
        trained = Tokenizer.from_file(str(file))
        trained.enable_truncation(max_length=size)
        trained.enable_padding(length=size)
        trained.save(str(file))
        found = ChatTokenizer(tmp_path).completion("here", "Who may sign?")
        assert found.tolist() == expected


def test_a_template_that_is_missing_or_refuses_is_named(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(LogError, match="here: the tokenizer has no chat template"):
        ChatTokenizer(write_tokenizer(tmp_path / "a")).chat("here", body)
    refusing = "{{ raise_exception('no ' ~ messages[0].role) }}"
    with pytest.raises(LogError, match="here: the chat template refuses it: no user"):
        ChatTokenizer(write_tokenizer(tmp_path / "b", chat_template=refusing)).chat("here", body)
    with pytest.raises(LogError, match="here: the chat template refuses it: division by zero"):
        ChatTokenizer(write_tokenizer(tmp_path / "d", chat_template="{{ 1 / 0 }}")).chat(
            "here", body
        )
    (tmp_path / "d" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"cannot read .*chat_template\.jinja: 'utf-8' codec"):
        ChatTokenizer(tmp_path / "d")
    with pytest.raises(InputError, match=r"the chat template of .*c is none"):
        ChatTokenizer(write_tokenizer(tmp_path / "c", chat_template="{% if %}"))


def test_without_an_engine_and_a_model_with_a_tokenizer(tmp_path: Path, run: Any) -> None:
    file = logs.write(tmp_path / "log.jsonl", [{"prompt": "a"}])
    (tmp_path / "config.json").write_text(Path(make_model("llama"), "config.json").read_text())
    status, _, err = run(file, "--model", str(tmp_path), "--without-engine")
    assert (status, f"cannot read {tmp_path / 'tokenizer.json'}" in err) == (2, True)
