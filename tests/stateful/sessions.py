# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: requests whose prompt comes in parts, each answered before the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from tests.stateful.worker import STOP, Identity

if TYPE_CHECKING:
    from tests.stateful.world import World


@dataclass
class Session:
    """One of them.

    Attributes:
        name: id of its request.
        keys: extra keys.
        most: tokens that it has at most, with the answers to come.
        is_closed: its last part was sent.
    """

    name: str
    keys: tuple[str, ...] | None
    most: int = 0
    is_closed: bool = False


class Sessions:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._all: list[Session] = []

    @property
    def open(self) -> list[Session]:
        """Those that wait for a further part, or may."""
        live = self._world.scheduler.requests
        return [each for each in self._all if each.name in live and not each.is_closed]

    def begin(self, tokens: list[int], keys: tuple[str, ...] | None, answer: int) -> None:
        """A session arrives with its first part."""
        session = Session(f"session-{len(self._all)}", keys)
        self._all.append(session)
        self._world.identities[session.name] = Identity(keys, None, None), 0
        self._send(session, tokens, answer)

    def go_on(self, session: Session, tokens: list[int], answer: int, longest: int) -> None:
        """Its next part arrives; the last one if there is no room for it."""
        if session.most + len(tokens) + answer > longest:
            session.is_closed = True
        self._send(session, tokens, answer)

    def close(self) -> None:
        """The clients have gone."""
        names = [each.name for each in self._all if each.name in self._world.scheduler.requests]
        self._world.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def _send(self, session: Session, tokens: list[int], answer: int) -> None:
        self._world.counts.update({"events": 1, "parts of sessions": 1})
        session.most += len(tokens) + answer
        extra = None if session.keys is None else {"extra_keys": list(session.keys)}
        params = SamplingParams(max_tokens=answer, stop_token_ids=[STOP], extra_args=extra)
        resumable = not session.is_closed
        self._world.submit(session.name, tokens, params, resumable=resumable)
