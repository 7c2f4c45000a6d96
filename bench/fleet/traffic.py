# SPDX-License-Identifier: Apache-2.0
"""A trace as the traffic of a fleet: copies of it side by side, each a tenant of its own.

Assumed, since no trace of a fleet is published: tenants ask for as much as each other, each at
another time of its week (or of its conversation), and have a share of their components in common.
Times are the trace's, stretched: each tenant's requests fill the same window.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness import BenchError
from segreuse_tools.estimate.component_cache import name_behind
from segreuse_tools.estimate.cost_model import CostModel
from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces.formats import Format
from segreuse_tools.estimate.traces.reading import Trace
from segreuse_tools.estimate.traces.request import Kind, PromptPart, TraceRequest

FloatArray = npt.NDArray[np.float64]


class FleetRequest(NamedTuple):
    """A request.

    Attributes:
        number: of it, by the time of its arrival.
        at_s: when it arrives.
        parts: of the prompt; their ids mean the same within one tenant.
        ids: of the parts, which mean the same in all of the fleet.
        names: of each part and all in front of it.
        session: of the user or conversation.
        documents: ids of what it shares with others.
        tokens, answer_tokens: of the prompt and the answer.
    """

    number: int
    at_s: float
    parts: tuple[PromptPart, ...]
    ids: tuple[int, ...]
    names: tuple[int, ...]
    session: int
    documents: tuple[int, ...]
    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class TenantSetting:
    """How a trace becomes a fleet's traffic.

    Attributes:
        engines: of the fleet.
        requests_per_engine: on average.
        engines_per_tenant: that a tenant keeps as busy as the others together keep theirs; a tenant
            asks no more than the trace has.
        common_share: of the components, the same in all tenants.
        seed: of where each tenant begins.
    """

    engines: int
    requests_per_engine: int
    engines_per_tenant: float = 8.0
    common_share: float = 0.0
    seed: int = 0


class Streams:
    """The requests of a trace, as far as tenants repeat them.

    Args:
        path: of the trace.
        block_parts: blocks of a conversation that count as one component: theirs are small.

    Attributes:
        is_of_conversations: each stream is one, and begins anew with other text at its end. Else
            there is one stream, whose components stay what they are.
        streams: requests in order.

    Raises:
        BenchError: it cannot be read.
    """

    def __init__(self, path: Path, block_parts: int = 16) -> None:
        try:
            trace = Trace(path, LeftOut(strict=False))
            requests = list(trace.requests())
        except LogError as error:
            raise BenchError(str(error)) from error
        if not requests:
            raise BenchError(f"{path} holds nothing that can be replayed")
        self.name = path.resolve().name
        self.is_of_conversations = trace.format is Format.WEKA
        grouped: dict[str | None, list[TraceRequest]] = {}
        for request in requests:
            key = request.session if self.is_of_conversations else None
            grouped.setdefault(key, []).append(request)
        self.streams = [*grouped.values()]
        self._block_parts = block_parts

    def parts(self, request: TraceRequest) -> tuple[PromptPart, ...]:
        """Of a request: its components."""
        parts, size = request.parts, self._block_parts
        if size == 1 or any(part.kind is not Kind.BLOCK for part in parts):
            return parts
        groups = [parts[at : at + size] for at in range(0, len(parts), size)]
        return tuple(
            PromptPart(hash(tuple(part.id for part in some)), sum(part.tokens for part in some))
            for some in groups
        )


class _Place(NamedTuple):
    """Of a request: when (0 to 1), whose, and which of the stream, that is in so many turns."""

    at: float
    tenant: int
    stream: int
    at_index: int
    turn: int


class Traffic:
    """Requests in the order of their arrival; the same at every pass.

    Args:
        streams: of the trace.
        setting: see there.
        cost: of the engines, by which load is counted.
        load: share of the fleet's time that all prompts would take if nothing were cached.

    Attributes:
        window_s: in which all of them arrive.
        mean_full_s: a prompt's time, on average, if nothing is cached.
        tokens: of all prompts.
        requests: how many there are.
    """

    def __init__(
        self, streams: Streams, setting: TenantSetting, cost: CostModel, load: float
    ) -> None:
        self._setting = setting
        self._streams = streams
        self._places = sorted(_places(streams, setting))
        self._parts = [[streams.parts(it) for it in stream] for stream in streams.streams]
        lengths = [[it.prompt_tokens for it in stream] for stream in streams.streams]
        counts = np.array([lengths[it.stream][it.at_index] for it in self._places])
        full_s = float(sum(cost.seconds(n, 0, n) for n in counts.tolist()))
        self.requests = len(counts)
        self.tokens = int(counts.sum())
        self.mean_full_s = full_s / len(counts)
        self.window_s = full_s / (setting.engines * load)

    def at_load(self, load: float) -> Traffic:
        """The same requests, sooner or later."""
        other = copy.copy(self)
        other.window_s = self.mean_full_s * self.requests / (self._setting.engines * load)
        return other

    def __iter__(self) -> Iterator[FleetRequest]:
        for number, place in enumerate(self._places):
            yield self._made(number, place)

    def _made(self, number: int, place: _Place) -> FleetRequest:
        source = self._streams.streams[place.stream][place.at_index]
        parts = self._parts[place.stream][place.at_index]
        whose = (place.tenant, place.turn if self._streams.is_of_conversations else 0)
        ids = tuple(self._relabelled(part.id, whose) for part in parts)
        names, name = [], 0
        for part, id in zip(parts, ids, strict=True):
            name = name_behind(name, part._replace(id=id))
            names.append(name)
        passages = [id for part, id in zip(parts, ids, strict=True) if part.kind is Kind.PASSAGE]
        return FleetRequest(
            number,
            place.at * self.window_s,
            parts,
            ids,
            tuple(names),
            hash((whose, _number_of(source.session or ""))),
            tuple(passages) or ids,
            source.prompt_tokens,
            source.output_tokens,
        )

    def _relabelled(self, id: int, whose: tuple[int, int]) -> int:
        share = self._setting.common_share
        # Tuples of integers have the same hash in every process, unlike texts.
        if share and hash((id, 1)) % 4096 < 4096 * share:
            return id
        return hash((id, whose))


def _number_of(session: str) -> int:
    return int.from_bytes(session.encode(), "little") % ((1 << 61) - 1)


def _places(streams: Streams, setting: TenantSetting) -> Iterator[_Place]:
    rng = np.random.default_rng(setting.seed)
    left = setting.engines * setting.requests_per_engine
    most = max(1, round(setting.requests_per_engine * setting.engines_per_tenant))
    tenant = 0
    while left > 0:
        which = int(rng.integers(len(streams.streams)))
        stream = streams.streams[which]
        count = min(len(stream), most, left)
        start = 0 if count == len(stream) == left else int(rng.integers(len(stream)))
        at = _when(stream, start, count)
        yield from (
            _Place(
                float(when), tenant, which, (start + n) % len(stream), (start + n) // len(stream)
            )
            for n, when in enumerate(at)
        )
        left -= count
        tenant += 1


def _when(stream: Sequence[TraceRequest], start: int, count: int) -> FloatArray:
    """Times of a tenant's requests, float64 `[count]` from 0 on and below 1."""
    times = np.array([request.time_s or 0.0 for request in stream])
    week = times[-1] - times[0] + (times[-1] - times[0]) / max(1, len(times) - 1)
    numbers = np.arange(start, start + count)
    at = times[numbers % len(times)] + numbers // len(times) * week
    at -= at[0]
    # The last one is as far from the end as two are apart on average.
    span = at[-1] * (1 + 1 / max(1, count - 1))
    return np.asarray(at / span if span else np.arange(count) / count)
