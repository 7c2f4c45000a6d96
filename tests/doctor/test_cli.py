# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse doctor`: what it prints, and its exit status."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms.interface import UnspecifiedPlatform

from segreuse_tools import cli as commands
from segreuse_tools.commands import doctor as cli
from segreuse_tools.commands import estimate
from segreuse_tools.doctor.diagnosis import diagnose
from tests.doctor import hub
from tests.doctor.test_families import FAMILIES
from vllm_segreuse.config import SegReuseConfig

KEYS = [
    *("works", "architectures", "reasons", "notes", "versions", "machine", "model", "policy"),
    *("backend", "kernels", "memory", "documents", "windows", "states"),
]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Writes the configuration of a family, with changes, and returns the folder."""

    def write(name: str, **changes: Any) -> str:
        config = FAMILIES[name]["config"] | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def reuse(tmp_path: Path) -> Any:
    """Writes options of segment reuse, and returns the file."""

    def write(text: str) -> str:
        file = tmp_path / "reuse.yaml"
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_enough_is_no_error(form: list[str], model: Any, to_nobody: Any) -> None:
    assert to_nobody(lambda: cli.main([model("qwen3-8b"), *form])) == (1, "")


def test_a_machine_without_the_device_that_vllm_was_built_for(
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the one that jobs are sent from: vLLM's build for GPUs runs there, and finds none."""
    monkeypatch.setattr("vllm.platforms.current_platform", UnspecifiedPlatform(), raising=False)
    folder, log = model("qwen3-8b"), tmp_path / "log.jsonl"
    log.write_text('{"prompt": "Who?"}')
    assert cli.main([folder]) == 2
    assert estimate.main([str(log), "--model", folder]) == 2
    why = (
        "vLLM finds no device here that this build of it runs on (VLLM_LOGGING_LEVEL=DEBUG tells "
        "why): use a machine that has one, or vLLM's CPU build"
    )
    assert capsys.readouterr().err.splitlines() == [
        f"vllm-segreuse doctor: {why}",
        f"vllm-segreuse estimate: {why}, or add --without-engine",
    ]


def test_a_model_that_works(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([model("qwen3-8b"), "--block-size", "32"]) == 0
    printed = capsys.readouterr().out
    assert "Qwen3ForCausalLM: works with segment reuse\n" in printed
    assert "36 layers, 32 heads and 8 KV heads of 128 channels, bfloat16" in printed
    assert "144 KiB per token, 144 MiB per document of 1,000 tokens" in printed
    assert "5.6 GiB per prompt of maximum length" in printed
    assert "a GiB holds 7 such documents (7,264 tokens)" in printed
    assert "policy    focus, the policy's own share" in printed


def test_no_other_process_loads_vllm_to_look_at_the_model(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(registry, "_run_in_subprocess", looked.append)
    assert cli.main([model("qwen3-8b"), "--block-size", "32"]) == 0
    assert looked == []


def test_ranks_share_weights_and_kv(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def memory(*options: str) -> dict[str, int]:
        given = [model("llama-3.2-1b", num_key_value_heads=2), "--json", "--block-size", "32"]
        assert cli.main([*given, *options]) == 0
        out = capsys.readouterr().out
        found: dict[str, int] = json.loads(out[out.index("{\n") :])["memory"]
        return found

    one, two, four = memory(), memory("-tp", "2"), memory("-tp", "4")
    assert one["kv_bytes_per_token"] == 16 * 2 * 2 * 64 * 2  # layers, K and V, heads, size, bf16
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"] // 2
    assert four["kv_bytes_per_token"] == two["kv_bytes_per_token"], "heads are copied beyond two"
    assert two["weight_bytes"] == one["weight_bytes"] // 2
    assert one["kv_bytes_per_document"] == 1024 * one["kv_bytes_per_token"]
    assert one["tokens_per_gib"] == (1 << 30) // one["kv_bytes_per_token"] // 32 * 32
    assert one["kv_bytes_per_longest_prompt"] == 131072 * one["kv_bytes_per_token"]
    assert one["documents_per_gib"] == (1 << 30) // one["kv_bytes_per_document"]
    assert one["index_bytes_per_block"] == 4 * 32 + 364


def test_json_is_all_that_standard_output_gets(model: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "segreuse_tools",
        "doctor",
        model("deepseek-v3.2"),
        "--json",
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    assert list(found) == KEYS
    assert found["works"] is False
    assert "an indexer of its own" in found["reasons"][0]
    assert found["model"] is found["memory"] is found["kernels"] is None


def test_every_reason_is_named(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main([model("qwen3-8b"), "--no-enable-prefix-caching", "--enable-prompt-embeds"]) == 1
    )
    out = capsys.readouterr().out
    assert "Qwen3ForCausalLM: refused\n" in out
    assert "  - prefix caching is off; remove --no-enable-prefix-caching\n" in out
    assert "  - prompt embeddings are on; remove --enable-prompt-embeds\n" in out


def test_what_vllm_itself_refuses(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([model("qwen3-8b"), "-tp", "3"]) == 1
    out = capsys.readouterr().out
    assert "  - vLLM itself refuses: Total number of attention heads (32) must be" in out


def test_the_revision_that_is_asked_for_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FAMILIES["llama-3.2-1b"]["config"]
    revisions = {"main": config, "v2": config | {"num_hidden_layers": 4}}
    hub.fill(tmp_path, "some/model", revisions, monkeypatch)
    for options, layers in ([], 16), (["--revision", "v2"], 4):
        assert cli.main(["some/model", *options]) == 0
        assert f"{layers} layers, 32 heads and 8 KV heads" in capsys.readouterr().out
    args = EngineArgs(model="some/model")
    args.model, args.revision = "some/model", "v2"  # as vLLM leaves them where it is not offline
    found = diagnose(args, SegReuseConfig()).model
    assert found is not None
    assert found["layers"] == 4
    assert cli.main(["some/model", "--revision", "v3"]) == 2
    assert "some/model (revision v3) is neither" in capsys.readouterr().err


REFUSED_BY_VLLM: list[tuple[list[str], dict[str, Any], str]] = [
    (["--block-size", "17"], {}, "No common block size for 17 (CPU_ATTN: "),
    (["--max-model-len", "999999"], {}, "User-specified max_model_len (999999) is greater than"),
    ([], {"rope_scaling": {"rope_type": "weird"}}, "Unknown RoPE scaling type weird"),
    ([], {"head_dim": 100}, "Unsupported CPU attention configuration: head_dim=100"),
    ([], {"model_type": "weird"}, "The checkpoint you are trying to load has model type `weird`"),
]


@pytest.mark.parametrize(("options", "changes", "why"), REFUSED_BY_VLLM)
def test_its_reason_is_one_line(
    options: list[str],
    changes: dict[str, Any],
    why: str,
    model: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([model("llama-3.2-1b", **changes), *options]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  - ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"  - vLLM itself refuses: {why}")
    assert len(lines[0]) < 450


def test_options_of_reuse_are_read(
    model: Any, reuse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = reuse("policy: epic\nrecompute_ratio: 0.25\n")
    assert cli.main([model("llama-3.2-1b"), "--config", file]) == 0
    assert "policy    epic, 25% of the reused tokens recomputed\n" in capsys.readouterr().out


def connector(name: str = "SegReuseConnector", **options: Any) -> str:
    named = {"kv_connector": name, "kv_role": "kv_producer", "kv_connector_extra_config": options}
    return json.dumps(named)


def test_so_are_those_of_a_connectors_configuration(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = connector(policy="epic", recompute_ratio=0.25)
    assert cli.main([model("llama-3.2-1b"), "--kv-transfer-config", given]) == 0
    assert "policy    epic, 25% of the reused tokens recomputed\n" in capsys.readouterr().out
    given = connector(similarity={"w_exact": {"2": 16}})
    assert cli.main([model("llama-3.2-1b"), "--kv-transfer-config", given]) == 1
    assert "similarity.w_exact needs what enters some of the layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "options", "why"),
    [
        (connector(polcy="epic"), [], "kv_connector_extra_config: unknown option 'polcy'"),
        (connector("OffloadingConnector"), [], "cannot run beside another KV connector"),
        (connector(), ["--segreuse"], "--segreuse and --kv-transfer-config both configure"),
        (connector(), ["--config", "FILE"], "--config and --kv-transfer-config both configure"),
    ],
)
def test_a_connectors_configuration_that_does_not_start(
    given: str,
    options: list[str],
    why: str,
    model: Any,
    reuse: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [reuse("") if it == "FILE" else it for it in options]
    assert cli.main([model("llama-3.2-1b"), "--kv-transfer-config", given, *options]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("vllm-segreuse doctor: ")
    assert why in err
    assert "works" not in out


def test_every_option_of_the_server_is_taken(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--segreuse", "--port", "8000", "--api-key", "k", "--max-model-len", "2048"]
    assert cli.main([model("llama-3.2-1b"), *given]) == 0
    assert "prompts up to 2,048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("enabled", ["false", "observe"])
def test_reuse_that_is_switched_off_is_said(
    enabled: str, model: Any, reuse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = reuse(f"enabled: {enabled}\n")
    assert cli.main([model("llama-3.2-1b"), "--config", file]) == 0
    assert f"starts with enabled: {enabled}".lower() in capsys.readouterr().out.lower()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["NobodyForCausalLM"]}, "has no architecture NobodyForCausalLM: serve one"),
    ({"num_key_value_heads": 7}, "is no multiple of num_key_value_heads=7"),
]


@pytest.mark.parametrize(("changes", "why"), BAD)
def test_a_bad_configuration(
    changes: dict[str, Any], why: str, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([model("qwen3-8b", **changes)]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("vllm-segreuse doctor: ")
    assert why in err
    assert "works" not in out


def test_the_architecture_may_be_given_beside_the_file(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it has to be where `config.json` names none."""
    folder, named = model("llama-3.2-1b", architectures=None), '{"architectures": ["%s"]}'
    assert cli.main([folder, "--hf-overrides", named % "LlamaForCausalLM"]) == 0
    assert cli.main([folder, "--hf-overrides", named % "NobodyForCausalLM"]) == 2
    assert cli.main([folder]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("LlamaForCausalLM: works with segment reuse")
    assert "has no architecture NobodyForCausalLM" in err
    assert "names no architecture" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["XverseForCausalLM"]}, "it had XverseForCausalLM until version 0.23.0"),
        (
            {
                "architectures": ["NobodyForCausalLM"],
                "model_type": "nobody",
                "auto_map": {"AutoConfig": "configuration_nobody.NobodyConfig"},
            },
            "NobodyForCausalLM comes with code of its own (auto_map)",
        ),
    ],
)
def test_a_model_that_vllm_has_no_code_for_is_refused(
    changes: dict[str, Any], why: str, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no bad input: vLLM had the code, or the model brings it."""
    assert cli.main([model("qwen3-8b", **changes), "--json"]) == 1
    out, err = capsys.readouterr()
    [reason] = json.loads(out)["reasons"]
    assert why in reason
    assert "ERROR" not in err


def test_a_bad_file_of_options(model: Any, reuse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = reuse("polcy: epic\n")
    assert cli.main([model("qwen3-8b"), "--config", file]) == 2
    assert "unknown option 'polcy'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--no-such-option"], ["other-model"], ["--conf", "a.yaml"]])
def test_an_option_that_vllm_does_not_have(options: list[str], model: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([model("qwen3-8b"), *options])
    assert ended.value.code == 2


def test_it_is_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda arguments: len(arguments))
    assert commands.main(["doctor", "some/model", "--json"]) == 2
