# SPDX-License-Identifier: Apache-2.0
"""Audits from the request that is drawn to the line in the log: the scheduler's half.

    admitted ──► recorded ──► waiting ──► running ──► compared
                    │            │           │
                    └ ended      └ busy      └ failed           what else may come of it

One reference runs at a time. An error in here ends the audits, and nothing else.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from segreuse_extras.audit.draw import Draw
from segreuse_extras.audit.drifting import Drifted, Drifting
from segreuse_extras.audit.messages import AuditOrders, AuditResult, Recording, Reference
from segreuse_extras.audit.metrics import AuditOutcome
from segreuse_extras.audit.options import FALLBACK, AuditOptions
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.scheduling.arrival import has_adapter

logger = init_logger("vllm.segreuse")

MOST_RECENT = 200
"""Audits that the administrator's route shows."""


@dataclass
class Audit:
    """One audit.

    Attributes:
        request_id: of the request that is audited; vLLM's.
        policy: under which it reused.
        namespace: digest, which nobody can trace back to the extra keys.
        namespace_class: see `AuditOptions.classes`.
        fell_back: its namespace had drifted when it arrived.
        prompt: tokens.
        lora_request: vLLM's; None without an adapter.
        found: what the matcher found.
        planned: what was to be computed.
        materialised: what the workers have computed.
        answer: first tokens of the answer.
        ended_s: when the request had ended.
        reference_id: of the request that computes it in full.
    """

    request_id: str
    policy: str
    namespace: int
    namespace_class: str
    fell_back: bool
    prompt: list[int]
    lora_request: Any
    found: Mapping[str, Any]
    planned: Mapping[str, Any]
    materialised: Mapping[str, Any] = field(default_factory=dict)
    answer: tuple[int, ...] = ()
    ended_s: float = 0.0
    reference_id: str = ""


def _contained(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error ends the audits of this engine; requests go on."""

    @functools.wraps(method)
    def contained(self: Audits, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception:
            logger.exception("segment reuse: no more audits, after an error in %s", method.__name__)
            self.broken = True
            return None

    return contained


class Audits:
    """One per engine.

    Args:
        options: of the audit.
        stats: counts what comes of them.
        make_request: the reference of an audit as a request of vLLM: takes its id, the audit, and
            how many tokens it is to generate.
        most_tokens: of an answer that are compared, for a prompt of so many tokens: 0 for none.
        write: adds a line to the log.
        chance, clock: see `Draw`.

    Attributes:
        broken: there are no more audits, because of an error.
    """

    def __init__(
        self,
        options: AuditOptions,
        stats: Counted,
        make_request: Callable[[str, Audit, int], Any],
        most_tokens: Callable[[int], int],
        write: Callable[[Audit, Mapping[str, Any]], None],
        chance: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broken = False
        self._options = options
        self._stats = stats
        self._make_request = make_request
        self._most_tokens = most_tokens
        self._write = write
        self._clock = clock
        self._draw = Draw(options, chance, clock)
        self._drifting = Drifting(options, clock)
        self._recorded: dict[str, Audit] = {}
        self._waiting: deque[Audit] = deque()
        self._running: Audit | None = None
        self._orders = AuditOrders()
        self._number = 0
        self._outcomes: Counter[str] = Counter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=MOST_RECENT)

    @property
    def num_waiting(self) -> int:
        """Audited requests that have ended, and whose reference has not begun."""
        return len(self._waiting)

    @property
    def has_orders(self) -> bool:
        """Whether the workers have not heard of all that they are to do."""
        return bool(self._orders)

    # What becomes of a namespace.

    def falls_back(self, namespace: int) -> bool:
        """Whether requests of a namespace run as `fallback` says, as things are."""
        return self._options.on_drift == FALLBACK and self._drifting.has_drifted(namespace)

    # What becomes of a request.

    @_contained
    def draws(self, num_prompt_tokens: int, policy: str, namespace_class: str) -> bool:
        """Whether a request is to be audited that reuses, and was admitted for the first time."""
        fits = self._most_tokens(num_prompt_tokens) > 0
        drawn = self._draw.draw(num_prompt_tokens, self._under_way, fits)
        if drawn is None:
            return False
        if drawn == "audited":
            return True
        self._count(policy, namespace_class, drawn)
        return False

    @_contained
    def admitted(self, audit: Audit) -> None:
        """A request that was drawn."""
        self._recorded[audit.request_id] = audit
        tokens = self._most_tokens(len(audit.prompt))
        self._orders.record[audit.request_id] = Recording(len(audit.prompt), tokens)

    @_contained
    def forget(self, request_id: str) -> None:
        """A request is computed anew: what was recorded of it is not what it answers."""
        audit = self._recorded.pop(request_id, None)
        if audit is not None:
            self._drop(audit, "ended")

    @_contained
    def ended(self, request_id: str, answer: Iterable[int], report: Mapping[str, Any]) -> None:
        """A request has ended, in whatever way.

        One that was aborted is compared, too, by the tokens that it had: behind a stop string it is
        vLLM's API server that aborts it.

        Args:
            answer: its tokens.
            report: all fields of its report.
        """
        if self._running is not None and self._running.reference_id == request_id:
            audit, self._running = self._running, None
            self._drop(audit, "failed")
            return
        recorded = self._recorded.pop(request_id, None)
        if recorded is None:
            return
        most = self._most_tokens(len(recorded.prompt))
        recorded.answer = tuple(answer)[:most]
        if not recorded.answer:
            self._drop(recorded, "ended")
            return
        recorded.materialised = {name: report.get(name) for name in MATERIALISED}
        recorded.ended_s = self._clock()
        self._waiting.append(recorded)

    # What becomes of a reference.

    @_contained
    def next_reference(self, running: int, waiting: int, has_room: Callable[[int], bool]) -> Any:
        """A step is over: the request that is to be added to the engine now; None for none.

        Args:
            running: requests that run; a reference among them counts, too.
            waiting: requests that wait.
            has_room: whether so many tokens fit into the KV cache beside what is held.
        """
        self._note_recovered()
        while self._waiting and self._waits_too_long(self._waiting[0]):
            self._drop(self._waiting.popleft(), "busy")
        if not self._waiting or self._running is not None:
            return None
        audit = self._waiting[0]
        # One token more than are compared: what came of it is reported in the step of the last.
        generated = len(audit.answer) + 1
        if waiting or running > self._options.max_running:
            return None
        if not has_room(len(audit.prompt) + generated):
            return None
        self._waiting.popleft()
        if not has_adapter(audit):
            self._drop(audit, "failed")
            return None
        self._number += 1
        audit.reference_id = f"segreuse-audit-{self._number}"
        self._running = audit
        self._orders.compare[audit.reference_id] = Reference(
            audit.request_id, len(audit.prompt), audit.answer
        )
        return self._make_request(audit.reference_id, audit, generated)

    @_contained
    def compared(self, results: Mapping[str, AuditResult]) -> None:
        """The workers report what came of references, by id."""
        audit = self._running
        if audit is None or audit.reference_id not in results:
            return
        self._running, result = None, results[audit.reference_id]
        if not math.isfinite(result.kl):
            self._drop(audit, "failed")
            return
        audited = {"policy": audit.policy, "namespace_class": audit.namespace_class}
        self._stats.observe("audit_kl", result.kl, **audited)
        others = result.compared - result.agreed
        self._stats.inc("audit_tokens_total", result.agreed, **audited, agreement="same")
        self._stats.inc("audit_tokens_total", others, **audited, agreement="other")
        self._end(audit, "compared", result)
        if not audit.fell_back:
            drifted = self._drifting.note(audit.namespace, audit.namespace_class, result.kl)
            if drifted is not None:
                self._note_drifted(drifted)

    @_contained
    def reset(self) -> str | None:
        """The cache is reset, perhaps for other weights: nothing of before is compared any more.

        Returns:
            The reference that runs, which has to be aborted; None if none does.
        """
        for audit in [*self._recorded.values(), *self._waiting]:
            self._drop(audit, "ended")
        self._recorded.clear()
        self._waiting.clear()
        return None if self._running is None else self._running.reference_id

    def take_orders(self) -> AuditOrders | None:
        """What the workers have not been sent; None for nothing."""
        if not self._orders:
            return None
        taken, self._orders = self._orders, AuditOrders()
        return taken

    def status(self) -> dict[str, Any]:
        """What the administrator's route shows."""
        now = self._clock()
        return {
            "share": self._options.share,
            "on_drift": self._options.on_drift,
            "failed": self.broken,
            "under_way": self._under_way,
            "outcomes": dict(self._outcomes),
            "drifted": [
                {
                    "namespace": shown(each.namespace),
                    "namespace_class": each.namespace_class,
                    "audits": each.audits,
                    "above": each.above,
                    "recovers_s": round(each.until_s - now, 1),
                }
                for each in self._drifting.all_drifted()[-MOST_RECENT:]
            ],
            "recent": list(self._recent),
        }

    @property
    def _under_way(self) -> int:
        return len(self._recorded) + len(self._waiting) + (self._running is not None)

    def _waits_too_long(self, audit: Audit) -> bool:
        return self._clock() - audit.ended_s > self._options.max_wait_s

    def _drop(self, audit: Audit, outcome: AuditOutcome) -> None:
        """What the workers may hold of it is not wanted any more."""
        self._orders.forget += [audit.request_id, audit.reference_id]
        self._end(audit, outcome)

    def _count(self, policy: str, namespace_class: str, outcome: AuditOutcome) -> None:
        self._outcomes[outcome] += 1
        self._stats.inc(
            "audits_total", policy=policy, namespace_class=namespace_class, outcome=outcome
        )

    def _end(self, audit: Audit, outcome: AuditOutcome, result: AuditResult | None = None) -> None:
        self._count(audit.policy, audit.namespace_class, outcome)
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "outcome": outcome,
            "request_id": audit.request_id,
            "policy": audit.policy,
            "namespace_class": audit.namespace_class,
            "namespace": shown(audit.namespace),
            "fallback": audit.fell_back,
            "found": dict(audit.found),
            "planned": dict(audit.planned),
            "materialised": dict(audit.materialised) or None,
            "kl": None if result is None else float(f"{result.kl:.6g}"),
            "agreed_tokens": None if result is None else result.agreed,
            "compared_tokens": None if result is None else result.compared,
        }
        if outcome == "compared":
            self._recent.append({name: line[name] for name in RECENT})
        self._write(audit, line)

    def _note_drifted(self, drifted: Drifted) -> None:
        self._stats.inc(
            "audit_drifted_total", namespace_class=drifted.namespace_class, change="drifted"
        )
        logger.warning(
            "segment reuse: %d of the last %d audits of namespace %s (class %s) were above "
            "max_kl=%g; %s",
            drifted.above,
            drifted.audits,
            shown(drifted.namespace),
            drifted.namespace_class,
            self._options.max_kl,
            f"its requests run with {self._options.fallback} for {self._options.recover_s:g} s"
            if self._options.on_drift == FALLBACK
            else "its requests go on as before",
        )

    def _note_recovered(self) -> None:
        for each in self._drifting.recovered():
            self._stats.inc(
                "audit_drifted_total", namespace_class=each.namespace_class, change="recovered"
            )
            logger.info(
                "segment reuse: namespace %s (class %s) is audited anew, with its own options",
                shown(each.namespace),
                each.namespace_class,
            )


MATERIALISED = ("reused_tokens", "recomputed_tokens", "computed_share", "in_full", "drift")
"""Fields of a report that say what the workers have computed."""

RECENT = (
    *("time", "policy", "namespace_class", "namespace", "fallback"),
    *("kl", "agreed_tokens", "compared_tokens"),
)
"""Fields of a line that the administrator's route shows, too."""


def shown(namespace: int) -> str:
    """A namespace's digest as text."""
    return f"{namespace:016x}"
