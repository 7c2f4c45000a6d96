# SPDX-License-Identifier: Apache-2.0
"""Options of similar segments: the block `similarity` of the server's options, and a flag of
requests."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.options.parts import Refusal, RequestPart, ServerPart
from vllm_segreuse.options.values import (
    MAX_TOKENS,
    count,
    flag,
    inner_share,
    is_int,
    number,
    short_repr,
    switch,
    unknown_text,
)

ALL, FULL_PREFIX = "all", "full_prefix"
"""All layers, and everything that is in front, where layers and tokens are numbers."""

_MOST_CONTEXT = 4096


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
            raise ValueError("has an " + unknown_text(unknown[0], SimilarityOptions.model_fields))
    return value


def contexts_by_layer(value: Any) -> dict[str, int | str] | None:
    """{layer or "all": tokens or "full_prefix"}, by layer; JSON has texts as keys."""
    if value is None:
        return None
    rule = (
        'must map layers from 1 on, or "all", to a number of tokens, or "full_prefix", and not to '
        "fewer for higher layers; or be null"
    )
    if not isinstance(value, Mapping) or not value:
        raise ValueError(rule)
    by_layer = {math.inf if key == ALL else _layer(key, rule): key for key in value}
    if len(by_layer) < len(value):
        raise ValueError(f"{rule}; a layer is there twice, as a number and as a text")
    layers = sorted(by_layer.items())
    contexts = [value[key] for _, key in layers]
    for context in contexts:
        if context != FULL_PREFIX and not (is_int(context) and 0 <= context <= _MOST_CONTEXT):
            raise ValueError(rule)
    needed = [math.inf if context == FULL_PREFIX else context for context in contexts]
    if any(below > above for below, above in pairwise(needed)):
        raise ValueError(rule)
    return {str(key): context for (_, key), context in zip(layers, contexts, strict=True)}


def _layer(key: object, rule: str) -> int:
    text = str(key)
    if isinstance(key, bool) or not (text.isascii() and text.isdigit() and 0 < int(text) < 1000):
        raise ValueError(rule)
    return int(text)


class SimilarityOptions(BaseModel):
    """How similar segments are found: the keys of the option `similarity`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by_default: Annotated[bool, BeforeValidator(switch)] = True
    """Whether requests reuse similar segments that do not say `segreuse_similarity`."""

    window_tokens: Annotated[int, count(8, 1024)] = 96
    """Length of the windows that are compared, at least two shingles. Canonical tokens: a number
    counts as one."""

    stride_tokens: Annotated[int, count(1, 1024)] = 32
    """Distance between the windows of a donor."""

    shingle_tokens: Annotated[int, count(1, 64)] = 6
    """Canonical tokens of a shingle: windows are compared by the set of theirs."""

    permutations: Annotated[int, count(16, 1024)] = 128
    """Places of a MinHash signature."""

    threshold: Annotated[float, BeforeValidator(inner_share)] = 0.5
    """Least estimated Jaccard similarity of a candidate, above 0 and up to 1."""

    context_tokens: Annotated[int, count(0, 4096)] = 128
    """Left context that is compared, too, to choose among candidates, at least a shingle; 0:
    none."""

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

    @property
    def least_window_tokens(self) -> int:
        """Shorter windows have too few shingles to be compared."""
        return 2 * self.shingle_tokens

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.window_tokens < self.least_window_tokens:
            raise ValueError(
                f"has window_tokens={self.window_tokens} and shingle_tokens={self.shingle_tokens}, "
                "so that no window would be compared: set window_tokens to "
                f"{self.least_window_tokens} at least, or shingle_tokens to "
                f"{self.window_tokens // 2} at most"
            )
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if 0 < self.context_tokens < self.shingle_tokens:
            raise ValueError(
                f"has context_tokens={self.context_tokens} and shingle_tokens="
                f"{self.shingle_tokens}, so that no left context would be compared: set "
                f"context_tokens to {self.shingle_tokens} at least, or to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_halo(self) -> Self:
        if self.max_boundary_drift is not None and not self.halo_tokens:
            raise ValueError(
                "has max_boundary_drift and no halo_tokens, so that nothing can be compared: set "
                "halo_tokens (8, say), or omit max_boundary_drift"
            )
        return self


class SimilarServer(ServerPart):
    """Whether similar segments are found at all, and how."""

    opening: ClassVar[Mapping[str, Any]] = {"similarity": {}}

    similarity: Annotated[SimilarityOptions | None, BeforeValidator(_similarity)] = None
    """How similar segments are found (docs/similar.md), and whether requests reuse them that do not
    say; None: no request does."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """See `SimilarityOptions`."""
        return () if self.similarity is None else self.similarity.cuts

    def compared_segments(self, max_model_len: int) -> int | None:
        """See `ServerOptions`: those that begin with a halo."""
        if self.similarity is None or self.similarity.max_boundary_drift is None:
            return None
        return max_model_len // self.similarity.least_run_tokens

    @model_validator(mode="after")
    def _check_tier(self) -> Self:
        if self.cuts and TierServer.of(self).tier is not None:
            raise ValueError(
                "tier cannot be combined with similarity.w_exact, whose boundary states are not "
                "stored: remove one of them"
            )
        return self


class SimilarRequest(RequestPart):
    """Whether a request reuses similar segments."""

    similarity: Annotated[bool, BeforeValidator(flag)] = False
    """Similar segments are searched for where no equal one was found, and the tokens of theirs that
    are equal are reused. It needs the server's `similarity`, and is ignored by `exact`."""

    @classmethod
    def defaults(cls, server: BaseModel) -> dict[str, Any]:
        """The server's block has a key for it."""
        block = SimilarServer.of(server).similarity
        return {"similarity": block is not None and block.by_default}

    @classmethod
    def refused(cls, options: BaseModel, server: BaseModel) -> Refusal | None:
        """Nothing similar is found without the server's block."""
        if not cls.of(options).similarity or SimilarServer.of(server).similarity is not None:
            return None
        text = "similarity=True must be false: the server has no option `similarity`"
        return Refusal("similarity", text)
