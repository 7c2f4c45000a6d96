# SPDX-License-Identifier: Apache-2.0
"""Which model, and which bytes of a KV page, records are of.

Records of another fingerprint are never read. It covers

- what the KV of a token depends on: the model's effective configuration (RoPE, windows and
  `--hf-overrides` included), dtype, quantisation, and the weights; those of a draft, too;
- what makes token ids the same text: the tokenizer's files;
- how KV lies in a row: the codec, layers, heads and block size, the dtype of the cache, the ranks,
  the attention backend and its layout, the platform and, of a CPU, its instruction set (vLLM's CPU
  backend packs keys for AMX in another way), and vLLM's version, as another one may lay pages out
  in another way.

Weights are sampled: of each file the name, the size and pages at equal distances, of a safetensors
file also the header and a page of every tensor. So other weights are found where any tensor has
changed throughout, as it does in training or by merging an adapter. A change of single values may
be missed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.engine.supported import NO_KV, RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMAT = 1
"""Of the rows. A larger number makes all stores those of another model."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_PAGE_BYTES = 4096
_SAMPLES = 64
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
_MOST_HEADER_BYTES = 100 << 20  # the limit of the format


_SAFE_NAMES = ("sha256", "sha256_cbor")


class UnknownWeightsError(RefusedError):
    """The model's weights are no files of this machine."""


class UnsafeNamesError(RefusedError):
    """vLLM's names of blocks do not stand for their content where others choose it."""


def model_fingerprint(vllm_config: VllmConfig, group: KvGroup, codec: str = "raw") -> bytes:
    """The fingerprint [32 bytes]. It reads some MiB of the model's files.

    Args:
        vllm_config: of the engine, whose model is loaded.
        group: whose KV is stored.
        codec: by which it is.

    Raises:
        UnknownWeightsError: names the model.
        UnsafeNamesError: names the hash algorithm.
    """
    import vllm
    from vllm.platforms import current_platform

    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    # A record of an exact block is found by vLLM's name of it, by other processes, too.
    if cache.prefix_caching_hash_algo not in _SAFE_NAMES:
        raise UnsafeNamesError(
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo}, for which prompts with "
            "equal hashes can be made: with tier.path, whoever has two would change the prefix of "
            "others, after a restart and in other engines, too; use --prefix-caching-hash-algo "
            "sha256, or start without tier.path"
        )
    config = model.hf_config.to_dict()
    parts: dict[str, object] = {
        "format": FORMAT,
        "codec": codec,
        "vllm": vllm.__version__,
        "platform": current_platform.device_name,
        "instructions": _instructions(),
        "backend": vllm_config.attention_config.backend,
        "layout": (cache.kv_cache_layout, os.environ.get("VLLM_KV_CACHE_LAYOUT")),
        "layers": {name: repr(spec) for name, spec in group.specs.items()},
        "block_size": group.block_size,
        "cache_dtype": (cache.cache_dtype, cache.kv_cache_dtype_skip_layers),
        "ranks": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
        "config": {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL},
        "longest": model.max_model_len,  # some kinds of RoPE depend on it
        "dtype": model.dtype,
        "quantization": model.quantization,
        "load_format": vllm_config.load_config.load_format,
        "files": [digest.hex() for digest in _file_digests(vllm_config)],
    }
    if draft := _draft(vllm_config):
        parts["draft"] = draft
    return digest_of(parts)


def _draft(vllm_config: VllmConfig) -> list[str]:
    """Of the draft, whose KV lies in the same rows; empty: nothing drafts that has any."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in NO_KV:
        return []
    model = speculative.draft_model_config
    folder = _folder(model.model, model.revision, vllm_config.load_config.download_dir)
    of_draft = None if folder is None else sampled_weights(folder)
    if of_draft is None:
        raise UnknownWeightsError(
            f"the weights of the draft {model.model} are not files of this machine; load it from a "
            "folder, or start without tier.path"
        )
    return [str(speculative.method), of_draft.hex()]


def digest_of(parts: Mapping[str, object]) -> bytes:
    """A digest of named values. Two are equal if their JSON is, or `str` of what has none."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _instructions() -> str:
    import torch

    # As vLLM's CPU backend asks (v1/attention/backends/cpu_attn.py).
    amx = torch.cpu._is_amx_tile_supported()
    return f"{torch.backends.cpu.get_cpu_capability()}, amx: {amx}"


def _file_digests(vllm_config: VllmConfig) -> list[bytes]:
    model, load = vllm_config.model_config, vllm_config.load_config
    tokenizer = _folder(model.tokenizer, model.tokenizer_revision, load.download_dir)
    digests = [b"" if tokenizer is None else small_files(tokenizer)]
    if load.load_format == "dummy":
        return [*digests, digest_of({"seed": model.seed})]
    weights = _folder(model.model_weights or model.model, model.revision, load.download_dir)
    sampled = None if weights is None else sampled_weights(weights)
    if sampled is None:
        raise UnknownWeightsError(
            f"the weights of {model.model} are not files of this machine, so that records of other "
            "weights could not be told apart; load the model from a folder, or start without "
            "tier.path"
        )
    return [*digests, sampled]


def _folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where the files of a model are; None: nowhere on this machine."""
    if os.path.isdir(name):
        return Path(name)
    if os.path.isfile(name):
        return Path(name).parent
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None
    return Path(found)


def small_files(folder: Path) -> bytes:
    """Digest of the configuration and the tokenizer of a model."""
    digest = hashlib.blake2b(digest_size=32)
    for file in _matching(folder, _SMALL):
        content = file.read_bytes()
        digest.update(_named(file, len(content)) + content)
    return digest.digest()


def sampled_weights(folder: Path) -> bytes | None:
    """Digest of a sample of a model's weights; None: there are none."""
    files = _matching(folder, _WEIGHTS)
    digest = hashlib.blake2b(digest_size=32)
    for file in files:
        size = file.stat().st_size
        digest.update(_named(file, size))
        with file.open("rb") as opened:
            for offset in sorted(_sampled(opened, size)):
                opened.seek(offset)
                digest.update(opened.read(_PAGE_BYTES))
    return digest.digest() if files else None


def _matching(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    return sorted({file for kind in kinds for file in folder.glob(kind) if file.is_file()})


def _named(file: Path, size: int) -> bytes:
    return f"{file.name}\0{size}\0".encode()


def _sampled(file: BinaryIO, size: int) -> set[int]:
    """Where pages are read: all of a safetensors file's header, a page of the middle of each
    tensor, and pages at equal distances."""
    offsets = {size * i // _SAMPLES for i in range(_SAMPLES)} | {max(0, size - _PAGE_BYTES)}
    length = int.from_bytes(file.read(8), "little")
    if not file.name.endswith(".safetensors") or 8 + length > min(size, _MOST_HEADER_BYTES):
        return offsets
    header = json.loads(file.read(length))
    tensors = [tensor["data_offsets"] for tensor in header.values() if "data_offsets" in tensor]
    middles = {8 + length + (begin + end) // 2 for begin, end in tensors}
    return offsets | middles | set(range(0, 8 + length, _PAGE_BYTES))
