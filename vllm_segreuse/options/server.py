# SPDX-License-Identifier: Apache-2.0
"""Options of the server, but for those of features."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BeforeValidator, ValidationError, model_validator

from vllm_segreuse.options.keys import key_fault
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.values import (
    count,
    first_error,
    short_repr,
    switch,
    tokens_or_null,
    unknown_text,
)

MAX_PROVENANCE_DEPTH = 127
"""Deepest provenance that the index can store: its type there is made from this number."""

DISABLE_ENV = "VLLM_SEGREUSE_DISABLE"
"""Kill switch at start: `1` starts the server with segment reuse off."""

OBSERVE = "observe"
Switch = bool | Literal["observe"]
"""Whether requests reuse segments; `OBSERVE`: what they would reuse is planned and reported."""

STEP_TOKENS = {"cpu": 128, "other": 512}
"""Tokens from which on a pass takes time in proportion to them, by kind of device: to compute more
at once serves nobody sooner."""


class ConfigError(ValueError):
    """A server option is unknown or out of range."""


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(str(key.value) for key, _ in node.value)
        if twice := next((key for key, count in counts.items() if count > 1), None):
            raise ValueError(f"{short_repr(twice)} is given twice: drop one")
        return super().construct_mapping(node, deep)


def _switch_or_observe(value: Any) -> Any:
    if not isinstance(value, bool) and value != OBSERVE:
        raise ValueError(f'must be true, false or "{OBSERVE}"')
    return value


def _rights(value: Any) -> Any:
    """{SHA-256 of an API key in hex: [first extra keys, or "*"]}"""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("must map the SHA-256 of API keys to lists of extra keys, or be null")
    for digest, names in value.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ValueError(
                f"has {short_repr(digest)}, which is no SHA-256 of an API key (64 lower-case hex "
                'digits): printf %s "$API_KEY" | sha256sum'
            )
        if not isinstance(names, list | tuple) or any(key_fault(name) for name in names):
            raise ValueError(f'must give {digest[:8]}... a list of extra keys, or ["*"] for all')
    return {digest: tuple(names) for digest, names in value.items()}


_SHA256 = re.compile(r"[0-9a-f]{64}")


class ServerOptions(PolicyOptions):
    """Those of a server without features; `config.SegReuseConfig` has them all."""

    request_type: ClassVar[type[PolicyOptions]] = PolicyOptions
    """Of the requests of such a server."""

    max_provenance_depth: Annotated[int, count(0, MAX_PROVENANCE_DEPTH)] = 4
    """How often KV computed behind reused KV may donate in turn; 0: only exact KV donates."""

    max_step_tokens: Annotated[int | None, tokens_or_null(1, "the device's own")] = None
    """Most tokens that the reusing requests of one step compute together; a request that computes
    more has a step to itself. None: 128 on a CPU, 512 elsewhere (`STEP_TOKENS`). Never more than
    `max_num_batched_tokens`."""

    spread_tokens: Annotated[int | None, tokens_or_null(0, "half of a step")] = None
    """While others run, a request that computes more than so many tokens do at all layers is
    carried out over several steps, that much in each. None: half of `max_num_batched_tokens`; 0:
    never. With several pipeline stages every request is; then 0 means a whole step's tokens."""

    enabled: Annotated[Switch, BeforeValidator(_switch_or_observe)] = True
    """Whether reuse is on when the server starts; the kill switch changes it at run time.
    "observe": no request reuses anything, and all are reported as with the option `observe`."""

    namespaces: Annotated[dict[str, tuple[str, ...]] | None, BeforeValidator(_rights)] = None
    """Which extra keys an API key may share, by the SHA-256 of the API key: a request may use
    `extra_keys` whose first key is listed ("*": all). Under any other name a caller is alone. None:
    names are shared by all callers."""

    namespaces_trust_programs: Annotated[bool, BeforeValidator(switch)] = False
    """With `namespaces`: whether a program that runs the engine itself, without vLLM's API server,
    may use every name. No API key stands behind its requests, so without this they are refused if
    they have extra keys. A server refuses what no checked endpoint has handed in, whatever this
    says."""

    def spread_work(self, max_num_batched_tokens: int, num_layers: int) -> int | None:
        """Layer-tokens (a token computed at a layer) of one step, and of the largest plan that has
        to be done in one while others run; None: of any."""
        tokens = max_num_batched_tokens // 2 if self.spread_tokens is None else self.spread_tokens
        return tokens * num_layers or None

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers whose inputs are kept as boundary states beside the KV, ascending."""
        return ()

    def compared_segments(self, max_model_len: int) -> int | None:
        """Most segments of a prompt whose boundaries are compared in a pass; None: none is."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"{short_repr(data)} is no mapping of options")
        if unknown := [key for key in data if key not in cls.model_fields]:
            raise ValueError(unknown_text(unknown[0], cls.model_fields))
        return data

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None, source: str = "segreuse") -> Self:
        """Checks `options` and fills in the defaults.

        Raises:
            ConfigError: names `source`, the key, the value and what is allowed.
        """
        try:
            return cls.model_validate({} if options is None else options)
        except ValidationError as error:
            raise ConfigError(f"{source}: {first_error(error)[1]}") from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str] | None) -> Self:
        """Reads the YAML file at `path`; an empty file, or none, means all defaults.

        Raises:
            ConfigError: the file cannot be read, is no YAML mapping, or holds a bad option.
        """
        if path is None:
            return cls()
        try:
            data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {os.fspath(path)!r}: {error}") from None
        except Exception as error:  # of many classes: of dates, of numbers, of depth
            raise ConfigError(f"{os.fspath(path)!r} is not YAML: {error}") from None
        return cls.from_options(data, source=os.fspath(path))

    @property
    def starts_enabled(self) -> Switch:
        """`enabled`, unless the environment's kill switch (`DISABLE_ENV`) is set."""
        killed = os.environ.get(DISABLE_ENV, "0").lower() not in ("", "0", "false")
        return False if killed else self.enabled

    def request_defaults(self) -> PolicyOptions:
        """The options of a request that names none of its own."""
        return self.request_type.model_construct(**self.request_values())

    def request_values(self) -> dict[str, Any]:
        """These, by name."""
        values = {name: getattr(self, name) for name in PolicyOptions.model_fields}
        for part in self.request_type.parts:
            values |= part.defaults(self)
        return values
