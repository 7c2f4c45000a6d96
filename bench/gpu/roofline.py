# SPDX-License-Identifier: Apache-2.0
"""How soon a first token could come at all, beside how soon it came.

    python -m bench.gpu.roofline gpu-headline.json --json gpu-roofline.json

A request cannot take less than vLLM itself does for a prompt that its prefix cache holds in full,
and behind it, at the speeds of the GPU's data sheet: the products of the computed tokens with the
weights, or reading these once; attention of the computed tokens; reading and writing the keys and
values that are moved. Choosing tokens, starting kernels and everything between them is taken to
cost nothing. So a goal beyond this is missed whatever our kernels do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness
from bench.gpu.models import SHAPES

BYTES = 2
"""Of a number in bfloat16."""


class Device(NamedTuple):
    """What a data sheet says: operations a second in bfloat16, dense, and bytes a second."""

    flops: float
    bandwidth: float


DEVICES = {
    "NVIDIA H100 80GB HBM3": Device(989e12, 3.35e12),
    "NVIDIA H200": Device(989e12, 4.8e12),
}


class Shape(NamedTuple):
    """What a token costs in one decoder layer without experts."""

    layers: int
    weights: int  # numbers
    attention: int  # heads times head size
    kv: int  # numbers: keys and values

    @classmethod
    def named(cls, name: str) -> Shape:
        """Of `models.SHAPES`."""
        config = SHAPES[name]
        hidden, head = config["hidden_size"], config["head_dim"]
        attention = config["num_attention_heads"] * head
        kv = 2 * config["num_key_value_heads"] * head
        weights = hidden * (2 * attention + kv + 3 * config["intermediate_size"])
        return cls(config["num_hidden_layers"], weights, attention, kv)


def bounds(row: harness.Row, vllm_ms: float, device: Device) -> harness.Row:
    """The least that one policy's requests take, milliseconds.

    Args:
        row: of the parts `headline` and `ttft-SHAPE`; `computed_share` is of tokens times layers.
        vllm_ms: the same prompt from vLLM's prefix cache.
    """
    shape = Shape.named(row["shape"])
    computed = row["computed_share"] * row["tokens"] * shape.layers
    # They lie all over the prompt, so on average they attend to half of it: two products.
    attention = computed * (row["tokens"] / 2) * 4 * shape.attention
    moved = 2 * BYTES * row["reused"] * shape.layers * shape.kv
    reading = BYTES * shape.layers * shape.weights / device.bandwidth
    products = max(2 * computed * shape.weights / device.flops, reading)
    parts = {
        "vllm_ms": vllm_ms,
        "products_ms": 1e3 * products,
        "attention_ms": 1e3 * attention / device.flops,
        "moving_ms": 1e3 * moved / device.bandwidth,
    }
    least = sum(parts.values())
    return {**row, **parts, "least_ms": least}


def run(result: dict[str, Any]) -> harness.SuiteResult:
    """The bounds of every policy and load of a results file.

    Raises:
        harness.BenchError: of a GPU whose data sheet is not known here.
    """
    gpu = result["environment"].get("gpu")
    if gpu not in DEVICES:
        raise harness.BenchError(
            f"the speeds of {gpu!r} are not known here: add those of its data sheet to DEVICES in "
            f"{Path(__file__).name}"
        )
    measured = [row for row in result["rows"] if "median_ms" in row]
    medians = {(*_load(row), row["policy"]): row["median_ms"] for row in measured}
    rows: list[harness.Row] = []
    for row in measured:
        if row["policy"] == "cached":
            continue
        vllm_ms = 0.0 if row["policy"] == "full" else medians[*_load(row), "cached"]
        found = bounds(row, vllm_ms, DEVICES[gpu])
        rows.append({**found, "most_speedup": medians[*_load(row), "full"] / found["least_ms"]})
    return {"rows": rows, "summary": {"device": gpu}}


def _load(row: harness.Row) -> tuple[str, int, float]:
    return row["shape"], row["tokens"], row["share"]


def main(argv: list[str] | None = None) -> int:
    """Write them with the environment of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("measured", type=Path, help="what part `headline` has written")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    result = json.loads(args.measured.read_text())
    try:
        found = run(result)
    except harness.BenchError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    harness.write_json(args.json, "gpu", result["environment"], found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
