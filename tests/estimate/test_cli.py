# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse estimate`: what it prints, and its exit status."""

import json
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bench.shapes import make_model
from segreuse_tools import cli as commands
from segreuse_tools.commands import estimate as cli
from segreuse_tools.estimate import comparison
from segreuse_tools.estimate.comparison import Estimate, Row
from segreuse_tools.estimate.prompt_rendering import Renderer
from segreuse_tools.estimate.replay import replay
from segreuse_tools.estimate.request_log import Logged
from segreuse_tools.estimate.served_model import load_model
from segreuse_tools.estimate.twins import Twin
from tests.doctor import hub
from tests.estimate import logs
from vllm_segreuse.policies import POLICIES

KEYS = ["--extra-keys", "docs"]
BODY = {"prompt": "Who may sign?", "max_tokens": 3}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on lines of a log; (exit status, standard output, standard error)."""

    def running(lines: list[Any], *options: str) -> tuple[int, str, str]:
        file = logs.write(tmp_path / "log.jsonl", lines)
        status = cli.main([str(file), "--model", str(make_model("llama")), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return running


@pytest.fixture
def rows(run: Any) -> Any:
    """The same with `--json`: what was printed, and its rows by policy."""

    def running(lines: list[Any], *options: str) -> tuple[Any, dict[str | None, Any]]:
        status, out, err = run(lines, *options, "--json")
        assert status == 0, err
        found = json.loads(out)
        return found, {row["policy"]: row for row in found["rows"]}

    return running


def test_a_slice_of_the_log_is_replayed(rows: Any, run: Any) -> None:
    whole, _ = rows(logs.bodies(6), *KEYS, "--policy", "shift")
    first, _ = rows(logs.bodies(6), *KEYS, "--policy", "shift", "--requests", "4")
    last, by_policy = rows(logs.bodies(6), *KEYS, "--policy", "shift", "--start", "5")
    assert [it["requests"] for it in (whole, first, last)] == [6, 4, 1]
    assert by_policy["shift"]["reused_tokens"] == 0, "nothing was computed before"
    status, _, err = run(logs.bodies(6), *KEYS, "--start", "6")
    assert (status, "has no request behind the first 6" in err) == (2, True)


def test_the_table_has_prefix_caching_and_every_policy(run: Any) -> None:
    bodies = logs.bodies(12)
    passage, question = bodies[0]["prompt"].split("\n\n")[0], logs.words(random.Random(1), 150)
    little_found = BODY | {"prompt": f"Anew: {passage}\n\n{question}"}  # and much is read twice
    status, out, _ = run([*bodies, little_found], *KEYS)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("log       13 requests, ")
    assert lines[0].endswith(", 13 with extra keys, 1 namespace")
    assert "blocks of 16 tokens (" in lines[2]
    assert lines[2].endswith(": as large as the log needs")
    table = [line.split("  ")[0] for line in lines[5 : 6 + len(POLICIES)]]
    planned = {"focus": " (default) *", "prophet": " *", "peaks": " *"}
    assert table == ["prefix caching alone", *(f"{n}{planned.get(n, '')}" for n in POLICIES)]
    assert "* planned: a pass may choose fewer tokens (peaks)" in out
    (bypassed,) = [line for line in lines if line.startswith("bypassed with focus: ")]
    assert "nothing_saved " in bypassed
    assert "too_few_reused_tokens " in bypassed


def test_segments_are_found_where_prefix_caching_finds_nothing(rows: Any) -> None:
    named = ("--policy", "shift", "--policy", "auto", "--policy", "focus")
    found, by_policy = rows(logs.bodies(30), *KEYS, *named)
    assert len(found["rows"]) == 3, "auto is focus"
    assert [*found] == [field.name for field in fields(Estimate)]
    assert [*by_policy[None]] == [field.name for field in fields(Row)]
    assert [*by_policy] == [None, "shift", "focus"]
    total, plain, shift = found["prompt_tokens"], by_policy[None], by_policy["shift"]
    assert plain["prefix_tokens"] < 0.3 * total
    assert plain["reused_tokens"] == plain["recomputed_tokens"] == plain["reusing_requests"] == 0
    assert plain["computed_tokens"] == total - plain["prefix_tokens"]
    assert shift["reused_tokens"] > 0.7 * total
    assert shift["recomputed_tokens"] == 0
    left = total - shift["prefix_tokens"] - shift["reused_tokens"]
    assert shift["computed_tokens"] == pytest.approx(left, rel=0.02)
    assert not shift["is_planned"]
    focus = by_policy["focus"]
    assert focus["is_planned"]
    assert 0 < focus["recomputed_tokens"] < focus["reused_tokens"]
    assert shift["reusing_requests"] + sum(shift["bypassed"].values()) == 30


def test_prompts_of_other_sessions_are_no_later_turns(rows: Any) -> None:
    text = logs.words(random.Random(3), 150)
    prompts = [text + " again" * number for number in range(24)] + [f"Anew: {text}"]

    def reusing(session: Any) -> int:
        """Requests that reuse though later turns would lose; all but the last grow."""
        lines = []
        for number, prompt in enumerate(prompts):
            body, xargs = session(f"session {number}")
            xargs = {"segreuse_weigh_turns": 1} | xargs
            lines.append(BODY | {"prompt": prompt, "vllm_xargs": xargs} | body)
        _, by_policy = rows(lines, *KEYS, "--policy", "focus")
        return int(by_policy["focus"]["reusing_requests"])

    assert reusing(lambda name: ({}, {})) == 0, "each goes on with the one before"
    assert reusing(lambda name: ({"session_id": name}, {})) == 1
    assert reusing(lambda name: ({}, {"session_id": name})) == 1


def test_policies_that_share_a_replay_have_the_rows_of_their_own(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*KEYS, "--num-blocks", "120")
    own = {"vllm_xargs": {"segreuse_policy": "sparsex", "segreuse_min_reused_tokens": 40}}
    bodies = [body | (own if i % 7 == 3 else {}) for i, body in enumerate(logs.bodies(30))]
    replays: list[Any] = []

    def counted(*args: Any) -> Any:
        replays.append(args)
        return replay(*args)

    monkeypatch.setattr(comparison, "replay", counted)
    shared = rows(bodies, *options)
    num_shared = len(replays)
    monkeypatch.setattr(Twin, "arrived", lambda twin, one: setattr(twin, "agrees", False))
    assert rows(bodies, *options) == shared
    assert num_shared < 1 + len(POLICIES)
    assert len(replays) - num_shared == 1 + len(POLICIES)
    assert len({row["computed_tokens"] for row in shared[1].values()}) > 6


def test_without_extra_keys_nothing_is_looked_up(run: Any) -> None:
    status, out, _ = run([BODY, BODY])
    assert status == 0
    assert "2 requests, 10 prompt tokens (median 5), 0 with extra keys, 0 namespaces" in out
    assert "No request names extra_keys, so nothing would be looked up: --extra-keys" in out
    assert "focus" not in out


def test_namespaces_share_nothing(rows: Any) -> None:
    """The same log in two namespaces finds as much as each half alone."""
    bodies = logs.bodies(20)
    mixed = [body | {"extra_keys": key} for body in bodies for key in ("a", "b")]
    _, alone = rows(bodies, *KEYS, "--policy", "shift")
    found, both = rows(mixed, *KEYS, "--policy", "shift")
    assert (found["namespaces"], found["with_extra_keys"]) == (2, 40)
    # vLLM's prefix cache knows no namespaces: the second of each pair begins with a hit.
    assert both["shift"]["reused_tokens"] <= 2 * alone["shift"]["reused_tokens"]
    assert both["shift"]["prefix_tokens"] >= alone["shift"]["prefix_tokens"]
    _, one = rows([body | {"extra_keys": "a"} for body in bodies], *KEYS, "--policy", "shift")
    assert one["shift"] == alone["shift"]


def test_a_small_cache_evicts(rows: Any) -> None:
    bodies, options = logs.bodies(30), (*KEYS, "--policy", "shift")
    ample, by_policy = rows(bodies, *options)
    assert by_policy[None]["evicted_blocks"] == by_policy["shift"]["evicted_blocks"] == 0
    small, tight = rows(bodies, *options, "--num-blocks", "120")
    assert (ample["cache"]["is_given"], small["cache"]["is_given"]) == (False, True)
    assert tight["shift"]["evicted_blocks"] > 300
    assert tight["shift"]["reused_tokens"] < 0.8 * by_policy["shift"]["reused_tokens"]
    assert tight["shift"]["most_blocks"] < 120
    gib = 120 * 16 * 1024 / 2**30  # a KiB for each token
    by_size, same = rows(bodies, *options, "--kv-gib", f"{gib:.9f}")
    assert by_size["cache"]["num_blocks"] == 120
    assert same == tight


def test_a_log_that_may_need_more_than_is_tried(
    run: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, options = logs.bodies(12), (*KEYS, "--policy", "shift")
    needed, _ = rows(bodies, *options)
    assert needed["cache"]["is_capped"] is False
    at_most = needed["cache"]["num_blocks"] - 2
    for most, is_capped in ((at_most, False), (at_most - 1, True)):
        monkeypatch.setattr(comparison, "MOST_BLOCKS", most)
        found, _ = rows(bodies, *options)
        assert found["cache"]["is_capped"] is is_capped
    _, out, _ = run(bodies, *options)
    assert "): the largest that is tried; the log may need more: give --kv-gib\n" in out
    assert "as large as the log needs" not in out


def test_several_at_a_time_find_less_and_hold_more(rows: Any) -> None:
    bodies, options = logs.bodies(30), (*KEYS, "--policy", "shift")
    _, alone = rows(bodies, *options)
    crowd, together = rows(bodies, *options, "--concurrency", "10")
    assert crowd["concurrency"] == 10
    assert together["shift"]["reused_tokens"] < alone["shift"]["reused_tokens"]
    assert together["shift"]["most_blocks"] > 5 * alone["shift"]["most_blocks"]


def test_too_little_room_for_those_that_run_is_said(run: Any) -> None:
    bodies = [body | {"max_tokens": 400} for body in logs.bodies(12)]
    options = (*KEYS, "--policy", "shift", "--answer-tokens", "400", "--concurrency", "4")
    status, out, _ = run(bodies, *options, "--num-blocks", "140")
    assert status == 0
    assert "prefix caching alone: running requests lost their blocks " in out


def test_plans_may_take_several_steps(rows: Any, tmp_path: Path) -> None:
    """Those that run meanwhile do not wait for them, and all ends."""
    file = tmp_path / "reuse.yaml"
    file.write_text("spread_tokens: 8\n")
    options = (*KEYS, "--policy", "shift", "--concurrency", "3")
    _, at_once = rows(logs.bodies(20), *options)
    _, spread = rows(logs.bodies(20), *options, "--config", str(file))
    assert spread["shift"] != at_once["shift"]
    assert spread["shift"]["reused_tokens"] > 0.5 * at_once["shift"]["reused_tokens"]


def test_plans_over_many_steps_take_their_time(rows: Any, tmp_path: Path) -> None:
    """They are as much work as in one step, so that others arrive meanwhile."""
    file = tmp_path / "reuse.yaml"
    bodies = [body | {"timestamp": 0.5 * i} for i, body in enumerate(logs.bodies(20))]
    options = (*KEYS, "--policy", "epic", "--tokens-per-second", "500", "--config", str(file))
    file.write_text("spread_tokens: 0\n")
    _, at_once = rows(bodies, *options)
    file.write_text("spread_tokens: 64\n")
    _, spread = rows(bodies, *options)
    assert spread["epic"]["reusing_requests"] == at_once["epic"]["reusing_requests"] == 19
    assert spread["epic"]["most_blocks"] > 1.5 * at_once["epic"]["most_blocks"]


def test_a_plan_may_take_hundreds_of_steps(rows: Any, tmp_path: Path) -> None:
    """It goes on although nothing else is computed, and nothing has ended."""
    file = tmp_path / "reuse.yaml"
    file.write_text("spread_tokens: 1\n")
    options = (*KEYS, "--policy", "epic", "--concurrency", "2", "--config", str(file))
    _, spread = rows(logs.bodies(6), *options)
    assert spread["epic"]["computed_tokens"] > 1000


def test_how_the_server_schedules_ahead_does_not_matter(rows: Any) -> None:
    options = (*KEYS, "--policy", "shift")
    assert rows(logs.bodies(8), *options, "--async-scheduling") == rows(logs.bodies(8), *options)


def test_requests_arrive_at_their_times(rows: Any) -> None:
    """Far from each other they run alone; at one moment they run together."""
    bodies, options = logs.bodies(20), (*KEYS, "--policy", "shift")
    _, alone = rows(bodies, *options)
    _, together = rows(bodies, *options, "--concurrency", "20")
    apart = [body | {"timestamp": 1e9 + 60 * i} for i, body in enumerate(bodies)]
    found, timed = rows([*reversed(apart)], *options, "--tokens-per-second", "1000")
    assert found["concurrency"] is None
    assert timed["shift"] == alone["shift"], "in the order of their times"
    at_once = [body | {"timestamp": "2026-01-01T00:00:00Z"} for body in bodies]
    _, timed = rows(at_once, *options, "--tokens-per-second", "1000")
    assert timed["shift"] == together["shift"]
    # 0.5 s each at this speed: they overlap, unless the engine is faster.
    near = [body | {"timestamp": 0.2 * i} for i, body in enumerate(bodies)]
    _, slow = rows(near, *options, "--tokens-per-second", "1000")
    _, fast = rows(near, *options, "--tokens-per-second", "1000000")
    assert fast["shift"]["most_blocks"] < slow["shift"]["most_blocks"]


def test_logged_answers_are_found_again(rows: Any) -> None:
    """The next turn of a conversation contains them."""
    answer = " ".join(["It is signed by the board, and by nobody else."] * 20)
    first = {"role": "user", "content": "Who may sign?"}
    turns = [
        {"messages": [first], "answer": answer},
        {
            "messages": [
                first,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "Since when?"},
            ]
        },
    ]
    _, known = rows(turns)
    del turns[0]["answer"]
    _, unknown = rows(turns)
    assert unknown[None]["prefix_tokens"] == 0, "the question is shorter than a block"
    assert known[None]["prefix_tokens"] > 150


def test_a_logged_answer_may_be_empty(rows: Any) -> None:
    """It is one token without text, not as many as an answer that was not logged has."""
    body = {"prompt": "Who may sign?", "max_tokens": 64}

    def most_blocks(**others: Any) -> int:
        return rows([body | others])[1][None]["most_blocks"]

    assert most_blocks() > 4
    assert most_blocks(answer="") == 1


def test_a_body_becomes_what_the_engine_gets() -> None:
    model = load_model("estimate", str(make_model("llama")), [])
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 9},
        {"max_tokens": 5, "cache_salt": "s", "priority": 3, "prompt_logprobs": 2},
        {"max_tokens": 4, "n": 2, "extra_keys": ["own"]},
        {"max_tokens": 4, "vllm_xargs": {"segreuse_observe": True, "segreuse_policy": "epic"}},
    ]
    log = [Logged(f"log, line {n}", {"prompt": "Who?"} | it, 0.5) for n, it in enumerate(bodies)]
    body = {"prompt": "Who?", "max_tokens": 3}
    log += [Logged("log, line 9", body, answer=it) for it in ("He.", "It is signed by all.", "")]
    found = Renderer(model.vllm_config, model.args, ["docs"], answer_tokens=5).render(log)
    assert [one.where[-1] for one in found] == [*"01223999"]
    assert [len(one.answer_ids) for one in found[:5]] == [5, 5, 4, 4, 4]
    assert [one.time_s for one in found] == [0.5] * 5 + [None] * 3
    encode = AutoTokenizer.from_pretrained(make_model("llama")).encode
    known = [encode(text, add_special_tokens=False) for text in ("He.", "It is signed by all.")]
    assert len(known[1]) > 3
    assert [one.answer_ids for one in found[5:7]] == [known[0][:3], known[1][:3]]
    unknown = [token for one in (*found[:5], found[7]) for token in one.answer_ids]
    assert unknown == [*range(1 << 30, (1 << 30) + 23)], "none of them twice"
    options = [one.extra_args for one in found]
    assert options[0] == options[1] == options[5] == {"extra_keys": ["docs"]}
    assert options[2] == options[3] == {"extra_keys": ["own"]}
    assert options[4] == {"extra_keys": ["docs"], "segreuse_policy": "epic"}, "not observed"
    asked = [(one.cache_salt, one.priority, one.prompt_logprobs) for one in found[:2]]
    assert asked == [(None, 0, None), ("s", 3, 2)]


def test_options_of_reuse_and_of_requests_count(rows: Any, tmp_path: Path) -> None:
    file = tmp_path / "reuse.yaml"
    options = (*KEYS, "--policy", "shift")
    for observes in ("enabled: observe\n", "observe: true\n"):
        file.write_text(observes)
        _, by_policy = rows(logs.bodies(8), *options, "--config", str(file))
        assert by_policy["shift"]["reusing_requests"] > 5, "as if it were switched on"
    file.write_text("min_reused_tokens: 100000\n")
    _, by_policy = rows(logs.bodies(8), *options, "--config", str(file))
    assert by_policy["shift"]["bypassed"] == {"too_few_tokens": 8}
    own = {"segreuse_policy": "epic", "segreuse_observe": True}
    bodies = [body | {"vllm_xargs": own} for body in logs.bodies(8)]
    _, by_policy = rows(bodies, *options)
    assert by_policy["shift"]["recomputed_tokens"] > 0, "they name epic themselves"
    assert "observed" not in by_policy["shift"]["bypassed"]


def test_options_of_a_connectors_configuration_count(run: Any, rows: Any) -> None:
    given = {
        "kv_connector": "SegReuseConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"policy": "shift", "min_reused_tokens": 100000},
    }
    options = ("--policy", "shift", *KEYS, "--segreuse-config", "missing.yaml")
    assert run([BODY], *options)[0] == 2, "a file is read before vLLM is loaded"
    options = ("--kv-transfer-config", json.dumps(given), "--policy", "shift", *KEYS)
    _, by_policy = rows(logs.bodies(8), *options)
    assert by_policy["shift"]["bypassed"] == {"too_few_tokens": 8}
    status, out, _ = run([BODY], *options)
    assert status == 0
    assert "shift (default)" in out
    status, _, err = run([BODY], *options, "--segreuse")
    assert (status, "both configure SegReuseConnector" in err) == (2, True)
    assert run([BODY], "--segreuse", "--port", "8000")[0] == 0


def test_no_file_of_the_server_is_opened(run: Any, rows: Any, tmp_path: Path) -> None:
    """Where options of the server write files, an estimate is as without them."""
    file, folder = tmp_path / "reuse.yaml", tmp_path / "server"
    folder.mkdir()
    options = (*KEYS, "--policy", "shift", "--num-blocks", "120", "--config", str(file))
    file.write_text("max_provenance_depth: 3\n")
    without, by_policy = rows(logs.bodies(8), *options)
    assert without["has_tier"] is False
    writing = {
        "max_provenance_depth": 3,
        "audit": {"share": 1, "log": str(folder / "audit.jsonl"), "log_text": True},
        "tier": {"host_gib": 0.01, "path": str(folder / "tier"), "disk_gib": 0.01},
        "knowledge_path": str(folder / "knowledge.sqlite"),
    }
    file.write_text(json.dumps(writing))
    found, same = rows(logs.bodies(8), *options)
    assert found["has_tier"] is True
    assert same == by_policy
    assert same["shift"]["reusing_requests"] > 5
    assert [*folder.iterdir()] == []
    status, out, _ = run(logs.bodies(8), *options)
    assert status == 0
    assert "The second tier is not replayed: what is evicted counts as lost.\n" in out


def test_a_replay_has_neither_idle_time_nor_another_engine(rows: Any, tmp_path: Path) -> None:
    """An idle server computes turns in full, by requests that are none of the log's; and a prefill
    engine has a role that the replay has not."""
    file = tmp_path / "reuse.yaml"
    options = (*KEYS, "--policy", "shift", "--num-blocks", "120", "--config", str(file))
    known: dict[str, Any] = {"max_provenance_depth": 3}
    file.write_text(json.dumps(known))
    _, without = rows(logs.bodies(8), *options)
    known |= {"heal_tokens": 64, "heal_after_s": 0, "beside": {"kv_connector": "NixlConnector"}}
    file.write_text(json.dumps(known))
    _, found = rows(logs.bodies(8), *options)
    assert found == without


def test_answers_to_one_prompt_and_prompts_of_one_body_count(rows: Any) -> None:
    found, _ = rows([BODY | {"n": 3}, BODY | {"prompt": ["Who?", "When?"]}])
    assert found["requests"] == 5


def test_pictures_are_left_out(run: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    picture = {"messages": [{"role": "user", "content": [image]}]}
    status, out, _ = run([picture, BODY])
    assert status == 0
    assert "left out  1 request (line 1): images, audio or video\n" in out
    assert run([picture, BODY], "--strict")[0] == 0, "a server of another model would take it"
    status, _, err = run([picture, {"prompt": 7}])
    assert status == 2
    assert "holds nothing that can be replayed: 1 request (line 1): images, audio or video; " in err
    assert "; 1 request (line 2): prompt" in err


def test_what_a_server_would_refuse_is_left_out_counted_and_named(rows: Any, run: Any) -> None:
    options = ("--max-model-len", "512", *KEYS, "--policy", "shift")
    sound = logs.bodies(8, in_each=1)
    long = [BODY | {"prompt": "word " * (900 + i)} for i in range(7)]
    wrong = [{"prompt": 7}, BODY | {"vllm_xargs": {"segreuse_x": 1}}, {"input": "a"}, [], BODY]
    mixed = [*long[:3], *sound, *wrong[:4], *long[3:]]
    found, by_policy = rows(mixed, *options)
    assert by_policy == rows(sound, *options)[1], "the others are estimated as ever"
    frequent, *others = found["left_out"]
    assert (frequent["requests"], frequent["lines"]) == (7, [1, 2, 3, 16, 17])
    assert "maximum context length" in frequent["reason"]
    assert sum(each["requests"] for each in found["left_out"]) == 11
    assert {line for each in others for line in each["lines"]} == {12, 13, 14, 15}
    status, out, _ = run(mixed, *options)
    assert status == 0
    assert "left out  7 requests (lines 1, 2, 3, 16, 17, ...): " in out
    assert "left out  1 request (line 13): unknown option 'segreuse_x'" in out


def test_of_very_many_reasons_the_most_frequent_are_printed(rows: Any, run: Any) -> None:
    options = "abcdefghijklmnop"
    wrong = [BODY | {f"segreuse_{letter}": 1} for letter in options]
    found, _ = rows([BODY, *wrong, *wrong[:1]])
    assert len(found["left_out"]) == len(options)
    _, out, _ = run([BODY, *wrong, *wrong[:1]])
    shown = [line for line in out.splitlines() if line.startswith("left out")]
    assert "2 requests (lines 2, 18): segreuse_a " in shown[0]
    assert shown[-1] == "left out  6 requests for 6 other reasons (--json has all)"


BAD: list[tuple[Any, list[str], str]] = [
    ({"prompt": 7}, [], "line 2: prompt"),
    ({"messages": "Who?"}, [], "line 2: messages"),
    ({"messages": [{"role": "user"}], "max_tokens": "x"}, [], "line 2: max_tokens"),
    (BODY | {"max_tokens": -1}, [], "line 2: max_tokens must be at least 1, got -1"),
    (BODY | {"extra_keys": ""}, [], "line 2: extra_keys: the key '' must be 1 to"),
    (BODY | {"vllm_xargs": {"segreuse_x": 1}}, [], "line 2: unknown option 'segreuse_x'"),
    (
        BODY | {"vllm_xargs": {"segreuse_similarity": 1}},
        [],
        "line 2: segreuse_similarity=True must",
    ),
    (BODY | {"segreuse_policy": "exact"}, [], "line 2: segreuse_policy has no effect at the top"),
    (BODY | {"prompt": [10**6]}, [], "line 2: Token id 1000000 is out of vocabulary"),
    (BODY | {"prompt_logprobs": 21}, [], "line 2: Requested prompt logprobs of 21, which is"),
    (BODY | {"prompt": "word " * 900}, ["--max-model-len", "512"], "line 2: "),
    (BODY | {"prompt": "word " * 900}, ["--num-blocks", "8"], "line 2 needs 57 KV blocks"),
    (BODY, ["--tokens-per-second", "9"], "line 1 has no timestamp"),
]


@pytest.mark.parametrize(("line", "options", "why"), BAD, ids=range(len(BAD)))
def test_bad_input_is_one_sentence(line: Any, options: list[str], why: str, run: Any) -> None:
    status, out, err = run([BODY, line], "--strict", *options)
    assert (status, out) == (2, "")
    assert f"log.jsonl, {why}" in err
    assert len([it for it in err.splitlines() if it.startswith("vllm-segreuse estimate: ")]) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--chat-template", "none.jinja"], "(none.jinja) looks like a file path, but it failed"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "nobodys"], "nobodys"),
    ],
)
def test_options_that_a_server_would_not_start_with(options: list[str], why: str, run: Any) -> None:
    status, out, err = run([BODY], *options)
    assert (status, out) == (2, "")
    assert err.startswith("vllm-segreuse estimate: vLLM refuses options of its server: ")
    assert why in err
    assert err.count("\n") == 1


def test_a_log_of_a_server_that_finds_similar_segments_needs_its_options(
    run: Any, tmp_path: Path
) -> None:
    body = BODY | {"extra_keys": "a", "vllm_xargs": {"segreuse_similarity": 1}}
    status, _, err = run([body], "--strict")
    assert (status, err.endswith("; give its options by --config\n")) == (2, True)
    status, out, _ = run([body, BODY])
    assert (status, "; give its options by --config\n" in out) == (0, True)
    file = tmp_path / "reuse.yaml"
    file.write_text("similarity: {by_default: false}\n")
    assert run([body], "--config", str(file))[0] == 0


def test_a_model_that_is_none(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(logs.write(tmp_path / "log.jsonl", [BODY]))
    assert cli.main([file, "--model", "nobody/nothing"]) == 2
    assert "is neither a folder nor a model in the local" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(Path(make_model("llama"), "config.json").read_text())
    assert cli.main([file, "--model", str(tmp_path)]) == 2
    assert f"{tmp_path} has no tokenizer" in capsys.readouterr().err
    status, _, err = run([BODY], "--kv-gib", "0")
    assert (status, "needs 1 KV blocks" in err) == (2, True)


def test_the_revision_that_is_asked_for_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(Path(make_model("llama"), "config.json").read_text())
    count = config["num_hidden_layers"]
    revisions = {"main": config, "v2": config | {"num_hidden_layers": count + 1}}
    folders = hub.fill(tmp_path, "some/model", revisions, monkeypatch)
    assert load_model("estimate", "some/model", []).layers.count == count
    other = load_model("estimate", "some/model", ["--revision", "v2"])
    assert other.layers.count == count + 1
    assert other.args.model == str(folders["v2"])


def test_a_refused_model(run: Any) -> None:
    status, out, err = run([BODY], "--no-enable-prefix-caching")
    assert (status, out) == (1, "")
    assert "is refused: prefix caching is off; remove --no-enable-prefix-caching\n" in err


@pytest.mark.parametrize(
    "options", [["--policy", "best"], ["--num-blocks", "1"], ["--concurrency", "0"]]
)
def test_bad_options(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["log.jsonl", "--model", "m", *options])
    assert ended.value.code == 2


def test_json_is_all_that_standard_output_gets(tmp_path: Path) -> None:
    file = logs.write(tmp_path / "log.jsonl", [BODY])
    command = [sys.executable, "-m", "segreuse_tools", "estimate", str(file), "--json"]
    ended = subprocess.run(
        [*command, "--model", str(make_model("llama"))], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["requests"] == 1


def test_the_usage_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["--help"])
    assert "vllm-segreuse estimate REQUESTS.jsonl --model MODEL" in capsys.readouterr().out
