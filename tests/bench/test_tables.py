# SPDX-License-Identifier: Apache-2.0
"""Figures come from files: what `python -m bench tables` writes, and what `--check` refuses."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import harness
from bench.tables import command, definitions, pages, results
from bench.tables.formats import written
from bench.tables.render import Renderer
from bench.tables.results import Finding

DEFINITIONS = """
machines:
  one: {title: One, cpu: CPU One, cores: 2, lacks: [amx], results: [speed, choice]}
  two: {title: Two, cpu: CPU Two, cores: 2, has: [amx], results: [speed]}
commands: {choice: make choice}
tables:
  speeds:
    figures:
      - {from: speed, value: "{ratio:.2f}x", goal: ">= 2", what: of something}
      - {from: choice, value: "{count:,}", what: of choices}
  grid:
    from: one/choice
    lines: [{head: full, policy: full}, {head: "`a|b`", policy: ab}]
    columns:
      - {head: A, task: a, value: "{accuracy:.3f}"}
      - {head: B, task: b, value: "{accuracy:.3f}"}
"""
README = """# A page

<!-- figures: speeds -->
<!-- /figures -->

Text quotes <!-- figure: one/speed {ratio:.3f} --><!-- / --> of it, as `<!-- figure: ... -->` does.

```
<!-- figures: nothing of this fence is meant -->
```

<!-- figures: sources -->
<!-- /figures -->
"""
DOCS = """<!-- figures: grid -->
<!-- /figures -->
"""
ROWS = [
    {"policy": policy, "task": task, "accuracy": accuracy}
    for policy, task, accuracy in (
        *(("full", "a", 1.0), ("full", "b", 0.98765)),
        *(("ab", "a", 0.5), ("ab", "b", 0.25)),
    )
]


class Checkout:
    """A small repository with results of two machines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit = ""

    def make(self) -> None:
        """From nothing, with pages that are up to date."""
        self._write(definitions.FILE, DEFINITIONS)
        self._write("README.md", README)
        self._write("docs/deep/grid.md", DOCS)
        self.git("init", "--quiet")
        self.commit = self.new_commit()
        self.result("one/speed", {"ratio": 2.345})
        self.result("two/speed", {"ratio": 1.5})
        self.result("one/choice", {"count": 12345}, ROWS)
        assert list(command.check(self.root, write=True)) == []

    def copy(self, root: Path) -> "Checkout":
        shutil.copytree(self.root, root)
        copy = Checkout(root)
        copy.commit = self.commit
        return copy

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
        return harness.git(*identity, *arguments, repository=self.root).strip()

    def new_commit(self) -> str:
        message = f"Commit on {self.git('branch', '--show-current')}"
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "--short=10", "HEAD")

    def result(
        self,
        source: str,
        summary: Mapping[str, Any],
        rows: list[dict[str, Any]] = [],  # noqa: B006
        **where: Any,
    ) -> None:
        """Write a results file, as if it was measured now on its folder's machine."""
        machine, suite = source.split("/")
        measured = {
            "date": "2026-01-02T03:04:05+00:00",
            "commit": self.commit,
            "cpu": {"one": "CPU One", "two": "CPU Two"}.get(machine, machine),
            "instruction_sets": ["amx", "avx2"] if machine == "two" else ["avx2"],
            "cores": 2,
        }
        file = self.root / "bench/results" / machine / f"{suite}.json"
        result: Any = {"rows": rows, "summary": summary}
        harness.write_json(file, suite, measured | where, result)

    def page(self, name: str = "README.md") -> str:
        return (self.root / name).read_text()

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1, text
        (self.root / name).write_text(text.replace(old, new))

    def findings(self) -> list[str]:
        return list(command.check(self.root))

    def finding(self) -> str:
        """The only one."""
        (only,) = self.findings()
        assert "\n" not in only
        return only

    def sources(self) -> str:
        """The table of how each file was measured."""
        renderer = Renderer(self.root, definitions.read(self.root))
        return renderer.all_sources(Path("docs/figures.md"))

    def _write(self, name: str | Path, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("made"))
    checkout.make()
    return checkout


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    return made.copy(tmp_path / "checkout")


def test_a_table_has_a_column_for_each_machine_and_says_where_it_comes_from(
    checkout: Checkout,
) -> None:
    assert checkout.findings() == []
    page = checkout.page().splitlines()
    start = page.index("<!-- figures: speeds -->")
    head, _, ratio, count, empty, sources, end = page[start + 1 : start + 8]
    assert head == "| figure | One | Two | goal |"
    assert ratio == "| `ratio`, of something | 2.35x | 1.50x (missed) | >= 2 |"
    assert count == "| `count`, of choices | 12,345 |  |  |"
    assert (empty, end) == ("", "<!-- /figures -->")
    for said in (
        "[one/speed](bench/results/one/speed.json)",
        "[two/speed](bench/results/two/speed.json)",
        "([how it was measured](docs/figures.md#sources))",
    ):
        assert said in sources


def test_how_each_file_was_measured_is_told_in_one_table(checkout: Checkout) -> None:
    table = checkout.sources().splitlines()
    link = "[one/speed](../bench/results/one/speed.json)"
    command_line = "`.venv/bin/python -m bench speed --json FILE`"
    assert table[0] == "| file | machine | commits | date | command |"
    assert [line.split(" | ")[0] for line in table[2:]] == [
        f"| {link}",
        "| [one/choice](../bench/results/one/choice.json)",
        "| [two/speed](../bench/results/two/speed.json)",
    ]
    said = f"{link} | CPU One, 2 cores | `{checkout.commit}` | 2026-01-02 | {command_line}"
    assert table[2] == f"| {said} |"
    assert table[3].endswith("| `make choice` |")


def test_a_table_that_the_site_includes_stands_there(checkout: Checkout) -> None:
    include = "```{include} _generated/results/NAME.md\n```\n"
    (checkout.root / "docs/deep/grid.md").unlink()
    assert "the table 'grid' stands on no page" in " ".join(checkout.findings())
    (checkout.root / "docs/shown.md").write_text(include.replace("NAME", "grid"))
    assert checkout.findings() == []
    checkout.result("one/choice", {"count": 12345}, ROWS[1:])
    assert "has 0 rows with" in checkout.finding()
    (checkout.root / "docs/shown.md").write_text("\n" + include.replace("NAME", "other"))
    assert "docs/shown.md:2: unknown table 'other'" in checkout.findings()


def test_a_figure_may_be_of_some_machines_only(checkout: Checkout) -> None:
    checkout.edit(str(definitions.FILE), 'goal: ">= 2",', 'goal: ">= 2", machines: [one],')
    list(command.check(checkout.root, write=True))
    assert "| `ratio`, of something | 2.35x | >= 2 |" in checkout.page()


def test_a_grid_selects_rows_of_results(checkout: Checkout) -> None:
    page = checkout.page("docs/deep/grid.md")
    assert "|  | A | B |" in page
    assert "| full | 1.000 | 0.988 |" in page
    assert "| `a\\|b` | 0.500 | 0.250 |" in page
    assert "(../../bench/results/one/choice.json)" in page


def test_running_text_quotes_figures_and_its_sources_are_listed(checkout: Checkout) -> None:
    page = checkout.page()
    assert "quotes <!-- figure: one/speed {ratio:.3f} -->2.345<!-- / --> of it" in page
    assert "[one/speed](bench/results/one/speed.json)" in page.rpartition("figures: sources")[2]
    assert "<!-- figures: nothing of this fence is meant -->" in page


def test_writing_again_changes_nothing_and_checking_writes_nothing(checkout: Checkout) -> None:
    before = checkout.page()
    assert list(command.check(checkout.root, write=True)) == []
    assert checkout.page() == before
    checkout.edit("README.md", "2.35x", "2.36x")
    changed = checkout.page()
    assert checkout.findings()
    assert checkout.page() == changed
    assert list(command.check(checkout.root, write=True)) == []
    assert checkout.page() == before


def test_line_ends_of_a_page_stay(checkout: Checkout) -> None:
    file = checkout.root / "README.md"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n") + b"caf\xe9\r\n")
    assert checkout.findings() == []
    assert list(command.check(checkout.root, write=True)) == []
    assert b"# A page\r\n" in file.read_bytes()
    assert file.read_bytes().endswith(b"caf\xe9\r\n")


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "2.35x", "2.36x"),
        ("README.md", "12,345", "12,346"),
        ("README.md", "1.50x (missed)", "1.50x"),
        ("README.md", ">= 2 |", ">= 1 |"),
        ("README.md", "-->2.345<", "-->2.346<"),
        ("README.md", "/two/speed.json), ", "/one/speed.json), "),
        ("README.md", "| `count`, of choices | 12,345 |  |  |\n", ""),
        ("docs/deep/grid.md", "0.988", "0.989"),
    ],
)
def test_a_changed_digit_in_a_page_is_found(
    checkout: Checkout, page: str, old: str, new: str
) -> None:
    checkout.edit(page, old, new)
    found = checkout.finding()
    assert re.match(rf"{page}:\d+: ", found)
    assert "where its results say" in found


def test_a_changed_digit_in_a_file_is_found(checkout: Checkout) -> None:
    checkout.result("one/choice", {"count": 12346}, ROWS)
    assert "12,345" in checkout.finding()
    assert "12,346" in checkout.finding()


def test_command_exits_with_a_sentence_on_stderr(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    check = ["--check", "--root", str(checkout.root)]
    assert command.main(check) == 0
    assert capsys.readouterr().err == ""
    checkout.edit("README.md", "2.35x", "2.36x")
    assert command.main(check) == 1
    error = capsys.readouterr().err
    assert error.startswith("bench tables: README.md:")
    assert error.count("\n") == 1
    assert command.main(["--root", str(checkout.root)]) == 0
    assert command.main(check) == 0


def _not_json(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/speed.json").write_text('{"suite": "speed"')


def _not_text(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/speed.json").write_bytes(b"\xff\xfe\x00")


def _nested(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/speed.json").write_text("[" * 10_000)


def _a_folder(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/speed.json").unlink()
    (checkout.root / "bench/results/one/speed.json").mkdir()


def _missing(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/speed.json").unlink()


def _without(*path: str) -> Callable[[Checkout], None]:
    def break_it(checkout: Checkout) -> None:
        file = checkout.root / "bench/results/one/speed.json"
        content = part = json.loads(file.read_text())
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        file.write_text(json.dumps(content))

    return break_it


def _with(summary: dict[str, Any], **where: Any) -> Callable[[Checkout], None]:
    return lambda checkout: checkout.result("one/speed", summary, **where)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_missing, "does not exist"),
        (_a_folder, "cannot be read"),
        (_not_json, "is no results file: Invalid JSON"),
        (_not_text, "is no results file: Invalid JSON"),
        (_nested, "is no results file: Invalid JSON"),
        (_without("suite"), "is no results file: suite: Field required"),
        (_without("environment"), "is no results file: environment: Field required"),
        (_without("environment", "cpu"), "is no results file: environment.cpu: Field required"),
        (_without("environment", "commit"), "environment.commit: Field required"),
        (_without("rows"), "is no results file: rows: Field required"),
        (_without("summary"), "is no results file: summary: Field required"),
        (_without("summary", "ratio"), "has no key 'ratio'"),
        (_with({"ratio": "fast"}), "cannot be written as"),
        (_with({"ratio": 2.5}, date="today"), "environment.date: String should match"),
        (_with({"ratio": None}), "cannot be written as"),
        (_with({"ratio": float("nan")}), "no finite number for 'ratio'"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(
    checkout: Checkout, break_it: Callable[[Checkout], None], said: str
) -> None:
    break_it(checkout)
    found = checkout.findings()
    assert all("\n" not in sentence for sentence in found)
    assert found[0].startswith("bench/results/one/speed.json ")
    assert said in found[0]
    # Writing tells the same, and ends.
    assert list(command.check(checkout.root, write=True)) == found


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"commit": "0123456789-dirty"}, "was measured on uncommitted code (0123456789-dirty)"),
        ({"commit": None}, "names no commit"),
        ({"commit": ""}, "names no commit"),
        ({"commit": "HEAD"}, "names no commit, but 'HEAD'"),
        ({"commit": "--help"}, "names no commit, but '--help'"),
        ({"commit": "0123456789"}, "commit 0123456789 is unknown to git"),
        ({"commits": ["0123456789"]}, "commit 0123456789 is unknown to git"),
        ({"commits": ["0123456789-dirty"]}, "measured on uncommitted code (0123456789-dirty)"),
        ({"quick": True}, "was measured with --quick"),
        ({"interrupted": True}, "was interrupted, and its command does not say so"),
        ({"cpu": "CPU Two"}, "would mix machines"),
        ({"cores": 1}, "would mix machines"),
        ({"cores": 4}, "would mix machines"),
        ({"instruction_sets": ["amx"]}, "would mix machines"),
    ],
)
def test_what_nobody_could_measure_again_is_refused(
    checkout: Checkout, where: dict[str, Any], said: str
) -> None:
    checkout.result("one/speed", {"ratio": 2.345}, **where)
    found = list(command.check(checkout.root, write=True))
    assert len(found) == 1
    assert found[0].startswith("bench/results/one/speed.json")
    assert said in found[0]


def test_an_interrupted_run_may_be_quoted_if_its_command_says_so(checkout: Checkout) -> None:
    checkout.result("one/choice", {"count": 12345}, ROWS, interrupted=True)
    assert "bench/results/one/choice.json was interrupted" in checkout.finding()
    note = "make choice (ended by Ctrl-C behind the last of them)"
    checkout.edit(str(definitions.FILE), "choice: make choice", f"choice: {note}")
    assert list(command.check(checkout.root, write=True)) == []
    assert f"`{note}`" in checkout.sources()


def test_results_of_two_gpus_are_told_apart(checkout: Checkout) -> None:
    """Machines with other GPUs may have the same CPU."""
    for machine, gpu in (("one", "GPU One"), ("two", "GPU Two")):
        cpu = f"lacks: [amx], gpu: {gpu}" if machine == "one" else f"has: [amx], gpu: {gpu}"
        checkout.edit(str(definitions.FILE), cpu.partition(", gpu")[0], cpu)
        checkout.result(f"{machine}/speed", {"ratio": 2.5}, cpu="CPU One", gpu=gpu)
    checkout.result("one/choice", {"count": 12345}, ROWS, gpu="GPU One")
    checkout.edit(str(definitions.FILE), "cpu: CPU Two", "cpu: CPU One")
    assert list(command.check(checkout.root, write=True)) == []
    for said in (
        "[one/speed](../bench/results/one/speed.json) | GPU One, CPU One, 2 cores |",
        "[two/speed](../bench/results/two/speed.json) | GPU Two, CPU One, 2 cores |",
    ):
        assert said in checkout.sources()


def test_every_commit_of_a_result_is_named(checkout: Checkout) -> None:
    """Records of several runs are together in some, and `commit` is of the last."""
    first, last = checkout.commit, checkout.new_commit()
    checkout.result("one/speed", {"ratio": 2.345}, commit=last, commits=[first, last])
    assert list(command.check(checkout.root, write=True)) == []
    assert f"| `{first}`, `{last}` | 2026-01-02 |" in checkout.sources()
    checkout.result("one/speed", {"ratio": 2.345}, commit=f"{last}-dirty", commits=[first, last])
    (found,) = command.check(checkout.root, write=True)
    assert f"was measured on uncommitted code ({last}-dirty)" in found


def test_a_machine_without_what_its_folder_stands_for_is_refused(checkout: Checkout) -> None:
    checkout.result("two/speed", {"ratio": 1.5}, instruction_sets=["avx2"])
    assert "two/speed.json would mix machines" in checkout.finding()


def test_a_commit_beside_the_history_is_refused(checkout: Checkout) -> None:
    branch = checkout.git("branch", "--show-current")
    checkout.git("switch", "--quiet", "--orphan", "beside")
    beside = checkout.new_commit()
    checkout.git("switch", "--quiet", branch)
    checkout.result("one/speed", {"ratio": 2.345}, commit=beside)
    (found,) = command.check(checkout.root, write=True)
    assert f"commit {beside} is not part of HEAD's history" in found


def test_a_shallow_clone_says_that_it_is_one(checkout: Checkout, tmp_path: Path) -> None:
    checkout.git("add", ".")
    checkout.new_commit()
    clone = tmp_path / "clone"
    checkout.git("clone", "--quiet", "--depth=1", f"file://{checkout.root}", str(clone))
    found = list(command.check(clone))
    assert len(found) == 3
    for sentence in found:
        assert f"commit {checkout.commit} is not in this shallow clone" in sentence


def test_a_missing_git_and_a_missing_repository_are_told_apart(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert all("git is not installed" in sentence for sentence in checkout.findings())
        assert len(checkout.findings()) == 3
    (checkout.root / ".git").rename(checkout.root / "gone")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.root.parent))
    assert all("not a git repository" in sentence for sentence in checkout.findings())
    assert len(checkout.findings()) == 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<!-- figures: speeds -->", "<!-- figures: spede -->", "unknown table 'spede'"),
        ("<!-- figures: speeds -->", "<!-- figures speeds -->", "unknown marker"),
        ("<!-- figures: speeds -->", "<!-- figures: speeds", "marker"),
        ("<!-- figures: speeds -->", "", "<!-- /figures --> closes nothing"),
        ("<!-- / -->", "", "is not closed"),
        (
            "<!-- figures: sources -->",
            "<!-- figures: sources --><!-- / -->",
            "<!-- figures: sources --> is not closed",
        ),
        ("{ratio:.3f}", "", "unknown marker"),
        ("one/speed {ratio:.3f}", "one/sped {ratio:.3f}", "no 'one/sped'"),
        ("one/speed {ratio:.3f}", "two/choice {ratio:.3f}", "no 'two/choice'"),
        ("{ratio:.3f}", "{ration:.3f}", "has no key 'ration'"),
        ("{ratio:.3f}", "{ratio.real}", "has no key 'ratio.real'"),
        ("{ratio:.3f}", "{ratio", "is no format"),
        ("{ratio:.3f}", "2.345", "names no key"),
        ("<!-- figures: sources -->", "<!-- figures: grid -->", "figures in running text, and no"),
    ],
)
def test_markers_that_mean_nothing_are_found(
    checkout: Checkout, old: str, new: str, said: str
) -> None:
    checkout.edit("README.md", old, new)
    found = checkout.findings()
    assert any(said in sentence for sentence in found), found
    assert all("\n" not in sentence for sentence in found)


def test_a_block_that_is_not_closed_is_left_as_it_is(checkout: Checkout) -> None:
    file = checkout.root / "docs/deep/grid.md"
    file.write_text(file.read_text().replace("<!-- /figures -->", "The end."))
    before = file.read_text()
    found = checkout.findings()
    assert "docs/deep/grid.md:1: <!-- figures: grid --> is not closed" in found
    list(command.check(checkout.root, write=True))
    assert file.read_text() == before


def test_a_page_with_an_unknown_marker_is_left_as_it_is(checkout: Checkout) -> None:
    checkout.edit("README.md", "<!-- figures: speeds -->", "<!-- figures: spede -->")
    before = checkout.page()
    list(command.check(checkout.root, write=True))
    assert checkout.page() == before


def test_a_result_that_a_machine_must_have_is_missed(checkout: Checkout) -> None:
    checkout.edit(str(definitions.FILE), "[speed, choice]", "[speed, choice, other]")
    assert any("one/other.json does not exist" in sentence for sentence in checkout.findings())


def test_a_table_on_no_page_is_found(checkout: Checkout) -> None:
    (checkout.root / "docs/deep/grid.md").unlink()
    assert checkout.finding() == "bench/tables/figures.yaml: the table 'grid' stands on no page"


def test_a_file_that_nobody_uses_is_found_unless_there_is_a_reason(checkout: Checkout) -> None:
    checkout.result("one/other", {})
    (checkout.root / "bench/results/note.txt").write_text("")
    found = checkout.findings()
    assert len(found) == 2
    assert found[0].startswith("bench/results/note.txt is used by no page")
    assert found[1].startswith("bench/results/one/other.json is used by no page")
    kept = "kept: {one/other.json: a reason, note.txt: another}\ntables:"
    checkout.edit(str(definitions.FILE), "tables:", kept)
    assert checkout.findings() == []
    checkout.result("one/other", {}, commit="0123456789-dirty")
    assert "uncommitted code" in checkout.finding()
    (checkout.root / "bench/results/one/other.json").unlink()
    assert "is to be kept, and does not exist" in checkout.finding()


def test_a_page_beside_its_results_is_used_with_them(checkout: Checkout) -> None:
    (checkout.root / "bench/results/one/choice.html").write_text("")
    assert checkout.findings() == []


def test_results_of_a_machine_that_is_not_defined_are_found(checkout: Checkout) -> None:
    checkout.result("three/speed", {"ratio": 2.0})
    assert any("knows no machine 'three'" in sentence for sentence in checkout.findings())


def test_a_file_of_another_suite_is_found(checkout: Checkout) -> None:
    file = checkout.root / "bench/results/one/speed.json"
    file.write_text(file.read_text().replace('"suite": "speed"', '"suite": "choice"'))
    assert "holds results of the suite 'choice', not of 'speed'" in checkout.findings()[0]


def test_a_table_that_mixes_machines_has_to_say_so(checkout: Checkout) -> None:
    checkout.result("two/choice", {"count": 1}, ROWS)
    machine = "has: [amx], results: [speed]"
    checkout.edit(str(definitions.FILE), machine, machine.replace("speed]", "speed, choice]"))
    checkout.edit(str(definitions.FILE), "{head: B, ", "{head: B on Two, from: two/choice, ")
    found = list(command.check(checkout.root, write=True))
    assert found == ["table 'grid' mixes machines (one, two) without saying so: set mixed"]
    checkout.edit(str(definitions.FILE), "from: one/choice", "from: one/choice\n    mixed: true")
    assert checkout.findings() == []
    assert "[two/choice]" in checkout.page("docs/deep/grid.md")


def test_a_grid_needs_one_row_for_each_cell(checkout: Checkout) -> None:
    checkout.result("one/choice", {"count": 12345}, ROWS[1:])
    assert "has 0 rows with {'policy': 'full', 'task': 'a'}" in checkout.finding()
    checkout.result("one/choice", {"count": 12345}, [*ROWS, ROWS[0]])
    assert "has 2 rows with {'policy': 'full', 'task': 'a'}" in checkout.finding()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tables:", "tables: [", "is no YAML"),
        ("tables:", "table:", "tables: Field required"),
        ('goal: ">= 2"', 'goal: "=> 2"', "the goal '=> 2' is none of"),
        ("lacks: [amx]", "lacks: [avx512f]", "'avx512f': it is none of amx, avx512_bf16, avx512"),
        ("{ratio:.2f}x", "fast", "'fast' names no key"),
        ("from: choice", "from: chioce", "no machine has results of 'chioce'"),
        ("what: of choices", "machines: [two]", "'two' has no results of 'choice'"),
        ("from: one/choice", "from: one/chioce", "no 'one/chioce'"),
        ("what: of choices", "waht: of choices", "waht: Extra inputs are not permitted"),
    ],
)
def test_definitions_that_mean_nothing_are_found(
    checkout: Checkout, old: str, new: str, said: str
) -> None:
    checkout.edit(str(definitions.FILE), old, new)
    found = checkout.findings()
    assert any(said in sentence for sentence in found), found
    assert all("\n" not in sentence for sentence in found)


def test_missing_definitions_are_found(checkout: Checkout) -> None:
    (checkout.root / definitions.FILE).unlink()
    assert checkout.finding().startswith("bench/tables/figures.yaml cannot be read")


def test_every_goal_is_read_as_it_is_written(checkout: Checkout) -> None:
    for goal, missed in ((">= 2.345", 0), ("> 2.345", 1), ("<= 2.345", 0), ("< 2.345", 1)):
        text = (checkout.root / definitions.FILE).read_text()
        (checkout.root / definitions.FILE).write_text(
            re.sub('goal: ".*?"', f'goal: "{goal}"', text)
        )
        list(command.check(checkout.root, write=True))
        assert checkout.page().count("2.35x (missed)") == missed, goal


def test_a_goal_needs_a_number(checkout: Checkout) -> None:
    checkout.edit(str(definitions.FILE), "{ratio:.2f}x", "{ratio}")
    checkout.result("one/speed", {"ratio": "fast"})
    assert "speed: 'ratio' has a goal, and is no number: 'fast'" in checkout.findings()


def test_keys_are_names_and_nothing_else() -> None:
    assert written("{focus 0.5 %:.2f}", {"focus 0.5 %": 0.984}, "x") == "0.98"
    with pytest.raises(Finding, match="has no key '__class__'"):
        written("{__class__}", {}, "x")


# The repository's own pages.


@pytest.mark.parametrize("file", ["README.md", "docs/figures.md"])
def test_no_figure_stands_outside_of_a_table_that_is_written(file: str) -> None:
    page = next(page for page in pages.find(harness.REPOSITORY) if page.file == Path(file))
    assert page.findings == []
    assert page.spans or page.included
    rest = page.with_texts(["" for _ in page.spans])
    section = rest[rest.index("# Figures\n") :].split("\n## License\n")[0]
    assert not re.search(r"^\|", section, re.MULTILINE)
    assert not re.search(r"\d(\.\d+)?x\b", section)


def test_definitions_of_the_pages_are_sound() -> None:
    defined = definitions.read(harness.REPOSITORY)
    found = list(pages.find(harness.REPOSITORY))
    named = {span.name for page in found for span in page.spans}
    included = {name for page in found for name, _ in page.included}
    assert defined.tables.keys() <= named | included
    assert {"headline", "ttft", "figures", "stall"} <= defined.tables.keys()
    for table in defined.tables.values():
        for figure in table.figures:
            assert defined.machines_with(figure)


def test_check_needs_no_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import bench.tables.command"],
        capture_output=True,
        text=True,
        check=True,
        cwd=harness.REPOSITORY,
    )
    assert not re.search(r"\| +(torch|vllm)$", done.stderr, re.MULTILINE)


def test_intervals_of_conversations_are_read_by_trace(tmp_path: Path) -> None:
    rows = [
        {"conversation": f"users {trace} {number}", "under": arm, "seconds": seconds, "right": 1.0}
        for trace in range(2)
        for number in range(3)
        for arm, seconds in (("none", 2.0), ("similar", 1.0))
    ]
    result: Any = {"rows": rows, "summary": {"h1": "held: n = 6 conversations"}}
    where = {"date": "2026-01-02T", "commit": "a" * 10, "cpu": "CPU One", "cores": 2}
    harness.write_json(tmp_path / "agents-small.json", "agents", where, result)
    summary = results.read(tmp_path, Path("agents-small.json")).summary
    assert str(summary["h1"]).startswith("open: latency of 2 traces, too few")
