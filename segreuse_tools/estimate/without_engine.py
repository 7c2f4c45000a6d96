# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse estimate` without an engine: read, simulate, print. Loads neither vLLM nor torch.

The log is read once, and forgotten behind the caches: how much memory it takes depends on their
sizes, not on the log's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segreuse_tools.command_line import is_one_of
from segreuse_tools.estimate.light_options import CACHE_TOKENS, chosen, sizes
from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces.formats import Format
from segreuse_tools.estimate.traces.lines import LogLines, files_of
from segreuse_tools.model_folder import InputError
from segreuse_tools.terminal import print_all
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.request import AUTO, RECOMMENDED
from vllm_segreuse.policies import POLICIES

if TYPE_CHECKING:
    from segreuse_tools.estimate.cost_model import CostModel
    from segreuse_tools.estimate.gain import Gain, GainSetting
    from segreuse_tools.estimate.prompts import PromptTokens

WRITTEN_BLOCK = 16
"""Tokens of an id that is written: the default of `timed_trace`."""

UPDATE_EVERY = 50
"""Prompts between two movements of the progress bar."""


@dataclass
class _Log:
    """Prompts of a log, and what is known of it while they are read."""

    format: str
    prompts: Iterator[PromptTokens]
    lines: LogLines
    left_out: LeftOut
    out_of_order: LeftOut


def run(given: argparse.Namespace, found: Format | None) -> None:
    """Print the estimate of a log.

    Args:
        given: the command's arguments.
        found: format of the log; None: none is known, so bodies are expected.

    Raises:
        LogError: the log cannot be read, or holds nothing that can be replayed.
        InputError, ConfigError: options are wrong.
    """
    for out in (given.write, given.plot):
        if is_one_of(out, [*files_of(given.requests), given.config, given.speed]):
            raise InputError(f"{out} is read, and would be overwritten: name another file")
    config = SegReuseConfig() if given.config is None else SegReuseConfig.from_yaml(given.config)
    setting = _setting(given, config)
    log = _opened(given, found)
    gain = _simulated(given, setting, log)
    if given.json:
        print_all(json.dumps(gain.as_json(), indent=2))
    else:
        from segreuse_tools.estimate.gain_text import print_gain

        print_gain(gain)
    if given.plot is not None:  # last: what has taken long is printed if this fails
        from segreuse_tools.estimate.gain_plot import draw

        draw(gain, given.plot)


def _setting(given: argparse.Namespace, config: SegReuseConfig) -> GainSetting:
    from segreuse_tools.estimate.gain import GainSetting
    from segreuse_tools.estimate.work_left import NEVER_BY_CONTENT
    from vllm_segreuse.options.request import PolicyOptions

    named = [RECOMMENDED if name == AUTO else name for name in given.policy]
    default = config.policy if config.policy != NEVER_BY_CONTENT else RECOMMENDED
    policies = dict.fromkeys(named or [default, *POLICIES])
    policies.pop(NEVER_BY_CONTENT, None)
    if not policies:
        raise InputError(
            f"policy {NEVER_BY_CONTENT} finds what prefix caching finds, which is shown anyway: "
            "name another one"
        )
    options = {name: getattr(config, name) for name in PolicyOptions.model_fields}
    return GainSetting(
        cache_tokens=given.cache_tokens or sizes(",".join(CACHE_TOKENS)),
        block_size=given.block_size,
        policies=tuple(policies),
        layers=given.layers or 32,
        engines=given.engines or 1,
        router=given.router or "session",
        tier_tokens=given.tier_tokens or 0,
        max_depth=config.max_provenance_depth,
        options=PolicyOptions(**options),
        cost=_cost(given),
    )


def _cost(given: argparse.Namespace) -> CostModel | None:
    from segreuse_tools.estimate.cost_model import CostModel, measured

    tokens, pairs = given.prefill_tokens_per_second, given.attention_pairs_per_second
    if given.speed is not None:
        if tokens or pairs:
            raise InputError("--speed has both times: give it, or the numbers")
        return measured(given.speed)
    if tokens is None:
        if pairs is not None:
            raise InputError("--attention-pairs-per-second needs --prefill-tokens-per-second")
        return None
    return CostModel(1 / tokens, 1 / pairs if pairs else 0.0)


def _opened(given: argparse.Namespace, found: Format | None) -> _Log:
    left_out = LeftOut(given.strict)
    if given.write_block_size is not None and given.write is None:
        raise InputError("--write-block-size needs --write FILE.jsonl")
    if found in (None, Format.BODIES):
        if given.write is not None:
            raise InputError(f"--write is for traces of ids, and {given.requests} is none")
        from segreuse_tools.estimate.light_rendering import BodyPrompts

        bodies = BodyPrompts(given.requests, given.model, given.extra_keys, left_out)
        bodies.answer_tokens = given.answer_tokens
        none = LeftOut(strict=False)
        return _Log(str(Format.BODIES), bodies.prompts(), bodies.lines, left_out, none)
    from segreuse_tools.estimate.prompts import of_trace
    from segreuse_tools.estimate.traces.reading import Trace

    trace = Trace(given.requests, left_out, given.trace_block_size)
    return _Log(str(trace.format), of_trace(trace), trace.lines, left_out, trace.out_of_order)


def _simulated(given: argparse.Namespace, setting: GainSetting, log: _Log) -> Gain:
    from segreuse_tools.estimate.gain import Gain
    from segreuse_tools.estimate.side_by_side import SideBySide

    which = chosen(given)
    prompts = itertools.islice(_shown(log), which.start, which.stop)
    with SideBySide(setting) as sizes:
        for prompt in _written(given, prompts):
            sizes.run(prompt)
        sizes.finish()
        counted = sizes.own
        if not counted.requests:
            behind = f" behind the first {given.start:,} requests" if given.start else ""
            whys = "; ".join(map(str, log.left_out.reasons)) or "no line"
            raise LogError(f"{given.requests} holds nothing{behind} that can be replayed: {whys}")
        return Gain(
            format=log.format,
            requests=counted.requests,
            prompt_tokens=counted.prompt_tokens,
            median_tokens=round(counted.lengths.quantile(0.5)),
            left_out=log.left_out.reasons,
            out_of_order=log.out_of_order.reasons,
            turns=counted.sessions.turns,
            block_size=setting.block_size,
            engines=setting.engines,
            router=setting.router,
            tier_tokens=setting.tier_tokens,
            sizes=tuple(sizes.rows()),
        )


def _written(given: argparse.Namespace, prompts: Iterator[PromptTokens]) -> Iterator[PromptTokens]:
    """The prompts, each written on its way if that was asked for."""
    if given.write is None:
        yield from prompts
        return
    from segreuse_tools.estimate.traces.writing import HashIdFile

    with HashIdFile(given.write, given.write_block_size or WRITTEN_BLOCK) as file:
        for prompt in prompts:
            assert prompt.parts is not None
            file.write(prompt.parts, prompt.answer_tokens, prompt.time_s)
            yield prompt


def _shown(log: _Log) -> Iterator[PromptTokens]:
    """The prompts, with a bar on a terminal."""
    if not sys.stderr.isatty():
        yield from log.prompts
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(log.format, total=log.lines.total_bytes)
        for number, prompt in enumerate(log.prompts, 1):
            yield prompt
            if number % UPDATE_EVERY == 0:
                what = f"{log.format}: {number:,} requests"
                progress.update(task, completed=log.lines.read_bytes, description=what)
