# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a request to a knowledge base, each with its HTTP status."""

from __future__ import annotations


class KnowledgeError(Exception):
    """A request that cannot be carried out; nothing has changed.

    Attributes:
        status: HTTP status.
        type: one word for programs (`schemas.Error.type`).
        param: the field it is about, or None.
    """

    status = 500
    type = "error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidError(KnowledgeError):
    """A value that passes the schema does not suit this model."""

    status, type = 400, "invalid_request"


class NotFoundError(KnowledgeError):
    """No such base or document."""

    status, type = 404, "not_found"


class ConflictError(KnowledgeError):
    """The name is taken, or another request is changing the same thing."""

    status, type = 409, "conflict"


class NoRoomError(KnowledgeError):
    """The documents would need more than the frozen pool's share, or the second tier."""

    status, type = 507, "insufficient_storage"


class UnavailableError(KnowledgeError):
    """The engine cannot do it now, or not in this configuration."""

    status, type = 503, "unavailable"


class ManifestError(ValueError):
    """The manifest's file cannot be used."""
