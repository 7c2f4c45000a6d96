# SPDX-License-Identifier: Apache-2.0
"""From a request of vLLM to one that is searched for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from vllm_segreuse.cache.contexts import contexts_of
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.options.parsing import parse_request
from vllm_segreuse.scheduling.arrival import (
    NEVER_DONATES,
    all_tokens,
    bypass_reason,
    lora_id_of,
    namespace_of,
)
from vllm_segreuse.scheduling.feature import Arriving, use_of
from vllm_segreuse.scheduling.parts import Parts
from vllm_segreuse.scheduling.tracked import Bypass, Tags, TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Admission:
    """One per engine."""

    def __init__(self, parts: Parts) -> None:
        self._core, self._methods, self._planner = parts.core, parts.methods, parts.planner
        self._identify = parts.features.having("identify")
        self._admit, self._searched = (parts.features.having(it) for it in ("admit", "searched"))

    def arrive(self, request: Request) -> None:
        """A request arrived; one without extra keys is ignored."""
        params, config = request.sampling_params, self._core.config
        parsed = parse_request(params.extra_args if params else None, config, trusted=True)
        arriving = Arriving(request, parsed, parsed.extra_keys, parsed.options, self._methods)
        for feature in self._identify:
            feature.identify(arriving)
        if arriving.extra_keys is None:
            return
        reason = bypass_reason(request, arriving.images)
        arriving.key = namespace_of(request, arriving.extra_keys, arriving.images)
        tracked = arriving.tracked = TrackedRequest(
            request.request_id,
            self._prompt(arriving),
            self._methods.method(parsed.options, arriving.images, arriving.is_text),
            use_of(parsed.options),
            tags=Tags(lora_id_of(request)),
        )
        self._core.requests[request.request_id] = tracked  # also after an error below: it is ended
        if reason in NEVER_DONATES:
            tracked.donates_nothing()
        bypass = arriving.lacks if reason is None else Bypass(reason)
        if bypass is not None:
            arriving.bypass(*bypass)
        for feature in self._admit:
            feature.admit(arriving)
        self._planner.add(tracked)
        for feature in self._searched:
            feature.searched(arriving)

    def _prompt(self, arriving: Arriving) -> Prompt:
        request, images = arriving.request, arriving.images
        tokens = all_tokens(request)
        return Prompt(
            self._core.namespaces.intern(arriving.key),
            tokens if images is None else images.keyed(tokens),
            functools.partial(self._core.pool.resident_blocks, request),
            lambda first, last: request.block_hashes[first:last],
            lambda blocks: contexts_of(request.block_hashes, blocks),
            images,
        )
