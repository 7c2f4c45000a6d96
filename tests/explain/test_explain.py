# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse explain`: what is sent, what is shown, and texts of errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from segreuse_extras.viewer import words
from segreuse_extras.viewer.asking import (
    EXCERPT_TOKENS,
    ExplainError,
    RequestBodyError,
    authorized,
    explain,
    read_file,
    read_request,
)
from segreuse_tools.commands import explain as cli
from segreuse_tools.explain import stretch_table

BODY = {"model": "m", "prompt": "a prompt", "extra_keys": ["docs"], "max_tokens": 50}
STRETCHES = [
    {"start": 0, "tokens": 32, "source": "prefix"},
    {"start": 32, "tokens": 100, "source": "segment", "position": 64, "recomputed": [[33, 20]]},
    {"start": 132, "tokens": 7, "source": "new", "reason": "evicted"},
    {"start": 139, "tokens": 1, "source": "new", "reason": "last_token"},
]
OBSERVED = {"reused_tokens": 100, "recomputed_tokens": 20, "computed_share": 0.26, "matches": 1}
REPORT = {
    "policy": "focus",
    "prompt_tokens": 140,
    "prefix_tokens": 32,
    "reused_tokens": 0,
    "bypass_reason": "observed",
    "observed": OBSERVED,
    "explain": STRETCHES,
}


class Server:
    """Answers as a server would; remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.report: Any = REPORT
        self.num_tokens = 140
        self.earlier: Any = None
        self.answers: dict[str, httpx.Response] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.sent.append((request.url.path, body))
        if request.url.path in self.answers:
            return self.answers[request.url.path]
        match request.url.path:
            case "/detokenize":
                return httpx.Response(200, json={"prompt": " ".join(map(str, body["tokens"]))})
            case "/tokenize":
                return httpx.Response(200, json={"tokens": self.earlier})
        answer: dict[str, Any] = {"kv_transfer_params": {"segreuse": self.report}}
        tokens = {"prompt_token_ids": [*range(self.num_tokens)]}
        if request.url.path == "/v1/completions":
            answer["choices"] = [{"text": "x", **tokens}]
        else:
            answer |= {"choices": [{"message": {}}], **tokens}
        return httpx.Response(200, json=answer)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self), base_url="http://server")


@pytest.fixture
def server() -> Server:
    return Server()


def printed(server: Server) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(stretch_table.table(explain(server.client(), BODY)))
    return capture.get()


def test_one_token_is_asked_for_and_nothing_approximate_is_computed(server: Server) -> None:
    body = {
        **BODY,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "max_completion_tokens": 9,
        "min_tokens": 4,
        "vllm_xargs": {"segreuse_policy": "epic"},
    }
    found = explain(server.client(), body)
    route, sent = server.sent[0]
    options = {"segreuse_policy": "epic", "segreuse_explain": True, "segreuse_observe": True}
    assert route == "/v1/completions"
    assert sent == {
        "model": "m",
        "prompt": "a prompt",
        "extra_keys": ["docs"],
        "max_tokens": 1,
        "n": 1,
        "return_token_ids": True,
        "vllm_xargs": options,
    }
    assert found.stretches == STRETCHES
    reusing = {"segreuse_explain": True, "segreuse_observe": False}
    for body in (BODY, BODY | {"vllm_xargs": {"segreuse_observe": True}}):
        explain(server.client(), body, reuse=True)
        sent = [body["vllm_xargs"] for path, body in server.sent if path == route][-1]
        assert sent == reusing, "whatever the request or the server's options say"


def test_messages_go_to_the_chat_route(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi."}]
    body = {"messages": messages, "extra_keys": "docs", "continue_final_message": True}
    found = explain(server.client(), body | {"return_token_ids": False})
    assert [path for path, _ in server.sent] == ["/v1/chat/completions"] + ["/detokenize"] * 4
    assert server.sent[0][1].items() >= {"continue_final_message": True}.items()
    assert found.texts[2:] == ["132 133 134 135 136 137 138", "139"]


def test_beam_search_is_named(server: Server) -> None:
    with pytest.raises(RequestBodyError, match="beam search passes no options on"):
        explain(server.client(), BODY | {"use_beam_search": True, "n": 2})
    assert server.sent == []
    assert explain(server.client(), BODY | {"use_beam_search": False}).texts


def test_each_stretch_is_shown_with_its_text(server: Server) -> None:
    lines = [line.split(None, 2) for line in printed(server).splitlines()]
    assert lines[0][:2] == ["from", "tokens"]
    where = [["0", "32"], ["32", "100"], ["132", "7"], ["139", "1"]]
    assert [line[:2] for line in lines[1:5]] == where
    assert lines[1][2].startswith("prefix cache")
    assert lines[2][2].startswith("segment, moved by -32")
    assert lines[2][2].split("moved by -32")[1].split()[0] == "20%", "computed again"
    assert lines[3][2].startswith("new: was known, and has been evicted")
    assert lines[3][2].rstrip().endswith("132 133 134 135 136 137 138")
    asked = [body["tokens"] for path, body in server.sent if path == "/detokenize"]
    assert [len(tokens) for tokens in asked] == [EXCERPT_TOKENS, EXCERPT_TOKENS, 7, 1]
    assert asked[1][0] == 32


def test_the_table_is_as_wide_as_the_terminal(server: Server) -> None:
    server.report = REPORT | {"explain": [STRETCHES[0] | {"tokens": 1032}, *STRETCHES[1:]]}
    cut = "\N{HORIZONTAL ELLIPSIS}"
    assert [line.rstrip() for line in printed(server).splitlines()[:6]] == [
        "from  tokens  source                                  again  text",
        "   0   1,032  prefix cache                                   0 1 2 3 4 5 6 7 8 9 10 11 12 "
        f"13 14 15 16 17 18 19 20 21 {cut}",
        "  32     100  segment, moved by -32                     20%  32 33 34 35 36 37 38 39 40 "
        f"41 42 43 44 45 46 47 48 49 50{cut}",
        " 132       7  new: was known, and has been evicted           132 133 134 135 136 137 138",
        " 139       1  new: the last token is always computed         139",
        "",
    ]


@pytest.mark.parametrize(
    ("stretch", "said"),
    [
        ({"source": "segment", "start": 1234, "position": 0}, "segment, moved by +1,234"),
        ({"source": "segment", "start": 0, "position": 1234}, "segment, moved by -1,234"),
        ({"source": "segment", "start": 7, "position": 7}, "segment, in its place"),
        ({"source": "similar", "start": 7, "position": 7}, "similar text, in its place"),
        (
            {"source": "similar", "start": 8, "position": 7, "rejected": False},
            "similar text, moved by +1",
        ),
        ({"source": "new", "reason": "another_one"}, "new: another_one"),
    ],
)
def test_where_a_stretch_comes_from(stretch: dict[str, Any], said: str) -> None:
    assert words.source(stretch) == said


def test_the_recomputed_share_is_shown_where_it_is_known(server: Server) -> None:
    assert [words.recomputed(stretch) for stretch in STRETCHES] == ["", "20%", "", ""]
    several = STRETCHES[1] | {"recomputed": [[32, 1], [40, 2]]}
    assert words.recomputed(several) == "3%"
    assert words.recomputed(several | {"recomputed": []}) == "0%"
    assert words.recomputed(several | {"recomputed": None}) == ""
    server.report = {**REPORT, "explain": [several | {"recomputed": None}]}
    assert "%" not in printed(server).splitlines()[1]


def test_the_verdict_is_a_sentence(server: Server) -> None:
    assert printed(server).splitlines()[-1] == (
        "100 of 140 tokens (71%) would be reused with focus, 20 of these computed again: 26% of "
        "the work behind the prefix."
    )
    server.report = {**REPORT, **OBSERVED, "observed": None, "bypass_reason": None}
    assert " were reused with focus" in printed(server)
    nothing = {**REPORT, "observed": None, "prefix_tokens": 0, "bypass_reason": "disabled"}
    server.report = nothing
    assert printed(server).splitlines()[-1] == "Nothing is reused of 140 tokens: disabled."
    server.report = {**nothing, "prefix_tokens": 128, "bypass_reason": "too_few_tokens"}
    assert printed(server).splitlines()[-1] == (
        "128 of 140 tokens are found by the prefix cache; of the rest nothing is reused: "
        "too_few_tokens."
    )


@pytest.mark.parametrize("why", ["no route", "other tokens"])
def test_without_the_servers_tokenizer_there_is_no_text(server: Server, why: str) -> None:
    if why == "no route":
        server.answers["/detokenize"] = httpx.Response(404, json={"detail": "Not Found"})
    else:
        server.num_tokens = 139
    found = explain(server.client(), BODY)
    assert (found.texts, len(found.stretches)) == ([], 4)
    reason = {"no route": "status 404", "other tokens": "without the tokens of the prompt"}[why]
    assert reason in found.no_texts
    assert "segment, moved by -32" in printed(server)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "request.json is no JSON"),
        ("[1]", "request.json must be the body of a request"),
        ("{}", "request.json must be the body of a request"),
        ('{"prompt": "a", "messages": []}', "with either messages"),
        ('{"prompt": "a"}', 'has no extra_keys: .* add "extra_keys"'),
        ('{"prompt": "a", "vllm_xargs": [1]}', "vllm_xargs must be an object"),
    ],
)
def test_a_file_that_is_no_request(text: str, complaint: str) -> None:
    with pytest.raises(RequestBodyError, match=complaint):
        read_request(text, "request.json")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(BODY), encoding="utf-8-sig")
    assert read_file(file) == BODY


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(RequestBodyError, match=r"cannot read .*none\.json"):
        read_file(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestBodyError, match=r"cannot read .*binary\.json"):
        read_file(tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (httpx.Response(404, json={"error": {"message": "no model m"}}), "status 404: no model m"),
        (httpx.Response(401, json={"error": "Unauthorized"}), "status 401: Unauthorized"),
        (httpx.Response(502, text="bad gateway"), "status 502: bad gateway"),
        (httpx.Response(500, text="x" * 300), f"status 500: {'x' * 200}$"),
        (httpx.Response(400, json={"message": "no"}), "status 400: no$"),
        (httpx.Response(200, json=[1]), r"status 200: \[1\]$"),
        (httpx.Response(200, text="<html>"), "status 200: <html>"),
        (httpx.Response(200, json={"choices": []}), "runs without segment reuse"),
        (httpx.Response(200, json={"kv_transfer_params": {"segreuse": {}}}), "does not explain"),
        (httpx.Response(200, json={"kv_transfer_params": ["a"]}), "runs without segment reuse"),
        (httpx.Response(200, json={"kv_transfer_params": "a"}), "runs without segment reuse"),
        (
            httpx.Response(200, json={"kv_transfer_params": {"segreuse": {"explain": 1}}}),
            "does not explain",
        ),
    ],
)
def test_a_server_that_does_not_explain(
    server: Server, answer: httpx.Response, complaint: str
) -> None:
    server.answers["/v1/completions"] = answer
    with pytest.raises(ExplainError, match=complaint):
        explain(server.client(), BODY)


@pytest.mark.parametrize("choices", [7, [7], {"a": 1}, None])
def test_a_server_whose_choices_are_none_tells_no_text(server: Server, choices: Any) -> None:
    answer = {"kv_transfer_params": {"segreuse": REPORT}, "choices": choices}
    server.answers["/v1/completions"] = httpx.Response(200, json=answer)
    found = explain(server.client(), BODY)
    assert (found.stretches, found.texts) == (STRETCHES, [])
    assert "without the tokens of the prompt" in found.no_texts


def test_half_a_surrogate_is_the_servers_to_refuse(server: Server) -> None:
    explain(server.client(), BODY | {"prompt": "\ud800"})
    assert server.sent[0][1]["prompt"] == "\ud800"


def test_what_is_no_json_is_not_sent(server: Server) -> None:
    with pytest.raises(RequestBodyError, match="cannot be sent as JSON"):
        explain(server.client(), BODY | {"temperature": float("nan")})
    assert server.sent == []


def test_an_api_key_may_have_any_characters() -> None:
    with httpx.Client(headers=authorized("schlüssel")) as client:
        assert client.headers.raw[-1] == (b"Authorization", "Bearer schlüssel".encode())
    assert authorized("caf\udce9") == {b"Authorization": b"Bearer caf\xe9"}, "a variable's bytes"
    assert authorized("") == {}


@pytest.mark.parametrize("around", [" ", "\n", "\r\n"])
def test_white_space_around_an_api_key_does_not_count(around: str) -> None:
    assert authorized(around + "k k" + around) == {b"Authorization": b"Bearer k k"}
    assert authorized(around) == {}


@pytest.mark.parametrize("character", ["\n", "\0", "\x7f"])
def test_an_api_key_that_no_header_carries_is_not_shown(
    character: str, request_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(request_file), "--api-key", f"sec{character}ret"]) == 2
    said = capsys.readouterr().err
    assert f"the API key has the control character {character!r}" in said
    assert "sec" not in said


def test_exit_codes_and_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "request.json"
    assert cli.main([str(file)]) == 2
    file.write_text(json.dumps(BODY))
    assert cli.main([str(file), "--url", "http://127.0.0.1:9"]) == 1
    assert cli.main([str(file), "--url", "http://localhost:port"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "'http://localhost:port' is no URL" in errors[2]
    assert all(line.startswith("vllm-segreuse explain: ") for line in errors)


@pytest.fixture
def answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    clients = iter([server.client() for _ in range(3)])
    monkeypatch.setattr(httpx, "Client", lambda **options: next(clients))
    return server


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(BODY))
    return file


@pytest.mark.parametrize(
    ("options", "url", "key"),
    [
        ([], "http://localhost:8000", "of the environment"),
        (["--url", "http://other:1", "--api-key", "k"], "http://other:1", "k"),
        (["--url", "http://other:1/of/v1/", "--api-key", "k"], "http://other:1/of", "k"),
        (["--api-key", ""], "http://localhost:8000", None),
    ],
)
def test_the_server_and_the_key_are_those_that_are_given(
    options: list[str],
    url: str,
    key: str | None,
    server: Server,
    request_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    made = server.client()
    monkeypatch.setattr(httpx, "Client", lambda **given: asked.append(given) or made)
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    assert cli.main([str(request_file), *options]) == 0
    [given] = asked
    assert (given["base_url"], given["headers"]) == (url, authorized(key))
    observed = {"segreuse_explain": True, "segreuse_observe": True}
    assert server.sent[0][1]["vllm_xargs"] == observed


def test_reuse_is_computed_where_that_is_asked_for(answered: Server, request_file: Path) -> None:
    assert cli.main([str(request_file), "--reuse"]) == 0
    reusing = {"segreuse_explain": True, "segreuse_observe": False}
    assert answered.sent[0][1]["vllm_xargs"] == reusing


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_page_is_written_beside_what_is_printed(
    answered: Server,
    request_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: list[str],
) -> None:
    """One question for both: the next one would find the prompt in the prefix cache."""
    assert cli.main([str(request_file), *form]) == 0
    alone = capsys.readouterr().out
    answered.sent.clear()
    shown = tmp_path / "explained.html"
    assert cli.main([str(request_file), *form, "--html", str(shown)]) == 0
    assert capsys.readouterr().out == alone
    assert "What is reused of request.json" in shown.read_text()
    assert [path for path, _ in answered.sent].count("/v1/completions") == 1
    assert cli.main([str(request_file), *form, "--html", str(tmp_path / "none" / "x.html")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "cannot write" in printed.err) == (alone, True)
    body = request_file.read_text()
    assert cli.main([str(request_file), *form, "--html", str(request_file)]) == 2
    assert "would overwrite a request" in capsys.readouterr().err
    assert request_file.read_text() == body


EDIT = {"at": 34, "gone_tokens": 40, "new_tokens": 3, "found_tokens": 95}
EARLIER = {"model": "m", "prompt": "an earlier prompt", "extra_keys": ["docs"]}
SENT_EARLIER = [*range(34), *range(900, 940), *range(37, 100)]


def test_the_text_around_an_edit_is_that_of_the_prompt(server: Server) -> None:
    server.report = REPORT | {"edit": EDIT}
    edit = explain(server.client(), BODY).edit
    assert edit is not None
    assert edit.before == " ".join(map(str, range(10, 34)))
    assert (edit.new, edit.gone) == ("34 35 36", None)
    assert edit.behind == " ".join(map(str, range(37, 37 + EXCERPT_TOKENS)))
    assert "/tokenize" not in [path for path, _ in server.sent]
    last = " ".join(printed(server).splitlines()[-4:])
    assert 'In front: "10 11' in last
    assert 'New: "34 35 36".' in last
    assert "Gone: " not in last


def test_nothing_is_asked_for_where_nothing_is_new(server: Server) -> None:
    server.report = REPORT | {"edit": EDIT | {"at": 32, "new_tokens": 0}}
    edit = explain(server.client(), BODY).edit
    assert edit is not None
    assert edit.new == ""
    assert edit.behind.startswith("32 33 ")
    assert "New: " not in words.edited(edit)
    assert explain(Server().client(), BODY, earlier=EARLIER).edit is None


def test_an_edit_near_the_beginning_has_less_in_front(server: Server) -> None:
    server.report = REPORT | {"edit": EDIT | {"at": 2}}
    edit = explain(server.client(), BODY).edit
    assert edit is not None
    assert (edit.before, edit.new) == ("0 1", "2 3 4")


def test_where_text_was_only_inserted_none_is_gone(server: Server) -> None:
    server.report, server.earlier = REPORT | {"edit": EDIT | {"gone_tokens": 0}}, [*range(34)]
    found = explain(server.client(), BODY, earlier=EARLIER)
    assert found.edit is not None
    assert (found.edit.gone, found.no_texts) == ("", "")
    assert "Gone: " not in words.edited(found.edit)


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"a": 1}, "documents": None}, {"a": 1}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        (
            {"documents": [], "chat_template_kwargs": {"a": 1, "documents": [{"text": "y"}]}},
            {"a": 1, "documents": []},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_an_earlier_chat_is_rendered_with_all_that_its_template_got(
    given: dict[str, Any], kwargs: Any, server: Server
) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

    server.report, server.earlier = REPORT | {"edit": EDIT}, SENT_EARLIER
    chat = {"messages": [{"role": "user", "content": "Who?"}], "extra_keys": "docs", **given}
    found = explain(server.client(), BODY, earlier=chat)
    assert found.edit is not None
    assert found.edit.gone is not None
    [sent] = [body for path, body in server.sent if path == "/tokenize"]
    assert sent.get("chat_template_kwargs") == kwargs
    assert sent.keys() <= {"messages", "chat_template_kwargs"}
    vllms = ChatCompletionRequest.model_validate(chat).build_chat_params(None, "auto")
    ours = TokenizeChatRequest.model_validate(sent).build_chat_params(None, "auto")
    assert ours.chat_template_kwargs == vllms.chat_template_kwargs


def test_the_earlier_request_says_what_is_gone(server: Server) -> None:
    server.report, server.earlier = REPORT | {"edit": EDIT}, SENT_EARLIER
    more = {"max_tokens": 9, "tools": [], "stream": True}
    found = explain(server.client(), BODY, earlier=EARLIER | more)
    assert found.edit is not None
    assert found.edit.gone == " ".join(map(str, range(900, 900 + EXCERPT_TOKENS)))
    [sent] = [body for path, body in server.sent if path == "/tokenize"]
    assert sent == {"model": "m", "prompt": "an earlier prompt", "tools": []}
    assert 'Gone: "900 901' in words.edited(found.edit)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([*range(33), 7, *range(900, 940)], "does not depart from the earlier request at token 34"),
        ([*range(20)], "does not depart from the earlier request"),
        ([*range(34)], "of the answer to the earlier request"),
        (None, "answered /tokenize without tokens"),
        ("refused", "status 400: no such template"),
    ],
)
def test_another_earlier_request_is_named_and_the_rest_is_shown(
    server: Server, tokens: Any, why: str
) -> None:
    server.report, server.earlier = REPORT | {"edit": EDIT}, tokens
    if tokens == "refused":
        refusal = {"error": {"message": "no such template"}}
        server.answers["/tokenize"] = httpx.Response(400, json=refusal)
    found = explain(server.client(), BODY, earlier=EARLIER)
    assert why in found.no_texts
    assert found.edit is not None
    assert (found.edit.new, found.edit.gone) == ("34 35 36", None)
    assert len(found.texts) == len(STRETCHES)


def test_the_command_reads_the_earlier_request(
    answered: Server, request_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered.report, answered.earlier = REPORT | {"edit": EDIT}, SENT_EARLIER
    earlier, page = tmp_path / "earlier.json", tmp_path / "page.html"
    assert cli.main([str(request_file), "--earlier", str(earlier)]) == 2
    assert f"cannot read {earlier}" in capsys.readouterr().err
    earlier.write_text(json.dumps(EARLIER))
    options = ["--json", "--earlier", str(earlier), "--html", str(page)]
    assert cli.main([str(request_file), *options]) == 0
    assert json.loads(capsys.readouterr().out)["edit"]["gone"].startswith("900 901 ")
    assert "900 901 " in page.read_text()


def test_a_page_is_written_of_a_request_whose_name_is_no_utf_8(
    answered: Server, tmp_path: Path
) -> None:
    request, page = tmp_path / "caf\udce9.json", tmp_path / "page.html"
    request.write_text(json.dumps(BODY))
    assert cli.main([str(request), "--html", str(page)]) == 0
    assert r"What is reused of caf\udce9.json" in page.read_text(encoding="utf-8")


def test_json_is_the_report_and_the_texts(
    answered: Server, request_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(request_file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == REPORT
    assert len(said["texts"]) == len(STRETCHES)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_enough_is_no_error(request_file: Path, form: list[str]) -> None:
    code = (
        "import sys, httpx\n"
        "from tests.explain.test_explain import Server\n"
        "from segreuse_tools.commands import explain as cli\n"
        "client = Server().client()\n"
        "httpx.Client = lambda **options: client\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code, str(request_file), *form],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
