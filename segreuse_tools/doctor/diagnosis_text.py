# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from segreuse_tools.doctor.composed import ComposedStates
from segreuse_tools.doctor.diagnosis import Diagnosis
from segreuse_tools.doctor.memory_use import Memory
from segreuse_tools.doctor.trained_documents import TrainedDocuments
from segreuse_tools.doctor.windowed_kv import WindowedKv


def as_text(diagnosis: Diagnosis) -> str:
    """The verdict, its reasons, and the facts that are known."""
    verdict = "works with segment reuse" if diagnosis.works else "refused"
    lines = [f"{', '.join(diagnosis.architectures)}: {verdict}"]
    lines += [f"  - {reason}" for reason in diagnosis.reasons]
    lines += [f"  {name:<10}{value}" for name, value in _facts(diagnosis)]
    if diagnosis.works:
        lines.append("Start-up proves page layout, rotations and the pass on the loaded weights.")
    return "\n".join(lines)


def _facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    versions, machine, policy = diagnosis.versions, diagnosis.machine, diagnosis.policy
    yield "versions", f"vLLM {versions['vllm']}, vllm-segreuse {versions['vllm_segreuse']}"
    yield "machine", f"{machine['device']}, {machine['name']}, {_bytes(machine['memory_bytes'])}"
    if model := diagnosis.model:
        yield (
            "model",
            f"{model['layers']} layers, {model['attention_heads']} heads and {model['kv_heads']} "
            f"KV heads of {model['head_size']} channels, {model['dtype']}, prompts up to "
            f"{model['max_model_len']:,} tokens, KV blocks of {model['block_size']}",
        )
    if diagnosis.backend:
        yield "attention", diagnosis.backend
        yield "kernels", str(diagnosis.kernels)
    if diagnosis.documents:
        yield "documents", _documents(diagnosis.documents)
        yield "policy", f"{policy['name']}, no reused token is recomputed"
    else:
        share = policy["recompute_ratio"]
        own = "the policy's own share" if share is None else f"{share:.0%}"
        off = "" if policy["enabled"] is True else f"; starts with enabled: {policy['enabled']}"
        yield "policy", f"{policy['name']}, {own} of the reused tokens recomputed{off}"
    if diagnosis.memory:
        yield from _memory(diagnosis.memory)
    if diagnosis.windows:
        yield "windows", _windows(diagnosis.windows)
    if diagnosis.states:
        yield "states", _states(diagnosis.states)
    for note in diagnosis.notes:
        yield "note", note


def _documents(documents: TrainedDocuments) -> str:
    start, end, *links = documents.tokens
    links = links[: documents.link_tokens * documents.max_documents]
    named = f", {links[0]} to {links[-1]}" if links else ""
    anchors = documents.anchors
    if anchors is not None:
        count, of = anchors["anchor_tokens"], anchors["chunk_tokens"]
        named += f"; {count} anchors stand for {of} tokens of its text"
    checked = "" if documents.tokenizer is None else f"; {documents.tokenizer}: start-up checks it"
    return (
        f"at most {documents.max_documents} in a prompt, each computed alone between {start} and "
        f"{end}, with {documents.link_tokens} link tokens behind it{named}{checked}"
    )


def _memory(memory: Memory) -> Iterator[tuple[str, str]]:
    yield "weights", f"{_bytes(memory.weight_bytes)} on each device"
    yield (
        "KV",
        f"{_bytes(memory.kv_bytes_per_token)} per token, {_bytes(memory.kv_bytes_per_document)} "
        f"per document of 1,000 tokens, {_bytes(memory.kv_bytes_per_longest_prompt)} per prompt of "
        f"maximum length; a GiB holds {memory.documents_per_gib:,} such documents "
        f"({memory.tokens_per_gib:,} tokens)",
    )
    yield (
        "tables",
        f"{_bytes(memory.index_bytes_per_block)} per KV block, "
        f"{_bytes(memory.index_bytes_per_gib)} per GiB of KV cache; a pass holds up to "
        f"{_bytes(memory.pass_bytes)}",
    )


def _windows(windows: WindowedKv) -> str:
    kept, passed = _bytes(windows.bytes_windows), _bytes(windows.bytes_all)
    told = (
        f"{windows.layers} of {windows.all_layers} layers attend to {windows.window:,} tokens at "
        f"most; a prompt of {windows.prompt_tokens:,} tokens holds "
    )
    if windows.keeps_windows:
        return f"{told}{kept} while it is answered, {passed} if all of their blocks were kept"
    times = windows.bytes_all / windows.bytes_windows
    return (
        f"{told}{passed} while it is answered, as all of their blocks are kept: {times:.1f} times "
        f"the {kept} that it holds with --no-disable-hybrid-kv-cache-manager"
    )


def _states(states: ComposedStates) -> str:
    told = (
        f"{states.layers} layers hand one on; what a segment changes of it takes "
        f"{_bytes(states.map_bytes)}, and state_bytes holds {states.most_maps:,} of these"
    )
    return "; ".join((told, *states.unknown))


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:,.1f} {unit}"
