# SPDX-License-Identifier: Apache-2.0
"""References as requests of vLLM, and the log of an engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from segreuse_extras.audit import start as module
from segreuse_extras.audit.audits import Audit, Audits
from segreuse_extras.audit.messages import AuditResult
from segreuse_extras.audit.options import AuditOptions
from segreuse_extras.audit.start import _most_tokens, _reference, start_audits
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.options.server import ConfigError


def config(engine: int = 0, drafts: Any = None, tokenizer: bool = True) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100, skip_tokenizer_init=not tokenizer),
        parallel_config=SimpleNamespace(data_parallel_index=engine),
        speculative_config=drafts,
    )


def audit(**fields: Any) -> Audit:
    return Audit(
        request_id="r",
        policy="shift",
        namespace=7,
        namespace_class="other",
        fell_back=False,
        prompt=[1, 2, 3],
        found={},
        planned={},
        **{"lora_request": None} | fields,
    )


def test_a_reference_finds_nothing_and_leaves_nothing() -> None:
    adapter = LoRARequest("adapter", 1, "/adapters/1")
    made = _reference("id", audit(lora_request=adapter), 4)
    assert (made.request_id, made.prompt_token_ids, made.max_tokens) == ("id", [1, 2, 3], 4)
    assert made.lora_request is adapter
    assert made.skip_reading_prefix_cache
    assert made.block_hashes == []
    made.append_output_token_ids(list(range(1000)))
    assert made.block_hashes == [], "nor later"
    params = made.sampling_params
    assert params is not None
    assert params.extra_args is None
    assert params.temperature == 0
    assert params.ignore_eos
    assert made.priority == 2**31 - 1, "behind all others, where priorities count"


@pytest.mark.parametrize(
    ("prompt", "drafts", "expected"),
    [(10, None, 8), (91, None, 8), (92, None, 7), (98, None, 1), (99, None, 0), (10, "ngram", 1)],
)
def test_tokens_that_are_compared_fit_with_one_more(
    prompt: int, drafts: Any, expected: int
) -> None:
    assert _most_tokens(config(drafts=drafts), 8, prompt) == expected


def written(options: AuditOptions, vllm_config: Any, path: Path) -> list[dict[str, Any]]:
    """Lines of the log after an audit: what came of it, and its texts, where these are there."""
    carry_out(start_audits(vllm_config, options, SegReuseStats()))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["request_id"] == "r"
    shown = ("kl", "prompt", "answer")
    return [{name: line[name] for name in shown if name in line} for line in lines]


def carry_out(audits: Audits) -> None:
    """One audit, from a request of which two tokens were answered to what came of it."""
    audits.admitted(audit())
    audits.ended("r", (4, 5), {})
    reference = audits.next_reference(0, 0, lambda num_tokens: True)
    audits.compared({reference.request_id: AuditResult(0.5, 1, 2)})
    assert not audits.broken


def test_lines_hold_no_text_unless_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    options = AuditOptions(share=1, log=str(path))
    assert written(options, config(), path) == [{"kl": 0.5}]
    path.unlink()
    told = AuditOptions(share=1, log=str(path), log_text=True)
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(chr, (96 + t for t in tokens))))
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda config: tokenizer)
    expected = [{"kl": 0.5, "prompt": "abc", "answer": "de"}]
    assert written(told, config(), path) == expected
    path.unlink()
    expected = [{"kl": 0.5, "prompt": [1, 2, 3], "answer": [4, 5]}]
    assert written(told, config(tokenizer=False), path) == expected


def test_engines_write_files_of_their_own(tmp_path: Path) -> None:
    options = AuditOptions(share=1, log=str(tmp_path / "audit.jsonl"))
    written(options, config(engine=1), tmp_path / "audit-1.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["audit-1.jsonl"]


def test_without_audits_there_is_no_file(tmp_path: Path) -> None:
    options = AuditOptions(log=str(tmp_path / "audit.jsonl"))
    start_audits(None, options, SegReuseStats())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_opened_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(module, "AuditLog", fails)
    with pytest.raises(ConfigError, match=r"audit\.log: cannot open .*audit.jsonl': not yours"):
        start_audits(
            config(), AuditOptions(share=1, log=str(tmp_path / "audit.jsonl")), SegReuseStats()
        )


def test_lines_that_are_not_written_are_counted(tmp_path: Path) -> None:
    path, stats = tmp_path / "audit.jsonl", SegReuseStats()
    path.symlink_to("/dev/full")
    audits = start_audits(config(), AuditOptions(share=1, log=str(path)), stats)
    carry_out(audits)
    assert stats.data["audit_log_errors_total"] == 1
