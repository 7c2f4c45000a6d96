# SPDX-License-Identifier: Apache-2.0
"""An error of ours costs a request its reuse, never vLLM its engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from vllm.logger import init_logger

from vllm_segreuse.scheduling.planner import Planner

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.segreuse")


class Errors:
    """Of the hooks of one engine.

    Args:
        planner: is told which requests run without reuse.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def give_up(self, request: Request, where: str) -> None:
        """Log the error that is being handled; its request runs without reuse."""
        logger.exception(
            "segment reuse failed in %s; request %s runs without it", where, request.request_id
        )
        self._planner.give_up(request.request_id)

    @contextmanager
    def cost(self, request: Request, where: str) -> Iterator[None]:
        """An error inside costs the request its reuse, and goes no further."""
        try:
            yield
        except Exception:
            self.give_up(request, where)


class HasErrors(Protocol):
    """Whose methods are contained."""

    errors: Errors


def contained(otherwise: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a method that is about the request of its first argument: an error costs its reuse.

    Args:
        otherwise: what the method returns after an error.
    """

    def contain(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def within(self: HasErrors, request: Request, *args: Any) -> Any:
            try:
                return hook(self, request, *args)
            except Exception:
                self.errors.give_up(request, hook.__name__)
                return otherwise

        return within

    return contain
