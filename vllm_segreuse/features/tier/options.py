# SPDX-License-Identifier: Apache-2.0
"""Options of the second tier: the block `tier` of the server's options."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from vllm_segreuse.options import values
from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import MAX_TOKENS, count, is_number, number, only_known

_GIB = 2**30
_PATH = BeforeValidator(values.path)


def _gibibytes(value: Any) -> float:
    if not is_number(value) or value <= 0:
        raise ValueError("must be a number above 0")
    return float(value)


def _one_of(*names: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"must be {' or '.join(names)}")
        return value

    return BeforeValidator(check)


class TierOptions(BaseModel):
    """Where the KV of segments is stored that vLLM evicts, and how much of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_gib: Annotated[float, BeforeValidator(_gibibytes)] = 4.0
    """Host memory that holds records, in GiB. It is shared by all ranks of an engine, allocated at
    the start, and needs as much room in `/dev/shm`."""

    path: Annotated[str | None, _PATH] = None
    """Folder for the records that are also written to files, which outlive a restart; None: none
    are. It needs `disk_gib`."""

    disk_gib: Annotated[float, number(math.inf)] = 0.0
    """Most bytes that the files take, in GiB."""

    admission: Annotated[Literal["evicted", "knowledge"], _one_of("evicted", "knowledge")] = (
        "evicted"
    )
    """What is stored: `evicted`, every donor that vLLM evicts, and documents of knowledge bases as
    soon as they are computed; `knowledge`, these documents only."""

    wait_ms: Annotated[float, number(60_000)] = 200.0
    """Longest time that a request waits for records to be read from files; what is not there by
    then is computed."""

    codec: Annotated[Literal["raw", "int8", "fp8"], _one_of("raw", "int8", "fp8")] = "raw"
    """How records are stored: `raw`, byte for byte; `int8` or `fp8`, rounded to 8 bits, so that a
    record of a 16-bit cache takes about half as much."""

    min_run_tokens: Annotated[int, count(1, MAX_TOKENS)] = 64
    """Fewer tokens in a row are not loaded from a record: it is always read as a whole."""

    io_threads: Annotated[int, count(1, 64)] = 4
    """Threads that read and write files."""

    key_file: Annotated[str | None, _PATH] = None
    """File with the key that records are encrypted with on disk, 32 bytes as hex or base64; None:
    the environment's `SEGREUSE_TIER_KEY`, or no encryption."""

    zeroise: Annotated[bool, BeforeValidator(values.switch)] = False
    """Whether memory is zeroed as soon as it holds no record any more: rows of host memory when
    their record is replaced, deleted or cleared, and buffers on the way to rows and files."""

    @property
    def is_lossy(self) -> bool:
        """Whether what is read differs from what was stored."""
        return self.codec != "raw"

    @property
    def disk_bytes(self) -> int:
        """`disk_gib` in bytes."""
        return int(self.disk_gib * _GIB)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        return only_known(data, cls.model_fields, ", or null")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.path is None) is not (self.disk_gib == 0):
            raise ValueError("needs both path and disk_gib to write files, or neither")
        return self


class TierServer(ServerPart):
    """What the operator sets of the second tier."""

    tier: TierOptions | None = None
    """Whether and where the KV of segments is stored that vLLM evicts; None: nowhere. It cannot be
    combined with `similarity.w_exact`."""
