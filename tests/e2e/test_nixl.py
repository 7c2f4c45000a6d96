# SPDX-License-Identifier: Apache-2.0
"""NIXL itself hands requests from a prefill server to a decode server, and refuses a decode server
that does not run segment reuse."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.shapes import make_model
from segreuse_extras.transfer.scheduler import EXACT_UNTIL
from tests.e2e.engine import BLOCK_SIZE, Prompts, engine
from tests.e2e.server import Server

pytestmark = pytest.mark.needs("nixl")
SLOW = pytest.mark.slow("three servers, and NIXL itself", instead="e2e/test_transfer")

SIZES = ("--max-model-len", "2048", "--dtype", "float32")
KEYS = {"extra_keys": ["t"], "segreuse_min_reused_tokens": 16}
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
NOISE = 2e-3  # of float32


def environment(port: int) -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,self,sm",
    }


def reusing(folder: Path, role: str, port: int) -> Server:
    """A server with segment reuse and NIXL beside it."""
    beside = {"kv_connector": "NixlConnector", "kv_role": role}
    file = folder / f"{role}.yaml"
    file.write_text(yaml.safe_dump({"spread_tokens": 0, "beside": beside}))
    flags = [*SIZES, "--segreuse-config", str(file)]
    return Server(make_model("qwen3"), flags, environment(port))


def without_reuse(port: int) -> Server:
    """vLLM's own decode server."""
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    flags = [*SIZES, "--kv-transfer-config", json.dumps(config)]
    return Server(make_model("qwen3"), flags, environment(port), stock=True)


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with reusing(tmp_path_factory.mktemp("prefill"), "kv_producer", 25600) as server:
        yield server


def asked(server: Server, prompt: list[int], keys: Any = None, **body: Any) -> dict[str, Any]:
    given = {"model": "m", "prompt": prompt, "temperature": 0, "logprobs": 3, "max_tokens": 6}
    if keys is not None:
        given["vllm_xargs"] = keys
    found = server.post("/v1/completions", given | body)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def handed_over(prefill: Server, prompt: list[int]) -> dict[str, Any]:
    """What a router gives to the decode server."""
    answer = asked(prefill, prompt, KEYS, max_tokens=1, kv_transfer_params=TO_DECODE)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    ours, theirs = (answer["choices"][0] for answer in (one, other))
    probabilities = (it["logprobs"]["token_logprobs"] for it in (ours, theirs))
    near = all(abs(a - b) <= NOISE for a, b in zip(*probabilities, strict=True))
    return bool(ours["text"] == theirs["text"] and near)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def _cores() -> Iterator[None]:
    """NIXL takes a core away from the process that it runs in."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("_cores")
@pytest.mark.patches("nixl")
def test_an_engine_beside_nixl_shakes_hands_with_its_like_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata

    for name, value in environment(25900).items():
        monkeypatch.setenv(name, value)
    beside = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    with engine("qwen3", {"beside": beside}, dtype="float32", max_model_len=1024) as running:
        connector: Any = get_kv_transfer_group()
        worker = connector.beside.connector_worker
        ours, plain = (
            module.compute_nixl_compatibility_hash(worker.vllm_config, worker.backend_name)
            for module in (base_worker, metadata)
        )
        assert worker.compat_hash == ours != plain
        text = Prompts(running.vocab_size, seed=53)
        document = text.tokens(200)
        running.ask(document, options=KEYS, max_tokens=1)
        [answer] = running.ask(text.around(document), options=KEYS)
        assert answer.report["reused_tokens"] > 0


@SLOW
def test_a_decode_server_answers_as_one_server_does(prefill: Server, tmp_path: Path) -> None:
    text = Prompts(4096, seed=51)
    documents = [text.tokens(n) for n in (200, 150, 260)]
    for document in documents:
        asked(prefill, document, KEYS, max_tokens=1)
    with reusing(tmp_path, "kv_consumer", 25700) as decode:
        for number in range(8):
            first, second = documents[number % 3], documents[(number + 1) % 3]
            start = text.tokens(3 * BLOCK_SIZE if number % 2 else 0)
            if start:
                asked(prefill, start, KEYS, max_tokens=1)
            prompt = start + text.around(first, second, gaps=(20 + number, 5, 1 + number))
            params = handed_over(prefill, prompt)
            assert params["segreuse"]["reused_tokens"] > 0
            exact = params[EXACT_UNTIL]
            assert exact == len(start)
            if number > 5:  # a router drops it
                del params[EXACT_UNTIL]
                exact = 0
            answer = asked(decode, prompt, KEYS, kv_transfer_params=params)
            assert same(answer, asked(prefill, prompt, KEYS))
            again = asked(decode, prompt)
            assert cached(again) == exact
            assert same(again, asked(prefill, prompt))
        assert "NIXL compatibility check passed" in decode.log_text()


@SLOW
def test_a_decode_server_without_segment_reuse_is_refused(prefill: Server) -> None:
    prompt = Prompts(4096, seed=52).tokens(200)
    with without_reuse(25800) as decode:
        params = handed_over(prefill, prompt)
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "kv_transfer_params": params}
        found = decode.post("/v1/completions", body)
        assert found.status_code == 500, found.text
        assert "NIXL compatibility hash mismatch" in decode.log_text()
