# SPDX-License-Identifier: Apache-2.0
"""The GPU suite measures what it says, and its bundle holds what it needs."""

import argparse
import ctypes
import gzip
import importlib.metadata
import json
import os
import pstats
import shlex
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench import __main__ as command
from bench import engine, harness
from bench.gpu import (
    common,
    fatbin,
    models,
    pack,
    passes,
    rehearse,
    roofline,
    serving,
    stages,
    ttft,
    unpack,
)
from bench.suites import gpu as suite


def test_it_refuses_to_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["gpu"]) == 1
    assert "there is no GPU here; --quick runs a tiny shape" in capsys.readouterr().err


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["gpu", "--part", "ttft-gpt"])
    assert (
        "gpu has no part 'ttft-gpt'; its parts: headline, ttft-qwen3-8b" in capsys.readouterr().err
    )


def test_what_a_part_has_found_is_written_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    written: list[Any] = []

    def part(name: str, *_: Any) -> common.Found:
        written.append(json.loads(file.read_text()) if file.exists() else None)
        return [{"of": name}], {f"figure_{name}": 1.0}

    def own(name: str, *_: Any) -> Iterator[common.Found]:
        yield part(name)

    def served(parts: list[str], *_: Any) -> Iterator[common.Found]:
        assert parts == ["decode", "serve"]
        yield part("decode")
        raise harness.BenchError("the documents were driven out")

    monkeypatch.setattr(suite, "_part", own)
    monkeypatch.setattr(serving, "run", served)
    monkeypatch.setattr(models, "make_model", lambda shape: tmp_path)
    chosen = ["--part", "decode", "--part", "sizes", "--part", "pass", "--part", "serve"]
    assert command.main(["gpu", "--quick", "--json", str(file), *chosen]) == 1
    assert "bench gpu: the documents were driven out" in capsys.readouterr().err
    nothing, first, second = written
    assert nothing is None
    assert first["rows"] == [{"of": "sizes"}]
    assert second["rows"] == [{"of": "sizes"}, {"of": "pass"}]
    left = json.loads(file.read_text())
    assert left["rows"] == [{"of": "sizes"}, {"of": "pass"}, {"of": "decode"}]
    assert left["summary"].keys() == {"device", "figure_sizes", "figure_pass", "figure_decode"}
    assert left["suite"] == "gpu"


@pytest.mark.parametrize(("tokens", "share"), [(256, 0.5), (512, 0.9), (16384, 0.98)])
def test_prompts_have_the_length_and_the_share(tokens: int, share: float) -> None:
    prompts = common.Prompts(tokens, share, seed=1)
    first, second = prompts.next(), prompts.next()
    assert abs(len(first) - tokens) < common.DOCUMENTS
    assert 0 <= tokens * share - prompts.donated_tokens < common.DOCUMENTS * 33
    assert first != second
    for document in prompts.documents:
        places = range(len(first) - len(document) + 1)
        assert any(first[at : at + len(document)] == document for at in places)


SHARES = {
    "full": 1.0,
    "shift": 0.02,
    "sparsex": 0.12,
    "hybrid": 0.27,
    "one_dense": 0.07,
    "prophet": 0.06,
    "focus": 0.05,
}


class Backlog:
    prefill = "the pass"

    def take(self, plans: list[str]) -> str:
        time.sleep(0.002)
        return f"report on {plans}"


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Backlog:
    """What holds the plans of an engine that is not there."""
    backlog = Backlog()
    connector = SimpleNamespace(worker_side=SimpleNamespace(backlog=backlog))
    transfer = SimpleNamespace(get_kv_transfer_group=lambda: connector)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", transfer)
    return backlog


class Engine:
    """Answers in a time that depends on the share of the prompt that is computed; a prompt that it
    has seen without reuse is cached."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._seen = list[list[int]]()

    def first_token(
        self, llm: Any, prompt: list[int], extra_args: dict[str, Any] | None = None
    ) -> engine.Timed:
        label = (
            next(p.label for p in ttft.POLICIES if p.extra_args(36) == extra_args)
            if (extra_args is None or "segreuse_policy" in extra_args)
            else "full"
        )
        cached = 0
        if extra_args is None:
            cached = len(prompt) - 16 if prompt in self._seen else 0
            self._seen.append(prompt)
        share = SHARES[label] - cached / len(prompt)
        report = None
        if extra_args is not None and "segreuse_policy" in extra_args:
            report = {
                "policy": extra_args["segreuse_policy"],
                "reused_tokens": int(0.98 * len(prompt)),
                "computed_share": share,
            }
            self._backlog.take(["plan"])
        return engine.Timed(len(prompt) * share, 1, cached, report)


def test_the_headline_is_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = in_this_process(monkeypatch)
    asked = Engine(backlog)
    monkeypatch.setattr(engine, "first_token", asked.first_token)
    prompts = common.Prompts(16384, 0.98, seed=0)
    rows = list(ttft.cell(None, "qwen3-8b", 36, prompts, 16384, 0.98, rounds=2))
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy.keys() == {policy.label for policy in ttft.POLICIES} | {"cached"}
    assert by_policy["cached"]["computed_share"] == pytest.approx(16 / 16384)
    assert by_policy["full"]["pass_ms"] == by_policy["cached"]["pass_ms"] == 0
    assert by_policy["shift"]["pass_ms"] >= 2
    assert "take" not in vars(backlog)
    summary = ttft.summary(rows)
    assert summary["shift_speedup"] == pytest.approx(50)
    assert summary["cached_speedup"] == pytest.approx(1024)
    assert summary["hybrid_efficiency"] == pytest.approx(1.0)
    assert summary["one_dense_speedup"] == pytest.approx(1 / 0.07)
    assert summary["best_speedup_at_7_percent"] == pytest.approx(20)
    assert summary["break_even_tokens_qwen3-8b_focus"] == by_policy["focus"]["reused"]


def test_what_ran_is_counted_by_name() -> None:
    left, right = torch.ones(1200, 1200), torch.ones(1200, 1200)

    def work() -> None:
        for _ in range(3):
            torch.mm(left, right)
        left.add(1)

    ran = passes.busy(work, DeviceType.CPU)
    by_name = {it.name: it for it in ran}
    assert by_name["aten::mm"].calls == 3
    assert by_name["aten::add"].calls == 1
    assert ran[0].name == "aten::mm"
    assert ran[0].ms > by_name["aten::add"].ms > 0


def test_the_plan_of_a_request_is_caught_and_the_worker_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backlog, answers = in_this_process(monkeypatch), list[str]()
    prompts = common.Prompts(256, 0.5, seed=0)

    def answering(*plans: str) -> None:
        monkeypatch.setattr(
            engine, "first_token", lambda *_: answers.append(backlog.take(list(plans)))
        )

    answering("plan")
    assert passes.planned(None, prompts, {}) == ("the pass", "plan")
    assert answers == ["report on ['plan']"]
    answering("one", "two")
    with pytest.raises(harness.BenchError, match="made 2 plans"):
        passes.planned(None, prompts, {})
    assert "take" not in vars(backlog)


def test_profiles_are_written_where_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[int]()

    def work() -> None:
        done.append(len(done))
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    monkeypatch.delenv(common.TRACES, raising=False)
    common.write_trace("one", work)
    assert done == []
    monkeypatch.setenv(common.TRACES, str(tmp_path))
    common.write_trace("one", work)
    assert done == [0, 1]
    assert b"aten::mm" in gzip.decompress((tmp_path / "one.json.gz").read_bytes())
    functions = pstats.Stats(str(tmp_path / "one.prof")).get_stats_profile().func_profiles
    assert functions["work"].ncalls == "1"


def test_break_even_is_behind_the_last_loss() -> None:
    def rows(*speedups: float) -> list[harness.Row]:
        return [{"reused": 100 * (i + 1), "speedup": s} for i, s in enumerate(speedups)]

    assert ttft.break_even(rows(0.5, 0.9, 1.1, 2.0)) == 300
    assert ttft.break_even(rows(2.0, 0.9, 1.1, 2.0)) == 300
    assert ttft.break_even(rows(1.1, 2.0)) == 100
    assert ttft.break_even(rows(2.0, 0.9)) == float("inf")


@pytest.mark.parametrize("name", models.SHAPES)
def test_a_model_is_a_config_and_a_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(
        models.shapes, "_write_tokenizer", lambda folder: (folder / "tokenizer.json").touch()
    )
    config = AutoConfig.from_pretrained(models.make_model(name, tmp_path))
    assert config.num_hidden_layers == models.SHAPES[name]["num_hidden_layers"]
    assert config.max_position_embeddings >= 65536 + 64


WHEEL = {
    "vllm/__init__.py": b"version = 1",
    "vllm/envs.py": b"",
    "vllm/_C_stable_libtorch.abi3.so": b"core",
    "vllm/_moe_C_stable_libtorch.abi3.so": b"experts",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"flash 3",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"flash 2",
    "vllm/third_party/deep_gemm/jit.py": b"other machines",
    "vllm-0.32.0.dist-info/METADATA": b"Name: vllm",
}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Packs a small wheel, with one dependency."""
    wheel, dependency = tmp_path / "vllm.whl", tmp_path / "msgspec.whl"
    for file, members in ((wheel, WHEEL), (dependency, {"msgspec.py": b"", "x.data/a": b""})):
        with zipfile.ZipFile(file, "w") as made:
            for name, content in members.items():
                made.writestr(name, content)
    monkeypatch.setattr(pack, "dependencies", lambda folder, python: [dependency])

    def run(*options: str) -> int:
        return pack.main([str(tmp_path / "out"), "--vllm", str(wheel), *options])

    return run


def test_what_is_packed_is_unpacked(bundle: Callable[..., int], tmp_path: Path) -> None:
    assert bundle() == 0
    archives = sorted((tmp_path / "out").glob("*.tar.xz"))
    assert [a.name.split(".")[0] for a in archives] == ["core", "experts", "flash3", "python"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["bytes"] == {a.name: a.stat().st_size for a in archives}
    site = tmp_path / "site"
    for archive in archives:
        unpack.unpack(archive, site)
    found = {p.relative_to(site).as_posix(): p.read_bytes() for p in site.rglob("*") if p.is_file()}
    left_out = {"vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/deep_gemm/jit.py"}
    expected = {name: content for name, content in WHEEL.items() if name not in left_out}
    ours = [name for name in found if name.startswith("vllm_segreuse-")]
    assert {name: found[name] for name in found if name not in ours} == expected | {
        "msgspec.py": b""
    }


def test_vllm_finds_this_package_in_the_bundle(tmp_path: Path) -> None:
    pack.register_plugin(tmp_path)
    [found] = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.distribution("vllm-segreuse")
    assert (found.name, found.version) == ("vllm-segreuse", installed.version)
    group = "vllm.general_plugins"
    assert set(found.entry_points.select(group=group)) == set(
        installed.entry_points.select(group=group)
    )


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of entries: kind, architecture, code."""
    body = b""
    for kind, architecture, code in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\1")
        body += (head + architecture.to_bytes(4, "little")).ljust(64, b"\2") + code
    return struct.pack("<4sHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def test_a_library_keeps_the_code_of_one_architecture() -> None:
    hopper, older, ptx = (2, 90, b"hopper" * 9), (2, 80, b"older" * 20), (1, 80, b"ptx")
    library = b"".join(
        [
            b"host code " + fatbin.MAGIC + b" not a container ",
            fat_binary(older, hopper, ptx),
            b"between",
            fat_binary(older, ptx),  # nothing for that architecture
            b"end",
        ]
    )
    shorter = fatbin.only(library, 90)
    assert len(shorter) == len(library)
    kept = [
        [
            (entry.kind, entry.architecture, shorter[entry.start + 64 : entry.end])
            for entry in fatbin.entries(shorter, container)
        ]
        for container in fatbin.containers(shorter)
    ]
    assert kept == [[hopper], [ptx]]
    for found, expected in zip(fatbin.containers(shorter), fatbin.containers(library), strict=True):
        assert found.start == expected.start
        assert not any(shorter[found.end : expected.end])
        after = shorter[expected.end : expected.end + 3]
        assert after in (b"bet", b"end")


def test_a_fat_binary_of_another_layout_is_an_error() -> None:
    good = fat_binary((2, 90, b"code"))
    with pytest.raises(ValueError, match="fat binary at byte 0 cannot be read"):
        fatbin.only(good[:20] + b"\0\0\0\0" + good[24:], 90)


@pytest.mark.parametrize("completed", [0, 5, 8])
def test_a_run_with_failed_requests_is_no_measurement(
    completed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.benchmarks import serve

    found = {"completed": completed, "failed": 8 - completed}
    monkeypatch.setattr(serve, "main", lambda args: found)
    server: Any = SimpleNamespace(url="http://127.0.0.1:1", model_name="m", log="the.log")
    options = ["--num-prompts", "8"]
    if completed == 8:
        assert serving.bench_serve(server, Path("m"), options) == found
        return
    with pytest.raises(harness.BenchError, match=f"completed {completed} of 8 requests"):
        serving.bench_serve(server, Path("m"), options)


STAGES = {
    "well": (30, "echo fine"),
    "ill": (30, "echo wrong; exit 3"),
    "long": (30, "echo begun; sleep 60 & wait"),
    "late": (30, "echo late > {out}/late.txt"),
}


def test_stages_say_how_they_ended_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "STAGES", STAGES)
    assert stages.main(["--out", str(tmp_path), "ill+long@1", "late"]) == 1
    said, log = capsys.readouterr().out, (tmp_path / "log.txt").read_text()
    for text in (said, log):
        assert "===== ill: exit code 3" in text
        assert "wrong" in text
        assert "===== long: stopped after 1 s" in text
        assert "begun" in text
    assert said.splitlines()[-1] == "failed: ill, long"
    assert (tmp_path / "late.txt").exists()
    assert stages.main(["--out", str(tmp_path), "well"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "failed: nothing"


def test_stages_end_when_the_time_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "STAGES", STAGES)
    assert stages.main(["--out", str(tmp_path), "--seconds", "1", "long", "late"]) == 1
    assert "late: no time is left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        stages.main(["--out", str(tmp_path), "well+never"])
    assert "there is no stage 'never'; there are: well, ill" in capsys.readouterr().err


def test_the_stages_ask_for_what_there_is() -> None:
    for _, stage in stages.STAGES.values():
        words = shlex.split(stage.format(out="out", into="site"))
        for word in words:
            if word.startswith(("tests/", "bench/")):
                assert (Path(stages.ROOT) / word).exists(), word
        if "--part" in words:
            parts = {words[i + 1] for i, word in enumerate(words) if word == "--part"}
            assert parts <= set(suite.PARTS)


def test_an_archive_that_cannot_travel_is_an_error(
    bundle: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle("--limit-mib", "0.0001") == 1
    assert "is larger than 0.0001 MiB" in capsys.readouterr().err


def test_a_library_that_torch_cannot_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def symbols(library: Path, which: str) -> set[str]:
        if which == "--defined-only":
            return {"aoti_torch_new"}
        return {"aoti_torch_new", "aoti_torch_newer", "cudaMalloc", "memcpy@GLIBC_2.14"}

    monkeypatch.setattr(pack, "symbols", symbols)
    with pytest.raises(pack.PackError, match=r"needs 1 symbols .*: aoti_torch_newer"):
        pack.require_symbols(Path("vllm.so"), Path(torch.__file__).parent / "lib")


def test_the_check_says_in_one_sentence_what_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = (("Python", "print(3)"), ("the GPU", "assert False, 'no device'"), ("late", ""))
    monkeypatch.setattr(unpack, "CHECKS", checks)
    assert unpack.check(tmp_path, go_on=False) == 1
    out = capsys.readouterr().out
    assert "the GPU does not work: AssertionError: no device" in out
    assert "late" not in out
    assert json.loads(out.splitlines()[-1])["ok"] is False
    assert unpack.check(tmp_path, go_on=True) == 1
    assert "late: works" in capsys.readouterr().out


@pytest.mark.parametrize("module", [unpack, stages])
def test_nothing_but_python_is_needed(module: ModuleType) -> None:
    source = Path(module.__file__ or "").read_text()
    imported = {
        line.split()[1].partition(".")[0]
        for line in source.splitlines()
        if line.startswith(("import", "from"))
    }
    assert imported <= set(sys.stdlib_module_names)
    assert argparse.__name__ in imported


def test_stubs_stand_in_for_what_libraries_ask_of_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "kernels.c"
    source.write_text(
        "int cuLaunch(void); int cudaMalloc(void); int f(void) { return cuLaunch(); }"
    )
    kernels = tmp_path / "kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(kernels), str(source)], check=True)
    with pytest.raises(OSError, match="cuLaunch"):
        ctypes.CDLL(str(kernels), mode=os.RTLD_NOW)
    rehearse.make_driver(tmp_path, [kernels])
    driver = ctypes.CDLL(str(tmp_path / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    assert not hasattr(driver, "cudaMalloc")
    assert ctypes.CDLL(str(kernels), mode=os.RTLD_NOW).f() == driver.cuLaunch() != 0


@pytest.mark.slow  # its steps are processes of their own
def test_a_rehearsal_says_which_step_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearse.main(["--into", str(tmp_path)]) == 1
    assert "_C_stable_libtorch.abi3.so: unpack all archives" in capsys.readouterr().err
    (tmp_path / "none.so").touch()
    monkeypatch.setattr(rehearse, "LIBRARIES", {"none.so": ("none", "none")})
    monkeypatch.setattr(rehearse, "make_driver", lambda folder, libraries: None)
    monkeypatch.setattr(rehearse, "STEPS", {"libraries": rehearse.load_libraries})
    assert rehearse.main(["--into", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "libraries: does not work: OSError" in said


@pytest.mark.slow  # imports vLLM's server
def test_the_routes_of_the_server_are_built() -> None:
    """Some of what they import is imported no sooner: a bundle without it served nothing."""
    script = "from bench.gpu import rehearse; print('model_hosting', len(rehearse.routes()))"
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(said.split("model_hosting ")[1]) > 20


def test_the_least_time_of_a_request_by_the_data_sheet(tmp_path: Path) -> None:
    load = {"shape": "qwen3-8b", "tokens": 1000, "share": 0.98}
    rows = [
        load | {"policy": "full", "median_ms": 100.0, "reused": 0, "computed_share": 1.0},
        load | {"policy": "cached", "median_ms": 10.0, "reused": 0, "computed_share": 0.0},
        load | {"policy": "shift", "median_ms": 40.0, "reused": 980, "computed_share": 0.1},
        {"policy": "shift", "wall_ms": 1.0},  # of another part
    ]
    measured, file = tmp_path / "headline.json", tmp_path / "roofline.json"
    where = {"commit": "abcdef0", "gpu": "NVIDIA H200"}
    measured.write_text(json.dumps({"environment": where, "rows": rows}))
    assert roofline.main([str(measured), "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["environment"] == where, "of the measurement"
    full, shift = written["rows"]
    weights = 36 * 4096 * (4096 + 4096 + 1024 + 1024 + 3 * 12288)
    assert full["products_ms"] == pytest.approx(1e3 * 1000 * 2 * weights / 989e12)
    assert full["attention_ms"] == pytest.approx(1e3 * 36 * 1000 * 500 * 4 * 4096 / 989e12)
    assert (full["vllm_ms"], full["moving_ms"]) == (0, 0)
    assert shift["products_ms"] == pytest.approx(1e3 * 2 * weights / 4.8e12), "they are read once"
    assert shift["attention_ms"] == pytest.approx(full["attention_ms"] / 10)
    kv_bytes = 980 * 36 * 2 * 1024 * 2
    assert shift["moving_ms"] == pytest.approx(1e3 * 2 * kv_bytes / 4.8e12), "read and written"
    parts = ("vllm_ms", "products_ms", "attention_ms", "moving_ms")
    assert shift["vllm_ms"] == 10.0
    assert shift["least_ms"] == pytest.approx(sum(shift[part] for part in parts))
    assert shift["most_speedup"] == pytest.approx(100.0 / shift["least_ms"])


def test_bounds_of_a_gpu_that_is_not_known_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "headline.json"
    measured.write_text(json.dumps({"environment": {"gpu": "Abacus"}, "rows": []}))
    assert roofline.main([str(measured), "--json", str(tmp_path / "roofline.json")]) == 1
    assert "'Abacus'" in capsys.readouterr().err
    assert not (tmp_path / "roofline.json").exists()
