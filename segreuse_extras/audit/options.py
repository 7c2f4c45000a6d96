# SPDX-License-Identifier: Apache-2.0
"""Options of the audit: the block `audit` of the server's options ."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.options.values import (
    MAX_TOKENS,
    count,
    first_error,
    number,
    only_known,
    path,
    short_repr,
    switch,
    unknown_text,
)

OTHER = "other"
"""Class of the namespaces that no prefix names."""

MAX_CLASSES = 32
"""Classes are labels of metrics: each is a time series of every policy."""

FULL = "full"
FALLBACK = "fallback"

_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,32}")


def _log(value: Any) -> Any:
    """A path whose folder is there and may be written."""
    path(value)
    if value is None:
        return None
    folder = Path(value).absolute().parent
    rule = "must be a file in a folder that exists, or null"
    try:
        if not folder.is_dir() or Path(value).is_dir():
            raise ValueError(rule)
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{rule}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError("must be a file in a folder that this user may write, or null")
    return value


def _classes(value: Any) -> Any:
    """{prefix of the first extra key: class}"""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise ValueError("must map prefixes of extra keys to names of classes, or be null")
    for name in value.values():
        if not isinstance(name, str) or not _CLASS.fullmatch(name):
            raise ValueError(
                f"names the class {short_repr(name)}, which must be 1 to 32 letters, digits, dots, "
                "hyphens or underscores"
            )
    if len(set(value.values())) > MAX_CLASSES:
        raise ValueError(f"must name {MAX_CLASSES} classes at most")
    return dict(value)


def _reaction(value: Any) -> Any:
    if value not in ("report", FALLBACK):
        raise ValueError(f"must be report or {FALLBACK}")
    return value


def _fallback(value: Any) -> Any:
    is_block = isinstance(value, Mapping) and value and all(isinstance(it, str) for it in value)
    if value != FULL and not is_block:
        raise ValueError(f"must be {FULL}, or a mapping of options of a request such as a policy")
    return value if value == FULL else dict(value)


class AuditOptions(BaseModel):
    """Which requests are audited, what that may cost, and what follows from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: Annotated[float, number(1)] = 0.0
    """Share of the reusing requests that is also computed in full, 0..1; 0: none."""

    per_minute: Annotated[int, count(1, 6000)] = 6
    """Most audits that are begun within a minute, by engine."""

    max_prompt_tokens: Annotated[int, count(1, MAX_TOKENS)] = 8192
    """Longer prompts are not audited."""

    tokens: Annotated[int, count(1, 64)] = 8
    """Tokens of the answer at which the most likely token is compared."""

    max_running: Annotated[int, count(0, 65536)] = 4
    """The full computation begins once no request waits and at most so many run."""

    max_wait_s: Annotated[float, number(3600)] = 30.0
    """An audit for which the engine was not idle enough for so many seconds is dropped."""

    log: Annotated[str | None, BeforeValidator(_log)] = None
    """File of the audit log, one JSON object a line; None: no log."""

    log_bytes: Annotated[int, count(4096, MAX_TOKENS)] = 16 * 2**20
    """The log is rotated before it is larger."""

    log_files: Annotated[int, count(1, 1000)] = 4
    """Rotated files that are kept beside the log."""

    log_text: Annotated[bool, BeforeValidator(switch)] = False
    """Whether the log holds the text of prompts and answers."""

    classes: Annotated[dict[str, str] | None, BeforeValidator(_classes)] = None
    """Classes of namespaces, by prefix of the first extra key; the longest prefix counts. All
    others, and those that `namespaces` binds to one caller, are of the class `other`."""

    max_kl: Annotated[float | None, number(math.inf, "no bound")] = None
    """A namespace has drifted if more than a tenth of its audits are above this, in nats."""

    on_drift: Annotated[Literal["report", "fallback"], BeforeValidator(_reaction)] = "report"
    """What a namespace that has drifted leads to: `report`, a line of the server's log and a
    metric; `fallback`, also the options of `fallback` for its requests."""

    fallback: Annotated[Literal["full"] | dict[str, Any], BeforeValidator(_fallback)] = "full"
    """How requests of a namespace run that has drifted: `full`, without reuse; or options of a
    request, which count more than its own."""

    window: Annotated[int, count(1, 10_000)] = 50
    """Last audits of a namespace that are looked at."""

    min_audits: Annotated[int, count(1, 10_000)] = 10
    """With fewer audits a namespace has not drifted."""

    recover_s: Annotated[float, number(10**9)] = 600.0
    """Seconds after which a namespace that fell back has its own options again, and its audits are
    counted anew."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        return only_known(data, cls.model_fields)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.on_drift == FALLBACK and self.max_kl is None:
            raise ValueError("has on_drift: fallback without max_kl: say above which KL")
        if self.on_drift == FALLBACK and not self.recover_s:
            raise ValueError(
                "has on_drift: fallback and recover_s: 0, so that no request falls back: set "
                "recover_s to the seconds of a fallback (600, say), or on_drift to report"
            )
        if self.max_kl is not None and not self.share:
            raise ValueError("has max_kl and audits nothing: set share above 0")
        if self.share and not self.max_wait_s:
            raise ValueError(
                "has max_wait_s: 0, so that every audit is dropped before it begins: set it to "
                "some seconds (30, say), or share to 0"
            )
        if self.min_audits > self.window:
            raise ValueError("has min_audits above window: so many audits are never looked at")
        return self

    def class_of(self, extra_keys: tuple[str, ...]) -> str:
        """Class of a namespace."""
        found = [prefix for prefix in self.classes or {} if extra_keys[0].startswith(prefix)]
        return (self.classes or {})[max(found, key=len)] if found else OTHER


class AuditServer(ServerPart):
    """What the operator sets of audits."""

    audit: AuditOptions = AuditOptions()
    """Whether and how requests are audited."""

    @model_validator(mode="after")
    def _check_fallback(self) -> Self:
        """The fallback is options that a request of this server may have."""
        if isinstance(self.audit.fallback, str) or not isinstance(self, ServerOptions):
            return self
        known = self.request_type.model_fields
        if unknown := [name for name in self.audit.fallback if name not in known]:
            raise ValueError(f"audit.fallback: {unknown_text(unknown[0], known)}")
        try:
            options = self.fallback_options(self.request_defaults())
        except ValidationError as error:
            raise ValueError(f"audit.fallback: {first_error(error)[1]}") from None
        for part in self.request_type.parts:
            if options is not None and (refusal := part.refused(options, self)):
                raise ValueError(f"audit.fallback: {refusal.text}")
        return self

    def fallback_options(self, options: PolicyOptions) -> PolicyOptions | None:
        """What `options` of a request become in a namespace that has drifted; None: no reuse.

        Raises:
            ValidationError: `audit.fallback` has an unknown option or a bad value.
        """
        if isinstance(self.audit.fallback, str):
            return None
        kind = type(options)
        fields = {name: getattr(options, name) for name in kind.model_fields}
        return kind.model_validate(fields | self.audit.fallback)
