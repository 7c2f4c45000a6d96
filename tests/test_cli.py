# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse`: vLLM's own `serve` with the flag in its place, and the other commands."""

import argparse
import os
import subprocess
import sys
from typing import Any

import pytest
import vllm
from vllm.entrypoints.cli.serve import ServeSubcommand

import vllm_segreuse
from segreuse_tools import cli
from segreuse_tools.command_line import number
from segreuse_tools.commands import calibrate, kb
from vllm_segreuse.config.launch import names_connector, resolve_flags
from vllm_segreuse.engine import version
from vllm_segreuse.options.server import ConfigError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments with which vLLM's command was run."""
    calls: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["vllm-segreuse"])
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr("vllm.logger.configure_logging_from_args", lambda args: None)
    monkeypatch.setattr(ServeSubcommand, "validate", lambda self, args: calls.append("validated"))
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(calls.append))
    return calls


def test_serve_runs_vllms_command_with_the_flag(served: list[Any]) -> None:
    cli.main(["serve", "some/model", "--port", "1234"])
    validated, args = served
    assert validated == "validated"
    assert (args.model_tag, args.port, args.segreuse) == ("some/model", 1234, True)
    assert sys.argv == ["vllm-segreuse", "serve", "some/model", "--segreuse", "--port", "1234"]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["m", "--port", "1"], ["serve", "m", "--segreuse", "--port", "1"]),
        (["--port", "1"], ["serve", "--segreuse", "--port", "1"]),
        (["m", "--port", "1", "--segreuse"], ["serve", "m", "--port", "1", "--segreuse"]),
        ([], ["serve", "--segreuse"]),
    ],
)
def test_the_flag_stands_once_and_behind_the_model(
    served: list[Any], options: list[str], arguments: list[str]
) -> None:
    cli.main(["serve", *options])
    assert sys.argv[1:] == arguments


@pytest.mark.parametrize("option", ["--help", "-h", "--help=all"])
def test_help_is_vllms_own(
    served: list[Any], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", option])
    assert ended.value.code in (0, None)
    assert "--segreuse" not in sys.argv
    assert "serve" in capsys.readouterr().out
    assert served == []


def test_workers_are_spawned_and_the_log_is_as_the_arguments_say(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by vLLM's own command."""
    logged: list[Any] = []
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    monkeypatch.setattr("vllm.logger.configure_logging_from_args", logged.append)
    assert cli.main(["serve", "m"]) == 0
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert logged == [served[-1]]


def test_bad_configuration_is_one_sentence(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(args: Any) -> None:
        raise ConfigError("recompute_ratio=2 must be a number from 0 to 1")

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(refuses))
    with pytest.raises(SystemExit, match=r"^vllm-segreuse: recompute_ratio=2 must be"):
        cli.main(["serve", "m"])


def test_31_other_versions_of_vllm_are_refused_in_one_sentence(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(
        "segreuse_tools.commands.calibrate.main", lambda rest: version.require_supported_vllm()
    )
    for command in ("serve", "calibrate"):
        with pytest.raises(SystemExit, match=r"^vllm-segreuse: .*found 0\.99\.0"):
            cli.main([command, "m"])
    assert served == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out.strip()
    assert said == f"vllm-segreuse {vllm_segreuse.__version__} (vLLM {vllm.__version__})"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["-h"], 0), (["--help"], 0), ([], 2), (["server"], 2), (["-x"], 2)]
)
def test_usage_goes_to_who_asked_for_it(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    asked, other = (err, out) if code else (out, err)
    assert other == ""
    for command in ("serve MODEL", "calibrate MODEL", "kb create|add|ls|show|rm|warm|stats"):
        assert command in asked


def test_other_commands_get_the_rest_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(kb, "main", lambda rest: seen.append(rest) or 0)
    monkeypatch.setattr(calibrate, "main", lambda rest: seen.append(rest) or 3)
    assert cli.main(["kb", "ls", "--json"]) == 0
    assert cli.main(["calibrate", "m"]) == 3
    assert seen == [["ls", "--json"], ["m"]]


@pytest.mark.parametrize(
    ("parsed", "text", "why"),
    [
        (number(int, 2), "1", "1 is not a number from 2 on"),
        (number(int, 1, 1024), "1025", "1025 is not between 1 and 1024"),
        (number(float, 0, 0.5), "-0.1", "-0.1 is not between 0 and 0.5"),
        (number(float, 0), "inf", "inf is not a number from 0 on"),
        (number(float, 0), "nan", "nan is not a number from 0 on"),
    ],
)
def test_numbers_out_of_bounds_are_told_the_bounds(parsed: Any, text: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parsed(text)
    assert str(refused.value) == why


def test_bounds_of_numbers_are_included() -> None:
    assert [number(int, 2)("2"), number(int, 1, 9)("9"), number(float, 0)("0")] == [2, 9, 0.0]


@pytest.mark.parametrize(
    ("command", "library", "extra"),
    [
        *(("kb", "httpx", "kb"), ("explain", "rich", "kb"), ("doctor", "vllm", "cpu")),
        ("estimate", "torch", "cpu"),
    ],
)
def test_a_command_says_which_library_it_lacks(
    command: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(rest: list[str]) -> int:
        raise ModuleNotFoundError(name=f"{library}.part")

    monkeypatch.setattr(f"segreuse_tools.commands.{command}.main", lacking)
    why = rf"^vllm-segreuse {command} needs {library}: pip install 'vllm-segreuse\[{extra}\]'"
    with pytest.raises(SystemExit, match=why):
        cli.main([command])


def test_a_module_of_ours_that_is_missing_is_no_missing_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "segreuse_tools.commands.doctor", None)
    with pytest.raises(ModuleNotFoundError, match="segreuse_tools"):
        cli.main(["doctor", "m"])


def test_what_serve_parses_turns_segment_reuse_on(served: list[Any]) -> None:
    cli.main(["serve", "m"])
    args = served[-1]
    resolve_flags(args)
    assert names_connector(args.kv_transfer_config)
    assert args.segreuse is False, "the flag is spent"


def test_a_process_that_examined_a_model_ends_behind_what_others_do_at_its_end() -> None:
    program = (
        "import atexit, sys\n"
        "from segreuse_tools import cli\n"
        "from segreuse_tools.commands import doctor\n"
        "def main(arguments):\n"
        "    atexit.register(print, 'last words')\n"
        "    print(*arguments)\n"
        "    return 3\n"
        "doctor.main = main\n"
        "cli.run()\n"
    )
    command = [sys.executable, "-c", program, "doctor", "some/model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "some/model\nlast words\n", "")
