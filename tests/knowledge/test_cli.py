# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse kb` as people and scripts meet it: output, exit codes, texts of errors."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from rich.progress import Progress

import vllm_segreuse
from segreuse_tools.cli import main
from segreuse_tools.commands import kb
from segreuse_tools.knowledge import TOKEN_ENV, URL_ENV, actions, extract, status_tables
from segreuse_tools.knowledge.client import KnowledgeClient
from tests.knowledge.served import FAULT, TOKEN, Served, served
from vllm_segreuse.features.knowledge.schemas import (
    DocumentCounts,
    KnowledgeBaseStatus,
    NewDocument,
)


class Result(NamedTuple):
    """What a command has left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


Run = Callable[..., Result]


@pytest.fixture
def run(server: Served, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command below `kb`; `input` is what a person types."""
    monkeypatch.setenv(URL_ENV, server.url)
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    monkeypatch.setattr(actions, "POLL_S", 0)

    def running(*arguments: object, input: str = "") -> Result:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "oe")
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdin", io.StringIO(input))
            try:
                status = kb.main([str(argument) for argument in arguments])
            except SystemExit as ended:
                status = int(ended.code or 0)
        return Result(status, *(it.buffer.getvalue().decode() for it in (out, err)))

    return running


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.md").write_text("alpha beta gamma")
    (folder / "sub" / "b.txt").write_text("one two")
    (folder / "c.jsonl").write_text('{"text": "x y"}\n{"text": "z", "id": "last"}\n')
    return folder


def test_from_nothing_to_a_warm_base_and_back(run: Run, docs: Path) -> None:
    assert "vllm-segreuse kb create NAME" in run("ls").output
    created = run("create", "py", "--extra-key", "docs")
    assert created.output == 'py: requests with extra_keys ["docs"] reuse its documents\n'
    assert "vllm-segreuse kb add py PATH..." in run("ls", "py").output
    added = run("add", "py", docs)
    assert (added.exit_code, added.output) == (0, "py: 4 documents, 27 tokens (4 warm)\n")
    [row] = json.loads(run("ls", "--json").output)
    assert (row["name"], row["documents"]["warm"], row["tokens"]) == ("py", 4, 27)
    listed = json.loads(run("ls", "py", "--json").output)
    assert [d["id"] for d in listed] == ["a.md", "c.jsonl#1", "last", "sub/b.txt"]
    assert "docs" in run("ls").output
    assert "sub/b.txt" in run("ls", "py").output
    removed = run("rm", "py", "sub/b.txt", "last")
    assert (removed.exit_code, removed.output) == (0, "py: removed 2 documents\n")
    assert [d["id"] for d in json.loads(run("ls", "py", "--json").output)] == ["a.md", "c.jsonl#1"]
    assert run("rm", "py", "--yes").output == "py: removed, with all its documents\n"
    assert json.loads(run("ls", "--json").output) == []


def test_what_was_made_of_a_file_is_shown(run: Run, docs: Path) -> None:
    (docs / "sub" / "ü.html").write_text("<title>T</title><h1>A_b</h1><ul><li>x<li>y")
    run("create", "py")
    assert run("add", "py", docs).exit_code == 0
    shown = run("show", "py", "sub/ü.html")
    assert (shown.exit_code, shown.output) == (0, "# A\\_b\n\n- x\n- y")
    found = json.loads(run("show", "py", "last", "--json").output)
    assert (found["text"], found["is_exact"], len(found["token_ids"])) == ("z", True, 1)
    missing = run("show", "py", "no/such")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "there is no document 'no/such' in knowledge base 'py'" in missing.stderr


def test_a_text_that_is_not_read_as_its_tokens_is_shown_with_a_warning(
    run: Run, client: KnowledgeClient, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create("py")
    client.add("py", [NewDocument(id="a", token_ids=[0, 100])])
    shown = run("show", "py", "a")
    assert (shown.exit_code, shown.stdout) == (0, "\x00b")
    assert "makes other tokens of this text than 'a' has" in shown.stderr
    monkeypatch.setattr(server.engine, "decode", lambda tokens: None)
    assert run("show", "py", "a").exit_code == 1
    assert json.loads(run("show", "py", "a", "--json").output)["token_ids"] == [0, 100]


def test_what_documents_are_computed_behind_is_chosen_and_listed(run: Run) -> None:
    run("create", "beside")
    run("create", "alone", "--context", "none")
    contexts = {row["name"]: row["context"] for row in json.loads(run("ls", "--json").output)}
    assert contexts == {"beside": "siblings", "alone": "none"}
    assert "siblings" in run("ls").output
    assert run("create", "other", "--context", "both").exit_code == 2


def test_adding_again_replaces_what_changed(run: Run, docs: Path, server: Served) -> None:
    run("create", "py")
    run("add", "py", docs)
    (docs / "a.md").write_text("alpha")
    added = json.loads(run("add", "py", docs, "--json").output)
    assert added["problems"] == []
    states = {d["id"]: (d["status"], d["tokens"]) for d in added["documents"]}
    assert states.pop("a.md") == ("warm", 5)
    assert states == {"c.jsonl#1": ("warm", 3), "last": ("warm", 1), "sub/b.txt": ("warm", 7)}


def test_a_bad_file_does_not_stop_the_others(run: Run, docs: Path) -> None:
    run("create", "py")
    (docs / "bad.txt").write_bytes(b"\xff\xff")
    (docs / "fails.md").write_text(FAULT)
    second = ("last", 1), ("2", 2), (2, 3)
    lines = (json.dumps({"text": "x" * count, "id": name}) for name, count in second)
    (docs / "second.jsonl").write_text("\n".join([*lines, '{"text": "y"}']))
    added = run("add", "py", docs, "--json")
    assert added.exit_code == 1
    answer = json.loads(added.stdout)
    assert [d["id"] for d in answer["documents"]] == [
        "2", "a.md", "c.jsonl#1", "fails.md", "last", "second.jsonl#4", "sub/b.txt",
    ]  # fmt: skip
    assert answer["problems"] == [
        f"{docs}/bad.txt is not UTF-8 (byte 0): convert it first",
        f"{docs}/second.jsonl: the id 'last' is taken by {docs}/c.jsonl",
        f"{docs}/second.jsonl: the id '2' is used twice",
        "fails.md: it could not be computed: a faulty document",
    ]
    assert added.stderr.splitlines() == [f"vllm-segreuse kb: {p}" for p in answer["problems"]]


def test_a_bad_argument_does_not_stop_the_others(run: Run, docs: Path, tmp_path: Path) -> None:
    run("create", "py")
    (tmp_path / "image.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("another file of this name")
    wrong = [tmp_path / name for name in ("none.txt", "image.png", "empty", "n" * 300)]
    added = run("add", "py", *wrong, docs, tmp_path / "a.md", "--json")
    assert added.exit_code == 1
    answer = json.loads(added.stdout)
    assert [d["id"] for d in answer["documents"]] == ["a.md", "c.jsonl#1", "last", "sub/b.txt"]
    assert answer["documents"][0]["tokens"] == 16, "the first of its name"
    kinds = ".txt/.md/.jsonl/.html/.htm/.pdf"
    assert answer["problems"] == [
        f"{wrong[0]} does not exist",
        f"{wrong[1]} is no {kinds} file",
        f"{wrong[2]} holds no {kinds} file",
        f"{wrong[3]}: File name too long",
        f"{docs}/a.md and {tmp_path}/a.md would both become the document 'a.md': name the folder "
        "above them",
    ]
    assert added.stderr.splitlines() == [f"vllm-segreuse kb: {p}" for p in answer["problems"]]


def test_files_above_a_limit_are_named_and_the_others_are_added(run: Run, docs: Path) -> None:
    run("create", "py")
    (docs / "large.txt").write_text("word " * 1000)
    os.mkfifo(docs / "pipe.txt")
    (docs / "out.md").symlink_to("/etc/hostname")
    nested = "[" * 960 + "]" * 960
    (docs / "deep.jsonl").write_text('{"text": "x", "metadata": {"k": ' + nested + "}}")
    (docs / os.fsdecode(b"\xff.txt")).write_text("x")
    added = run("add", "py", docs, "--max-bytes", "4000", "--json")
    assert added.exit_code == 1
    answer = json.loads(added.stdout)
    assert [d["id"] for d in answer["documents"]] == ["a.md", "c.jsonl#1", "last", "sub/b.txt"]
    deep, *others = answer["problems"]
    assert deep.startswith(f"{docs}/deep.jsonl")
    assert others == [
        f"{docs}/large.txt has 5000 bytes, more than 4000: raise --max-bytes or split it",
        f"{docs}/out.md is a link out of {docs}: name /etc/hostname itself to add it",
        f"{docs}/pipe.txt is no regular file",
        f"{docs}/\\udcff.txt has a name that is not UTF-8: rename it",
    ]
    assert "Traceback" not in added.stderr


def test_a_named_pipe_does_not_hang(run: Run, docs: Path) -> None:
    run("create", "py")
    os.mkfifo(docs / "pipe.txt")
    added = run("add", "py", docs / "pipe.txt", docs / "a.md")
    assert added.stdout == "py: 1 document, 16 tokens (1 warm)\n"
    assert added.stderr == f"vllm-segreuse kb: {docs}/pipe.txt is no regular file\n"


@pytest.mark.parametrize(
    ("option", "limits"),
    [
        ("--max-bytes", {"max_bytes": 7}),
        ("--max-pages", {"max_pages": 7}),
        ("--max-seconds", {"max_seconds": 7.0}),
        ("--max-memory", {"max_memory_bytes": 7_000_000}),
    ],
)
def test_every_limit_has_an_option(
    run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch, option: str, limits: dict[str, float]
) -> None:
    given: list[extract.Limits] = []
    extractor = extract.Extractor
    monkeypatch.setattr(extract, "Extractor", lambda l: given.append(l) or extractor())  # noqa: E741
    run("create", "py")
    [value] = limits.values()
    run("add", "py", docs, option, f"{value:g}" if value < 1e6 else int(value))
    assert given == [extract.Limits()._replace(**limits)]
    assert run("add", "py", docs, option, 0).exit_code == 2


def test_what_the_server_does_not_take_leaves_the_others(
    run: Run, docs: Path, server: Served
) -> None:
    run("create", "py")
    server.app.state.admin.state.max_body_bytes = 2000
    (docs / "large.md").write_text("x" * 3000)
    added = run("add", "py", docs)
    assert added.exit_code == 1
    assert added.stdout == "py: 4 documents, 27 tokens (4 warm)\n"
    assert added.stderr.startswith("vllm-segreuse kb: large.md: this server takes bodies of up to")


def test_an_id_that_no_server_takes_is_a_problem_of_its_file(run: Run, tmp_path: Path) -> None:
    run("create", "py")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "x", "id": "long" * 999}) + '\n{"text": "y", "id": "ok"}')
    added = run("add", "py", file)
    assert added.exit_code == 1
    assert added.stdout == "py: 1 document, 1 tokens (1 warm)\n"
    assert f"{file}: id: must be 1 to 512 bytes" in added.stderr
    assert len(added.stderr) < 400


def test_warm_computes_what_is_cold(run: Run, docs: Path, server: Served) -> None:
    run("create", "py")
    run("add", "py", docs)
    server.cool()
    assert run("warm", "py", "a.md").output == "py: 1 document, 16 tokens (1 warm)\n"
    assert [d["status"] for d in json.loads(run("ls", "py", "--json").output)].count("cold") == 3
    assert run("warm", "py").output == "py: 4 documents, 27 tokens (4 warm)\n"
    server.cool()
    server.engine.answer = RuntimeError("no luck")
    failed = run("warm", "py", "last")
    assert failed.exit_code == 1
    assert "last: it could not be computed: no luck" in failed.stderr


def test_stats_are_one_table_or_one_object(run: Run, docs: Path) -> None:
    run("create", "py")
    run("add", "py", docs)
    assert json.loads(run("stats", "--json").output)["documents"]["warm"] == 4
    text = run("stats").output
    assert "of 1,000,000 (0.0%) are frozen; 4 tokens each" in text


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["ls", "nothing"], 1, "there is no knowledge base 'nothing'"),
        (["add", "nothing", "x.txt"], 1, "there is no knowledge base 'nothing'"),
        (
            ["create", "py", "--extra-key", "other"],
            1,
            "a knowledge base 'py' exists with another extra key",
        ),
        (["rm", "py", "nothing"], 1, "there is no document 'nothing' in knowledge base 'py'"),
        (["ls", "--token", "wrong"], 1, "this is not the admin token"),
        (["ls", "--token", " "], 2, "the admin token is empty"),
        (["ls", "--url", "http://127.0.0.1:9"], 3, "cannot be reached"),
        (["ls", "--url", "localhost:8000"], 2, "must begin with http"),
        (["create", "a b"], 2, "must be 1 to 128 letters"),
        (["rm", "py", ".."], 2, "the name or id: must have no"),
        (["rm", "py"], 2, "needs --yes"),
        (["lss"], 2, "invalid choice: 'lss'"),
        (["add", "py", "x.md", "--keep", "nan"], 2, "nan is not between 0 and 1"),
        (["add", "py", "x.md", "--keep", "0"], 2, "--keep must be above 0 and at most 1"),
        (["add", "py", "x.md", "--max-seconds", "inf"], 2, "max-seconds"),
        (["add", "py", "x.md", "--max-bytes", "99999999999999999999"], 2, "max-bytes"),
    ],
)
def test_what_goes_wrong_is_said_in_one_sentence(
    run: Run, arguments: list[str], status: int, complaint: str
) -> None:
    run("create", "py")
    result = run(*arguments)
    assert result.exit_code == status
    assert complaint in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_what_the_second_tier_holds_counts_in_the_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Recording(Progress):
        def update(self, task_id: Any, **fields: Any) -> None:
            seen.append(fields)

    base_of = KnowledgeClient.base

    def base(self: KnowledgeClient, name: str) -> KnowledgeBaseStatus:
        counts = DocumentCounts(warm=1, stored=2, cold=1)
        return base_of(self, name).model_copy(update={"documents": counts})

    run("create", "py")
    monkeypatch.setattr(actions, "Progress", Recording)
    monkeypatch.setattr(KnowledgeClient, "base", base)
    assert run("warm", "py").exit_code == 0
    assert seen == [{"total": 4, "completed": 4}]


def test_nothing_is_read_before_the_base_is_there(run: Run, docs: Path) -> None:
    (docs / "a.md").chmod(0)
    assert "there is no knowledge base" in run("add", "py", docs).stderr


def test_a_full_pool_says_so_and_keeps_what_was_stored(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(150)))
    with served(limit_blocks=400) as server:
        monkeypatch.setenv(URL_ENV, server.url)
        run("create", "py")
        added = run("add", "py", file)
        assert added.exit_code == 1
        assert added.stdout == ""
        assert "blocks" in added.stderr
        assert len(json.loads(run("ls", "py", "--json").output)) == 100


def test_what_ends_it_is_no_reason_to_forget_the_files_that_could_not_be_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pdf").write_bytes(b"no PDF")
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(150)))
    with served(limit_blocks=400) as server:
        monkeypatch.setenv(URL_ENV, server.url)
        run("create", "py")
        first, *others = run("add", "py", tmp_path).stderr.splitlines()
    assert "a.pdf" in first
    assert "blocks" in others[-1]


def test_without_a_token_the_option_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV)
    result = run("ls")
    assert result.exit_code == 2
    assert "Missing option '--token'" in result.stderr


def test_a_token_is_never_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "a-secret")
    for arguments in (["--help"], ["nothing"], ["--no-such-option"]):
        assert "a-secret" not in run("ls", *arguments).output


def test_removing_a_base_asks_a_person(
    run: Run, client: KnowledgeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create("py")
    monkeypatch.setattr(actions, "_is_terminal", lambda: True)
    assert run("rm", "py", input="n\n").exit_code == 1
    assert client.base("py").name == "py"
    assert run("rm", "py", input="y\n").exit_code == 0
    assert list(client.bases()) == []


def test_the_environment_names_what_the_server_reads() -> None:
    # Read, not imported: that takes seconds, since vLLM comes with it.
    admin = Path(vllm_segreuse.__file__).parent / "serve" / "admin.py"
    assert f'ADMIN_TOKEN_ENV = "{TOKEN_ENV}"' in admin.read_text()


def test_it_is_part_of_the_command(
    run: Run, client: KnowledgeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.create("py")
    assert main(["kb", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "py"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "segreuse_tools.knowledge.actions")
    monkeypatch.delitem(sys.modules, "segreuse_tools.knowledge.client")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(SystemExit, match=r"needs httpx: pip install 'vllm-segreuse\[kb\]'"):
        main(["kb", "ls", "--token", TOKEN])


def test_times_are_told_in_the_largest_unit(client: KnowledgeClient, run: Run, docs: Path) -> None:
    client.create("py")
    run("add", "py", docs)
    now = datetime.now(UTC)
    ages = [None, timedelta(seconds=5), timedelta(minutes=61), timedelta(days=3)]
    rows = [
        document.model_copy(update={"last_used": None if age is None else now - age})
        for document, age in zip(client.documents("py"), ages, strict=True)
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_tables.documents(rows, now))
    text = console.export_text()
    assert all(age in text for age in ("never", "5 s ago", "1 h ago", "3 d ago"))
