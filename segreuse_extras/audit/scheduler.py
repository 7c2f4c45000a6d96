# SPDX-License-Identifier: Apache-2.0
"""Audits: which requests are drawn, and what those of a namespace that has drifted fall back to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from segreuse_extras.audit.audits import Audit
from segreuse_extras.audit.messages import AuditDone, AuditOrders
from segreuse_extras.audit.options import AuditServer
from segreuse_extras.audit.start import start_audits
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature, OwnRequests
from vllm_segreuse.scheduling.making import Making

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Auditing(Feature, OwnRequests):
    """Of one engine.

    Raises:
        ConfigError: the log cannot be opened.
    """

    name = "audit"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._options = AuditServer.of(core.config)
        self.audits = start_audits(core.vllm_config, self._options.audit, core.stats)
        self._classes: dict[str, str] = {}  # of the namespaces of requests
        self._fell_back: set[str] = set()
        self.calls = {"audits": self.audits.status}

    def admit(self, arriving: Arriving) -> None:
        """Requests of a namespace that has drifted get the options of the fallback."""
        assert arriving.extra_keys is not None
        request_id = arriving.request.request_id
        self._classes[request_id] = self._options.audit.class_of(arriving.extra_keys)
        namespace = arriving.tracked.prompt.namespace
        if not self.audits.falls_back(self._core.namespaces.digest(namespace)):
            return
        self._fell_back.add(request_id)
        arriving.takes_turns = False
        careful = self._options.fallback_options(arriving.options)
        if careful is None:
            arriving.bypass("fallback", restores=True)
        else:
            arriving.use(careful)

    def allocated(self, admitted: Admitted) -> None:
        """Draw requests that reuse, and not those that take what an equal prompt holds: that one
        was drawn from."""
        plan, left = admitted.tracked.plan, admitted.tracked.left_behind
        if not admitted.is_first:
            self.audits.forget(admitted.request.request_id)
        elif plan is not None and plan.num_reused and left.behind is None:
            self._draw(admitted, plan)

    def _draw(self, admitted: Admitted, plan: ReusePlan) -> None:
        """Audit a request, perhaps.

        Structured outputs are not compared: a grammar changes what is answered. A reference has no
        images. Requests that compress documents, or name compressed ones, are not compared either:
        the kept tokens computed as a text are no reference.
        """
        request, tracked = admitted.request, admitted.tracked
        if request.use_structured_output or request.mm_features:
            return
        if tracked.is_required or tracked.names_documents:
            return
        policy, report = tracked.method.policy, tracked.report
        namespace_class = self._classes[request.request_id]
        assert report is not None
        if not self.audits.draws(request.num_prompt_tokens, policy, namespace_class):
            return
        self.audits.admitted(
            Audit(
                request_id=request.request_id,
                policy=policy,
                namespace=self._core.namespaces.digest(tracked.prompt.namespace),
                namespace_class=namespace_class,
                fell_back=request.request_id in self._fell_back,
                prompt=list(request.prompt_token_ids or ()),
                lora_request=request.lora_request,
                found={
                    "prompt_tokens": request.num_prompt_tokens,
                    "prefix_tokens": report.prefix_tokens,
                    "segment_tokens": plan.num_reused,
                    "segments": report.matches,
                    "depth": plan.donor_depth,
                },
                planned={
                    "reused_tokens": plan.num_reused,
                    "recomputed_tokens": plan.num_recomputed,
                    "computed_share": report.computed_share,
                },
            )
        )

    def finished(self, ending: Ending) -> None:
        """A request has ended, or a reference."""
        request = ending.request
        if request.request_id in self._fell_back:
            ending.add(fallback=True)
        self._fell_back.discard(request.request_id)
        self._classes.pop(request.request_id, None)
        report = None if ending.tracked is None else ending.tracked.report
        # All fields: what is sent omits those of features that took no part.
        fields = {} if report is None else report._asdict()
        self.audits.ended(request.request_id, request.output_token_ids, fields)

    def called_back(self, request_id: str) -> None:
        """What was recorded of a request is not what it answers."""
        self.audits.forget(request_id)

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> AuditOrders | None:
        """What the workers are to record from this step on."""
        return self.audits.take_orders()

    def reported(self, message: AuditDone) -> None:
        """What came of references."""
        self.audits.compared(message.results)

    def to_add(self, running: int, waiting: int, is_paused: bool) -> Iterable[Request]:
        """A reference."""
        if is_paused:
            return ()
        reference = self.audits.next_reference(running, waiting, self._core.has_room)
        return () if reference is None else (reference,)

    def to_abort(self) -> Iterable[str]:
        """The reference that runs, if there is one."""
        reference = self.audits.reset()
        return () if reference is None else (reference,)


def start(making: Making) -> Auditing:
    """That of an engine."""
    return Auditing(making.core)
