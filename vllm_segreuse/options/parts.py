# SPDX-License-Identifier: Apache-2.0
"""Options that a feature brings: `features/*/options.py` has a class of them, and `config/` joins
all with the options that there are without features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict


class OptionsPart(BaseModel):
    """Keys of one feature among those of a server, or of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, options: BaseModel) -> Self:
        """The feature's options among all others.

        Raises:
            TypeError: `options` were made without this feature.
        """
        if not isinstance(options, cls):
            raise TypeError(f"{type(options).__name__} has no {cls.__name__}: use `config`'s")
        return options


class Refusal(NamedTuple):
    """Why a request is refused.

    Attributes:
        option: without prefix.
        text: begins with `option=value`.
    """

    option: str
    text: str


class ServerPart(OptionsPart):
    """Keys of the server's options."""

    opening: ClassVar[Mapping[str, Any]] = {}
    """Keys without which the server refuses some options of requests, with a value that allows
    them."""


class RequestPart(OptionsPart):
    """Keys of a request's options, and of the server's, which are the default of requests."""

    @classmethod
    def defaults(cls, server: BaseModel) -> dict[str, Any]:
        """Values of a request that names none of its own, by key."""
        return {name: getattr(server, name) for name in cls.model_fields}

    @classmethod
    def refused(cls, options: BaseModel, server: BaseModel) -> Refusal | None:
        """What a request cannot have on this server; None: it has nothing of it."""
        return None
