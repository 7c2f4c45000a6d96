# SPDX-License-Identifier: Apache-2.0
"""Options of the server and of one request, and the one place where they are checked.

`SegReuseConfig` is what the operator sets: a YAML file, or `kv_connector_extra_config`.
`RequestOptions` is what one request ends up with after its own options were laid over the server's.
Neither torch nor vLLM is imported: the API server, the scheduler and offline callers all check with
the same code.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)

from vllm_segreuse.audit_options import AuditOptions
from vllm_segreuse.keys import MAX_EXTRA_KEYS, key_fault
from vllm_segreuse.policies import POLICIES
from vllm_segreuse.tier_options import TierOptions
from vllm_segreuse.values import (
    ALL,
    MAX_TOKENS,
    contexts_by_layer,
    count,
    inner_share,
    is_int,
    number,
    path,
    short_repr,
    switch,
)

AUTO = "auto"
RECOMMENDED = "focus"
"""What `auto`, the default, stands for: what lost least on a pretrained model (docs/quality.md)."""

EXTRA_KEYS = "extra_keys"
"""Name of the request's namespace in the body and in `SamplingParams.extra_args`."""

OPTION_PREFIX = "segreuse_"
"""Prefix that sets our per-request options apart from those of others in `extra_args`."""

ORDERS = FREEZE, SCORE, COPY, ANCHORS = tuple(
    OPTION_PREFIX + it for it in ("freeze", "score", "copy", "anchors")
)
"""Set by the server itself while it ingests documents; clients may not."""

DOCUMENTS = OPTION_PREFIX + "documents"
"""Compressed documents that a request names."""

NULL = "null"
"""Value of a request's option that means None: `vllm_xargs` of vLLM holds no null."""

MAX_NAMED, MAX_NAME_BYTES = 64, 1024
"""Of one request, and of each name."""

# Begins the extra keys that are bound to a caller. Clients cannot write it: no control characters.
_BOUND = "\x01"

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

_MAX_LAYERS = 4096


class ConfigError(ValueError):
    """A server option is unknown or out of range."""


class RequestError(ValueError):
    """An option or extra key of one request is unknown or out of range.

    Attributes:
        option: name of the offending option as the client wrote it.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def _policy(value: Any) -> Any:
    if value == AUTO:
        return RECOMMENDED
    if not isinstance(value, str) or value not in POLICIES:
        raise ValueError(f"must be one of {', '.join((AUTO, *POLICIES))}")
    return value


def _layers(value: Any) -> Any:
    is_count = is_int(value) and 0 <= value <= _MAX_LAYERS
    is_share = isinstance(value, float) and 0 < value < 1
    if not (is_count or is_share):
        raise ValueError(
            f"must be a number of layers (an integer from 0 to {_MAX_LAYERS}) "
            "or a share of the layers (a float above 0 and below 1)"
        )
    return value


def _tokens_or_null(low: int, null: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value is not None and not (is_int(value) and low <= value <= MAX_TOKENS):
            raise ValueError(f"must be an integer from {low} to {MAX_TOKENS}, or null for {null}")
        return value

    return BeforeValidator(check)


def _flag(value: Any) -> bool:
    # vLLM turns a true of `vllm_xargs` into 1.
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("must be true or false")
    return bool(value)


def _switch_or_observe(value: Any) -> Any:
    if not isinstance(value, bool) and value != OBSERVE:
        raise ValueError(f'must be true, false or "{OBSERVE}"')
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(it, str) and it for it in value):
        raise ValueError("must be a list of texts, none of them empty")
    return tuple(value)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"must be regular expressions: {short_repr(pattern)} is none, {error}"
            ) from None
    return patterns


def _similarity(value: Any) -> Any:
    if value is not None and not isinstance(value, Mapping | SimilarityOptions):
        raise ValueError("must be a mapping of options of its own, or null")
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in SimilarityOptions.model_fields]
        if unknown:
            raise ValueError("has an " + _unknown_text(unknown[0], SimilarityOptions.model_fields))
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


class RequestOptions(BaseModel):
    """How one request is reused. All values are resolved: nothing is left to default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Annotated[str, BeforeValidator(_policy)] = RECOMMENDED
    """What is reused, and which of it is computed again; `auto` stands for the recommended one."""

    recompute_ratio: Annotated[float | None, number(1, "the policy's own")] = None
    """Share of the reused tokens that is chosen to be computed again, 0..1; None: the policy's own,
    which is 0.1, and for `focus` depends on how the reused text was computed (`policies/focus.py`).
    For `peaks` it is the most; for `sparsex`, overflow and tail are added to it."""

    dense_layers: Annotated[int | float, BeforeValidator(_layers)] = 0.15
    """`sparsex`: leading layers that compute every token: a number of layers, or a share s of them,
    which means max(1, round(s * layers)). As many layers as the model has, or more: everything is
    computed."""

    overflow_tokens: Annotated[int | None, _tokens_or_null(0, "one KV block")] = None
    """`sparsex`: reused tokens computed again on both sides of new text; None: as many as a KV
    block holds."""

    max_drift: Annotated[float | None, number(math.inf, "no bound")] = None
    """`focus`, `prophet`: a request whose `drift` is above this is computed in full after all;
    None: none is. Other policies do not measure it. docs/quality.md says what drift means."""

    recompute_once: Annotated[bool, BeforeValidator(_flag)] = False
    """What an earlier turn of the same conversation has moved is kept as it was then: a policy does
    not choose of it anew for the new question. `exact` and prompts with images ignore it."""

    weigh_turns: Annotated[bool, BeforeValidator(_flag)] = False
    """A prompt is reused only if that saves more than the later turns of its conversation are
    expected to lose, which do not find it in the prefix cache then (`cache/turns.py`). Reused in
    any case are requests with a `recompute_ratio` of their own, and with `recompute_once`."""

    min_reused_tokens: Annotated[int, count(1, MAX_TOKENS)] = 128
    """Fewer reusable tokens than this, and the request runs without reuse."""

    observe: Annotated[bool, BeforeValidator(_flag)] = False
    """The request is matched and planned, and runs without reuse; its report says what would have
    been reused (`observed`)."""

    explain: Annotated[bool, BeforeValidator(_flag)] = False
    """The report says of each stretch of the prompt where it comes from, or why it was not found
    (`explain`)."""

    similarity: Annotated[bool, BeforeValidator(_flag)] = False
    """Similar segments are searched for where no equal one was found, and the tokens of theirs that
    are equal are reused. It needs the server's `similarity`, and is ignored by `exact`."""


class SimilarityOptions(BaseModel):
    """How similar segments are found: the keys of the option `similarity`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by_default: Annotated[bool, BeforeValidator(switch)] = True
    """Whether requests reuse similar segments that do not say `segreuse_similarity`."""

    window_tokens: Annotated[int, count(8, 1024)] = 96
    """Length of the windows that are compared. Canonical tokens: a number counts as one."""

    stride_tokens: Annotated[int, count(1, 1024)] = 32
    """Distance between the windows of a donor."""

    shingle_tokens: Annotated[int, count(1, 64)] = 6
    """Canonical tokens of a shingle: windows are compared by the set of theirs."""

    permutations: Annotated[int, count(16, 1024)] = 128
    """Places of a MinHash signature."""

    threshold: Annotated[float, BeforeValidator(inner_share)] = 0.5
    """Least estimated Jaccard similarity of a candidate, above 0 and up to 1."""

    context_tokens: Annotated[int, count(0, 4096)] = 128
    """Left context that is compared, too, to choose among candidates; 0: none."""

    min_run_tokens: Annotated[int, count(1, 1024)] = 8
    """Fewer equal tokens in a row are computed."""

    min_context_tokens: Annotated[int, count(0, 4096)] = 0
    """A token of a similar segment is reused only if so many tokens in front of it are equal in the
    donor, one by one; 0: whatever is in front."""

    halo_tokens: Annotated[int, count(0, 64)] = 0
    """The first tokens of each equal run, which are computed in any case; shorter runs are not
    reused. 0: none."""

    max_boundary_drift: Annotated[float | None, number(math.inf, "no test")] = None
    """A run is computed as a whole, in the same pass, if the keys and values of its halo differ by
    more than this from those that were moved (docs/similar.md); None: they are not compared. It
    needs `halo_tokens`."""

    w_exact: Annotated[dict[str, int | str] | None, BeforeValidator(contexts_by_layer)] = None
    """Below which layer a token of a similar segment is moved, by the equal tokens that this takes
    in front of it: `{8: 16, 16: 64, all: full_prefix}` moves it below layer 8 if 16 are equal,
    below layer 16 if 64 are, and at all layers if everything in front is equal. From that layer on
    it is computed, from a boundary state that is kept at each of these layers; a token with fewer
    equal ones is computed at all layers. It needs `--enforce-eager`. None: tokens are moved at all
    layers."""

    anchors: Annotated[tuple[str, ...], BeforeValidator(_texts)] = (
        "\nThought:",
        "\nAction:",
        "\nAction Input:",
        "\nObservation:",
    )
    """Texts at which a segment begins. What is between two of them is compared as a whole, if it is
    no longer than a window."""

    volatile: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = (r"\d+",)
    """Regular expressions. A token whose text one of them matches fully is a changing value, as are
    letters, signs and further values joined to it: numbers, timestamps, hexadecimal ids. All values
    are compared as equal."""

    max_windows: Annotated[int, count(1, MAX_TOKENS // 1024)] = 100_000
    """Windows that are kept; the oldest ones are dropped for others."""

    @property
    def least_run_tokens(self) -> int:
        """Fewer equal tokens in a row are not worth being moved."""
        return max(self.min_run_tokens, self.halo_tokens + 1)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers of `w_exact`, ascending, whose inputs are kept as boundary states."""
        return tuple(int(layer) for layer in self.w_exact or {} if layer != ALL)

    @model_validator(mode="after")
    def _check_halo(self) -> Self:
        if self.max_boundary_drift is not None and not self.halo_tokens:
            raise ValueError(
                "has max_boundary_drift and no halo_tokens, so that nothing can be compared: set "
                "halo_tokens (8, say), or omit max_boundary_drift"
            )
        return self


class SegReuseConfig(RequestOptions):
    """Options of the server: the defaults of every request, and what requests cannot change.

    Its fields are the keys of `kv_connector_extra_config` and of the file of `--segreuse-config`.
    Unknown keys, wrong types and values out of range raise pydantic's `ValidationError`; the
    classmethods raise `ConfigError`, whose text is one sentence.
    """

    similarity: Annotated[SimilarityOptions | None, BeforeValidator(_similarity)] = None  # type: ignore[assignment]
    """How similar segments are found (docs/similar.md), and whether requests reuse them that do not
    say; None: no request does."""

    max_provenance_depth: Annotated[int, count(0, MAX_PROVENANCE_DEPTH)] = 4
    """How often KV computed behind reused KV may donate in turn; 0: only exact KV donates."""

    max_step_tokens: Annotated[int | None, _tokens_or_null(1, "the device's own")] = None
    """Most tokens that the reusing requests of one step compute together; a request that computes
    more has a step to itself. None: 128 on a CPU, 512 elsewhere (`STEP_TOKENS`). Never more than
    `max_num_batched_tokens`."""

    spread_tokens: Annotated[int | None, _tokens_or_null(0, "half of a step")] = None
    """While others run, a request that computes more than so many tokens do at all layers is
    carried out over several steps, that much in each. None: half of `max_num_batched_tokens`; 0:
    never."""

    enabled: Annotated[Switch, BeforeValidator(_switch_or_observe)] = True
    """Whether reuse is on when the server starts; the kill switch changes it at run time.
    "observe": no request reuses anything, and all are reported as with the option `observe`."""

    frozen_share: Annotated[float, number(1)] = 0.5
    """Most of the KV blocks that knowledge bases may keep, 0..1; 0: none. One request of maximum
    length always fits beside them."""

    frozen_pressure: Annotated[float, BeforeValidator(inner_share)] = 0.9
    """Share of the KV blocks in use (frozen or held by requests) above which documents are evicted:
    those that running requests do not hold first, and of these the longest unused."""

    frozen_returns: Annotated[bool, BeforeValidator(switch)] = True
    """Whether an evicted document is computed again, in its own context, once a prompt contains its
    text and there is room."""

    knowledge_path: Annotated[str | None, BeforeValidator(path)] = None
    """SQLite file that remembers knowledge bases over restarts; None: they are forgotten."""

    knowledge_chunk_tokens: Annotated[int, count(1, MAX_TOKENS)] = 2048
    """Longer documents are computed in chunks of as many tokens, each by itself."""

    knowledge_body_bytes: Annotated[int, count(1024, MAX_TOKENS)] = 16 * 2**20
    """Largest body that the routes of knowledge bases take."""

    viewer_requests: Annotated[int, count(0, 100_000)] = 200
    """So many requests an API server remembers, without their text, for the viewer's page; 0:
    none."""

    viewer_text: Annotated[bool, BeforeValidator(switch)] = False
    """Whether it remembers the tokens of explained prompts, too, to show their text."""

    namespaces: Annotated[dict[str, tuple[str, ...]] | None, BeforeValidator(_rights)] = None
    """Which extra keys an API key may share, by the SHA-256 of the API key: a request may use
    `extra_keys` whose first key is listed ("*": all). Under any other name a caller is alone. None:
    names are shared by all callers."""

    namespaces_trust_programs: Annotated[bool, BeforeValidator(switch)] = False
    """With `namespaces`: whether a program that runs the engine itself, without vLLM's API server,
    may use every name. No API key stands behind its requests, so without this they are refused if
    they have extra keys. A server refuses what no checked endpoint has handed in, whatever this
    says."""

    audit: AuditOptions = AuditOptions()
    """Whether and how requests are audited."""

    tier: TierOptions | None = None
    """Whether and where the KV of segments is stored that vLLM evicts; None: nowhere. It cannot be
    combined with `similarity.w_exact`."""

    def spread_work(self, max_num_batched_tokens: int, num_layers: int) -> int | None:
        """Layer-tokens (a token computed at a layer) of one step, and of the largest plan that has
        to be done in one while others run; None: of any."""
        tokens = max_num_batched_tokens // 2 if self.spread_tokens is None else self.spread_tokens
        return tokens * num_layers or None

    @property
    def cuts(self) -> tuple[int, ...]:
        """See `SimilarityOptions`."""
        return () if self.similarity is None else self.similarity.cuts

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"{short_repr(data)} is no mapping of options")
        unknown = [key for key in data if key not in cls.model_fields]
        if unknown:
            raise ValueError(_unknown_text(unknown[0], cls.model_fields))
        return data

    @model_validator(mode="after")
    def _check_fallback(self) -> Self:
        given = self.audit.fallback
        names = () if isinstance(given, str) else given
        if unknown := [name for name in names if name not in RequestOptions.model_fields]:
            text = _unknown_text(unknown[0], RequestOptions.model_fields)
            raise ValueError(f"audit.fallback: {text}")
        try:
            options = self.fallback_options(self.request_defaults())
        except ValidationError as error:
            raise ValueError(f"audit.fallback: {_first_error(error)[1]}") from None
        if options is not None and options.similarity and self.similarity is None:
            raise ValueError("audit.fallback: similarity=True needs the server's option similarity")
        return self

    @model_validator(mode="after")
    def _check_tier(self) -> Self:
        if self.tier is not None and self.cuts:
            raise ValueError(
                "tier cannot be combined with similarity.w_exact, whose boundary states are not "
                "stored: remove one of them"
            )
        return self

    def fallback_options(self, options: RequestOptions) -> RequestOptions | None:
        """What `options` of a request become in a namespace that has drifted; None: no reuse.

        Raises:
            ValidationError: `audit.fallback` has an unknown option or a bad value.
        """
        if isinstance(self.audit.fallback, str):
            return None
        fields = {name: getattr(options, name) for name in RequestOptions.model_fields}
        return RequestOptions.model_validate(fields | self.audit.fallback)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None, source: str = "segreuse") -> Self:
        """Checks `options` and fills in the defaults.

        Raises:
            ConfigError: names `source`, the key, the value and what is allowed.
        """
        try:
            return cls.model_validate({} if options is None else options)
        except ValidationError as error:
            raise ConfigError(f"{source}: {_first_error(error)[1]}") from None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str] | None) -> Self:
        """Reads the YAML file at `path`; an empty file, or none, means all defaults.

        Raises:
            ConfigError: the file cannot be read, is no YAML mapping, or holds a bad option.
        """
        if path is None:
            return cls()
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {os.fspath(path)!r}: {error}") from None
        try:
            data = yaml.safe_load(text)
        except Exception as error:  # of many classes: of dates, of numbers, of depth
            raise ConfigError(f"{os.fspath(path)!r} is not YAML: {error}") from None
        return cls.from_options(data, source=os.fspath(path))

    @property
    def starts_enabled(self) -> Switch:
        """`enabled`, unless the environment's kill switch (`DISABLE_ENV`) is set."""
        killed = os.environ.get(DISABLE_ENV, "0").lower() not in ("", "0", "false")
        return False if killed else self.enabled

    def request_defaults(self) -> RequestOptions:
        """The options of a request that names none of its own."""
        return RequestOptions.model_construct(**self._request_values())

    def _request_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RequestOptions.model_fields}
        given: SimilarityOptions | None = values["similarity"]
        return values | {"similarity": given is not None and given.by_default}


class ParsedRequest(NamedTuple):
    """What `SamplingParams.extra_args` says to segment reuse.

    Attributes:
        extra_keys: the request's namespace, or None: it neither reuses nor donates.
        options: resolved options of the request.
        freeze: the server's own order to freeze its blocks (`plan.FreezeOrder.encode`).
        score, copy, anchors: its orders to compress a document (`plan/compression.py`), encoded.
        documents: compressed documents that the request names, in the order of its prompt.
    """

    extra_keys: tuple[str, ...] | None
    options: RequestOptions
    freeze: str | None = None
    score: object = None
    copy: object = None
    anchors: object = None
    documents: tuple[str, ...] = ()

    @property
    def compresses(self) -> bool:
        """Whether it is a request that compresses a document."""
        return any(order is not None for order in (self.score, self.copy, self.anchors))


def parse_request(
    extra_args: Mapping[str, Any] | None, config: SegReuseConfig, *, trusted: bool = False
) -> ParsedRequest:
    """Reads and checks what a request says to segment reuse.

    Keys of `extra_args` that neither are `extra_keys` nor start with `segreuse_` belong to others
    and are left alone. The cost is bounded whatever the values' size.

    Args:
        trusted: whether this process has written them, not a client: then an order to freeze, and
            extra keys that are bound to a caller, are accepted as well.

    Raises:
        RequestError: names the option, its value and what is allowed.
    """
    if not extra_args:
        return ParsedRequest(None, config.request_defaults())
    own = {key: value for key, value in extra_args.items() if str(key).startswith(OPTION_PREFIX)}
    freeze, score, copy, anchors = (own.pop(key, None) if trusted else None for key in ORDERS)
    documents = parse_documents(own.pop(DOCUMENTS, None))
    extra_keys = parse_extra_keys(extra_args.get(EXTRA_KEYS), trusted=trusted)
    orders = (freeze, score, copy, anchors, documents)
    if not own:
        return ParsedRequest(extra_keys, config.request_defaults(), *orders)
    fields = config._request_values()
    for key, value in own.items():
        name = key.removeprefix(OPTION_PREFIX)
        if name not in fields:
            allowed = [DOCUMENTS, *(OPTION_PREFIX + field for field in RequestOptions.model_fields)]
            raise RequestError(short_repr(key)[1:-1], _unknown_text(key, allowed))
        fields[name] = None if isinstance(value, str) and value == NULL else value
    try:
        options = RequestOptions.model_validate(fields)
    except ValidationError as error:
        option, message = _first_error(error)
        raise RequestError(OPTION_PREFIX + option, OPTION_PREFIX + message) from None
    if options.similarity and config.similarity is None:
        raise RequestError(
            OPTION_PREFIX + "similarity",
            f"{OPTION_PREFIX}similarity=True must be false: the server has no option `similarity`",
        )
    return ParsedRequest(extra_keys, options, *orders)


def parse_documents(value: object) -> tuple[str, ...]:
    """Checks the compressed documents that a request names.

    Raises:
        RequestError: wrong type, too many, or a name that is empty, too long or not text.
    """
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not 1 <= len(names) <= MAX_NAMED:
        held = f" ({len(names)} names)" if isinstance(names, list | tuple) else ""
        raise RequestError(
            DOCUMENTS,
            f"{DOCUMENTS}={short_repr(value)}{held} must be a list of 1 to {MAX_NAMED} strings",
        )
    for name in names:
        fault = key_fault(name, MAX_NAME_BYTES)
        if fault:
            raise RequestError(DOCUMENTS, f"{DOCUMENTS}: the name {short_repr(name)} {fault}")
    return tuple(names)


def bind_extra_keys(
    extra_keys: tuple[str, ...], api_key: str, rights: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The namespace that a caller's extra keys stand for, where names are bound to API keys.

    A name that the caller may not share means a namespace of its own, whether or not the name is
    in use elsewhere: there is no hit, and nothing that tells one from the other.

    Args:
        api_key: of the caller; "" for none.
        rights: `SegReuseConfig.namespaces`.
    """
    digest = hashlib.sha256(api_key.encode(errors="surrogateescape")).hexdigest()
    shared = rights.get(digest, ())
    if extra_keys[0] in shared or "*" in shared:
        return extra_keys
    return (_BOUND + digest, *extra_keys)


def parse_extra_keys(value: object, *, trusted: bool = False) -> tuple[str, ...] | None:
    """Checks a request's namespace: a string s means `[s]`, a list is ordered and composite.

    Strings are taken as they are: NFC and NFD spellings of one text are two namespaces.

    Returns:
        The keys, or None for None (no namespace).

    Raises:
        RequestError: wrong type, no key or too many, or a key that is empty, too long or not text.
    """
    if value is None:
        return None
    keys = [value] if isinstance(value, str) else value
    if trusted and isinstance(keys, list | tuple) and keys and str(keys[0]).startswith(_BOUND):
        return (keys[0], *(parse_extra_keys(keys[1:]) or ()))
    if not isinstance(keys, list | tuple) or not 1 <= len(keys) <= MAX_EXTRA_KEYS:
        held = f" ({len(keys)} keys)" if isinstance(keys, list | tuple) else ""
        raise RequestError(
            EXTRA_KEYS,
            f"{EXTRA_KEYS}={short_repr(value)}{held} must be a string or a list of 1 to "
            f"{MAX_EXTRA_KEYS} strings",
        )
    for key in keys:
        fault = key_fault(key)
        if fault:
            raise RequestError(EXTRA_KEYS, f"{EXTRA_KEYS}: the key {short_repr(key)} {fault}")
    return tuple(keys)


def _unknown_text(key: object, allowed: Iterable[str]) -> str:
    return f"unknown option {short_repr(key)}; allowed are {', '.join(sorted(allowed))}"


def _first_error(error: ValidationError) -> tuple[str, str]:
    """The first of pydantic's errors: the field ("" if it is none's) and one sentence."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    rule = first["msg"] if cause is None else str(cause)
    if not first["loc"]:
        return "", rule
    option = ".".join(str(part) for part in first["loc"])
    return option, f"{option}={short_repr(first['input'])} {rule}"
