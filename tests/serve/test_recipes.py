# SPDX-License-Identifier: Apache-2.0
"""Recipes for other projects' deployments: the flags are vLLM's, the options are ours."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from bench.shapes import make_model
from segreuse_tools.commands import estimate
from segreuse_tools.knowledge.client import TOKEN_ENV
from segreuse_tools.routing import HEADER
from segreuse_tools.server_arguments import server_parser
from tests.estimate.test_traces import ragpulse, write_ragpulse
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import check_config, names_connector, resolve_flags
from vllm_segreuse.plugin import register

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((RECIPES / name).read_text())
    return content


def by_name(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [item for item in items if item["name"] == name]
    return found


FILES = sorted(path for path in RECIPES.iterdir() if path.is_file())
"""One of them is a module, which leaves a folder of machine code once it was imported."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_recipe_says_what_was_run(file: Path) -> None:
    head = file.read_text().partition("\n\n")[0]
    assert re.search(r"^# (Run:|Not run:|Not installed)", head, re.MULTILINE)


# Traces.


def test_timed_trace_makes_equal_text_of_equal_components(tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import TimedTrace

    lines = [ragpulse(number, ids, number) for number, ids in enumerate([[0, 1], [1, 2]])]
    trace, file = write_ragpulse(tmp_path, lines, tokens=160), tmp_path / "written.jsonl"
    assert estimate.main([str(trace), "--policy", "shift", "--write", str(file)]) == 0
    labels = ("timestamp", "input_length", "output_length", "hash_ids")
    options = {f"timed_trace_label_{name}": name for name in labels}
    dataset = TimedTrace(
        dataset_path=str(file), random_seed=0, timed_trace_sec_multiplier=0.001, **options
    )
    first, second = dataset.sample(AutoTokenizer.from_pretrained(make_model("llama")), 2)
    assert [it.timestamp for it in (first, second)] == [0, 1]
    # The system's 40 tokens are 32 here: three blocks are rounded to the even number.
    system, passage = 32, 160
    assert first.prompt[:system] == second.prompt[:system]
    shared = first.prompt[system + passage : system + 2 * passage]
    assert shared == second.prompt[system : system + passage]
    assert first.prompt_len == len(first.prompt) == system + 2 * passage + 16


# production-stack.


@pytest.fixture
def stack() -> dict[str, Any]:
    return read("production-stack.yaml")


def test_the_flags_of_the_stack_turn_reuse_on(stack: dict[str, Any], tmp_path: Path) -> None:
    """As the chart's templates/deployment-vllm-multi.yaml builds the command."""
    [model] = stack["servingEngineSpec"]["modelSpec"]
    given = model["vllmConfig"]
    [config] = [it for it in stack["extraObjects"] if it["kind"] == "ConfigMap"]
    mount = by_name(model["extraVolumeMounts"], "segreuse")["mountPath"]
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    flags = [
        *(["--enable-prefix-caching"] if given["enablePrefixCaching"] else []),
        *("--max-model-len", str(given["maxModelLen"])),
        *("--gpu_memory_utilization", str(given["gpuMemoryUtilization"])),
        *(flag.replace(mount, str(tmp_path)) for flag in given["extraArgs"]),
    ]
    register()
    parser = server_parser("vllm-segreuse serve")
    args = parser.parse_args(["--model", model["modelURL"], *flags])
    resolve_flags(args)
    assert args.enable_prefix_caching
    assert names_connector(args.kv_transfer_config)
    options = SegReuseConfig.from_options(args.kv_transfer_config.kv_connector_extra_config)
    assert options == SegReuseConfig(policy="auto", min_reused_tokens=128)


def test_the_token_of_the_stack_is_a_secret(stack: dict[str, Any]) -> None:
    [model] = stack["servingEngineSpec"]["modelSpec"]
    token = by_name(model["env"], TOKEN_ENV)
    assert "value" not in token
    secret = token["valueFrom"]["secretKeyRef"]
    created = f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}="
    assert created in (RECIPES / "production-stack.yaml").read_text()


def test_the_volume_of_the_stack_is_the_config_map(stack: dict[str, Any]) -> None:
    [model] = stack["servingEngineSpec"]["modelSpec"]
    [config] = stack["extraObjects"]
    volume = by_name(model["extraVolumes"], "segreuse")
    assert volume["configMap"]["name"] == config["metadata"]["name"]


def test_the_router_of_the_stack_hashes_our_header(stack: dict[str, Any]) -> None:
    router = stack["routerSpec"]
    assert (router["routingLogic"], router["sessionKey"]) == ("session", HEADER.lower())


# Ray Serve.


def test_the_arguments_of_ray_serve_turn_reuse_on(tmp_path: Path) -> None:
    [application] = read("ray-serve.yaml")["applications"]
    [config] = application["args"]["llm_configs"]
    given = dict(config["engine_kwargs"])
    register()
    args = AsyncEngineArgs(model=str(tmp_path), **given)  # a folder is not looked up
    assert args.enable_prefix_caching
    transfer = check_config(args.kv_transfer_config)  # type: ignore[arg-type]
    assert isinstance(transfer, KVTransferConfig)
    assert names_connector(transfer)
    options = SegReuseConfig.from_options(transfer.kv_connector_extra_config)
    assert options == SegReuseConfig(policy="auto", min_reused_tokens=128)


# nginx.


def test_nginx_hashes_our_header() -> None:
    text = (RECIPES / "nginx.conf").read_text()
    variable = "$http_" + HEADER.lower().replace("-", "_")
    assert f"map {variable} $segreuse_key" in text
    assert "hash $segreuse_key consistent;" in text
