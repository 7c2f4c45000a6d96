# SPDX-License-Identifier: Apache-2.0
"""One fleet, request by request: each engine computes prompts one after the other.

A prompt takes the time that the cost model gives for what is computed of it, and for what is copied
from host memory or another engine that of the link; nothing of it overlaps. Not counted: decoding,
batches, what a first token costs beside the model, and the passes' own copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.fleet.caches import EngineCache, Known
from bench.fleet.routers import FleetRouter, FleetView
from bench.fleet.traffic import FleetRequest, FloatArray, Traffic
from segreuse_tools.estimate.cost_model import CostModel
from segreuse_tools.estimate.gain import PREFIX, known_segments
from segreuse_tools.estimate.work_left import PolicyWork
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.request import PolicyOptions

COMPUTES_NOTHING_TWICE = "shift"
_LAYERS, _BLOCK_TOKENS = 32, 16


@dataclass(frozen=True)
class Links:
    """What copies of KV take.

    Attributes:
        token_bytes: KV of a token.
        host_bytes_s, network_bytes_s: from host memory, and from another engine.
    """

    token_bytes: int
    host_bytes_s: float
    network_bytes_s: float


@dataclass(frozen=True)
class FleetSetting:
    """A fleet.

    Attributes:
        engines: how many.
        router: see `ROUTERS`.
        policy: of segments, or `PREFIX`: prefix caching alone.
        gpu_tokens, host_tokens: that an engine's memory holds.
        cost, links: of its device.
        bound: see `routers`.
        is_remote: what another engine holds is fetched, where that is quicker than to compute it.
        dies, returns: shares of the window at which an engine is lost, and is back, empty; None:
            none is.
    """

    engines: int
    router: str
    policy: str
    gpu_tokens: int
    cost: CostModel
    links: Links
    host_tokens: int = 0
    bound: float = 0.25
    is_remote: bool = False
    dies: float | None = None
    returns: float = 2.0


@dataclass(frozen=True)
class FleetRun:
    """What became of each request; arrays are by request, in the order of arrival.

    Attributes:
        engine: that answered it.
        tokens, prefix, segments, host, remote: tokens of the prompt, and of these, by `Known`.
        computed: (token, layer) pairs over the layers.
        at_s, service_s, ttft_s: when it came, the time of its engine, and until its first token.
        lost: number of the engine that died.
    """

    engine: np.ndarray
    tokens: np.ndarray
    prefix: np.ndarray
    segments: np.ndarray
    host: np.ndarray
    remote: np.ndarray
    computed: FloatArray
    at_s: FloatArray
    service_s: FloatArray
    ttft_s: FloatArray
    lost: int | None = None


def simulate(traffic: Traffic, setting: FleetSetting) -> FleetRun:
    """All of the traffic through a fleet."""
    return _Fleet(traffic, setting).run()


class _Fleet:
    def __init__(self, traffic: Traffic, setting: FleetSetting) -> None:
        self._traffic, self._setting = traffic, setting
        self._view = FleetView(setting.engines, setting.bound * traffic.mean_full_s)
        self._router = FleetRouter(setting.router, self._view)
        self._work = None if setting.policy == PREFIX else _work(setting.policy)
        links = setting.links
        self._host_s = links.token_bytes / links.host_bytes_s
        self._remote_s = links.token_bytes / links.network_bytes_s
        pays = setting.is_remote and self._remote_s < setting.cost.token_s
        self.caches = [
            EngineCache(
                engine,
                (setting.gpu_tokens, setting.host_tokens),
                None if self._work is None else self._work.min_reused_tokens,
                (self._view.by_name, self._view.by_id),
                pays,
            )
            for engine in range(setting.engines)
        ]
        count = traffic.requests
        whole = ("engine", "tokens", "prefix", "segments", "host", "remote")
        self._out: Mapping[str, np.ndarray] = {
            **{name: np.zeros(count, np.int64) for name in whole},
            **{name: np.zeros(count) for name in ("computed", "at_s", "service_s", "ttft_s")},
        }
        self._waiting: list[tuple[float, FleetRequest]] = []  # at the engine that will die

    def run(self) -> FleetRun:
        setting, window_s = self._setting, self._traffic.window_s
        if setting.dies is None:
            for request in self._traffic:
                self._serve(request, request.at_s)
            return FleetRun(**self._out, lost=None)
        lost = setting.engines // 2
        events = [(setting.dies, self._dies), (setting.returns, self._returns)]
        for request in self._traffic:
            while events and request.at_s >= events[0][0] * window_s:
                when, happens = events.pop(0)
                happens(lost, when * window_s)
            finish_s = self._serve(request, request.at_s)
            if self._out["engine"][request.number] == lost:
                self._waiting.append((finish_s, request))
        return FleetRun(**self._out, lost=lost)

    def _dies(self, engine: int, now_s: float) -> None:
        """What it has not answered is sent again, to others."""
        self.caches[engine].clear()
        self._view.is_alive[engine] = False
        for finish_s, request in self._waiting:
            if finish_s > now_s:
                self._serve(request, now_s)

    def _returns(self, engine: int, now_s: float) -> None:
        self._view.is_alive[engine] = True
        self._view.free_at_s[engine] = now_s

    def _serve(self, request: FleetRequest, now_s: float) -> float:
        """When its first token is there."""
        engine = self._router.choose(request, now_s)
        known = self.caches[engine].run(request)
        computed = self._computed(request, known)
        service_s = self._setting.cost.seconds(computed, known.prefix_tokens, request.tokens)
        service_s += known.host_tokens * self._host_s + known.remote_tokens * self._remote_s
        finish_s = max(now_s, float(self._view.free_at_s[engine])) + service_s
        self._view.free_at_s[engine] = finish_s
        noted = (
            *(engine, request.tokens, known.prefix_tokens, known.segment_tokens),
            *(known.host_tokens, known.remote_tokens),
            *(computed, request.at_s, service_s, finish_s - request.at_s),
        )
        for array, value in zip(self._out.values(), noted, strict=True):
            array[request.number] = value
        return finish_s

    def _computed(self, request: FleetRequest, known: Known) -> float:
        left = request.tokens - known.prefix_tokens
        if self._work is None or not any(known.segments):
            return left
        if self._setting.policy == COMPUTES_NOTHING_TWICE:  # for speed: the same as below
            return left - known.segment_tokens
        reused, segments = known_segments(request.parts, known.segments, known.prefix_tokens)
        return self._work.of_segments(reused, segments, left)[self._setting.policy].computed


def _work(policy: str) -> PolicyWork:
    config = SegReuseConfig()
    options = {name: getattr(config, name) for name in PolicyOptions.model_fields}
    return PolicyWork((policy,), _BLOCK_TOKENS, _LAYERS, PolicyOptions(**options))
