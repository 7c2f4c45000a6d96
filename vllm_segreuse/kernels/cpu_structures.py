# SPDX-License-Identifier: Apache-2.0
"""What the functions of the C++ library are given: the structures of csrc/cpu/kernels.h, field by
field."""

from __future__ import annotations

import ctypes

import torch

from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.pages import Part, TiledStrides

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}

CODECS = {Codec.RAW: 0, Codec.INT8: 1, Codec.FP8: 2}


class Strides(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("heads", "block_size", "channels", "offset", "head"),
            *("token_tile", "token_hi", "token_lo"),
            *("channel_tile", "channel_hi", "channel_lo"),
        )
    ]

    @classmethod
    def of(cls, strides: TiledStrides) -> Strides:
        return cls(
            *strides.shape,
            strides.offset,
            strides.head,
            *(strides.token_tile, strides.token_hi, strides.token_lo),
            *(strides.channel_tile, strides.channel_hi, strides.channel_lo),
        )


class PartArgs(ctypes.Structure):
    _fields_ = [
        ("strides", Strides),
        *((name, ctypes.c_int32) for name in ("dim", "neox", "first")),
    ]

    @classmethod
    def of(cls, part: Part) -> PartArgs:
        turn = part.rotation
        rotation = (turn.dim, turn.neox, turn.first) if turn else (0, 0, 0)
        return cls(Strides.of(part.strides), *rotation)


class AlignArgs(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("read_stride", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("value_scales", ctypes.c_int64),
        ("codes", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("codec", ctypes.c_int32),
    ]


class Weights(ctypes.Structure):
    _fields_ = [
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("keys", Strides),
        ("values", Strides),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("request", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("queries", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("weights", Weights),
        ("window", ctypes.c_int64),
        ("value_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("pages_dtype", ctypes.c_int32),
    ]


class ScoreArgs(ctypes.Structure):
    _fields_ = [
        ("scores", ctypes.c_void_p),
        ("late_scores", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("keys", Strides),
        ("block_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("queries", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("late_from", ctypes.c_int64),
        ("weights", Weights),
        ("dtype", ctypes.c_int32),
        ("pages_dtype", ctypes.c_int32),
        ("highest", ctypes.c_int32),
    ]


class StoreArgs(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("cells", ctypes.c_void_p),
        ("cell_stride", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    ]


class EncodeArgs(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("cell_stride", ctypes.c_int64),
        ("value_scales", ctypes.c_int64),
        ("codes", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("encoded", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("codec", ctypes.c_int32),
    ]


class CarryArgs(ctypes.Structure):
    _fields_ = [
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("before", ctypes.c_void_p),
        ("changed", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("distances", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("cos_by_pair", ctypes.c_void_p),
        ("sin_by_pair", ctypes.c_void_p),
        ("num_distances", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    ]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "align": AlignArgs,
    "attention": AttentionArgs,
    "scores": ScoreArgs,
    "store": StoreArgs,
    "encode": EncodeArgs,
    "carry": CarryArgs,
}
"""By function, in the order of `segreuse_sizes`."""
