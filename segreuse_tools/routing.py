# SPDX-License-Identifier: Apache-2.0
"""For clients of several engines: headers by which a router sends requests that share documents to
the same engine.

An engine reuses what it has computed itself. The value is the smallest SHA-256 of the request's
documents (MinHash; Broder, 1997): two requests get the same value as often as a document of either
is a document of both. So it needs no knowledge of other requests, and any language can compute it.

    printf 'KEY\\0%s' DOCUMENT | sha256sum     # the smallest of these, 16 digits of it

Imports neither torch nor vLLM.
"""

from collections.abc import Iterable

from vllm_segreuse.features.knowledge.digests import document_digest

HEADER = "X-SegReuse-Documents"
"""What routers hash: `configs/recipes/nginx.conf`, `configs/recipes/production-stack.yaml`."""

SESSION_HEADER = "X-Session-ID"
"""What the router of the vLLM project hashes (`vllm-router --policy consistent_hash`)."""

DATA_PARALLEL_HEADER = "X-data-parallel-rank"
"""What vLLM's own server reads, where it has several engines."""

DIGESTS_HEADER = "X-SegReuse-Digests"
"""What routers read that know what each engine holds (`segreuse_tools/scoring.py`)."""


def routing_headers(
    documents: str | Iterable[str], extra_keys: str | Iterable[str] = (), header: str = HEADER
) -> dict[str, str]:
    """Headers of a request, for a router that hashes one of them.

    Args:
        documents: what the request shares with others: texts or ids of its documents, in any order,
            or a single one. Where documents are asked for together, what they have in common is
            better, such as the name of their topic.
        extra_keys: of the request. Documents of other namespaces are not shared.
        header: the one that the router hashes.

    Returns:
        Empty for a request without documents: any engine will do.
    """
    value = _smallest_hash(documents, extra_keys)
    return {} if value is None else {header: value}


def data_parallel_headers(
    documents: str | Iterable[str], extra_keys: str | Iterable[str], engines: int
) -> dict[str, str]:
    """The same for one vLLM server with so many engines (`--data-parallel-size`), and no router.

    Raises:
        ValueError: less than one engine.
    """
    if engines < 1:
        raise ValueError(f"engines={engines}: a server has one at least")
    value = _smallest_hash(documents, extra_keys)
    return {} if value is None else {DATA_PARALLEL_HEADER: str(int(value, 16) % engines)}


def document_digests(
    documents: str | Iterable[str], extra_keys: str | Iterable[str] = ()
) -> list[str]:
    """What stands for each document of a request, in its order: what servers say that they hold.

    Args:
        documents: ids of documents of a knowledge base, whose extra key is the request's.
        extra_keys: of the request.
    """
    # A text is an iterable of texts, too: its letters are in nearly all documents.
    keys = [extra_keys] if isinstance(extra_keys, str) else list(extra_keys)
    each = [documents] if isinstance(documents, str) else documents
    return [document_digest(document, keys) for document in each]


def digests_headers(
    documents: str | Iterable[str], extra_keys: str | Iterable[str] = ()
) -> dict[str, str]:
    """The same as a header, for a router that knows what each engine holds; empty for none."""
    digests = document_digests(documents, extra_keys)
    return {DIGESTS_HEADER: ",".join(digests)} if digests else {}


def _smallest_hash(documents: str | Iterable[str], extra_keys: str | Iterable[str]) -> str | None:
    return min(document_digests(documents, extra_keys), default=None)
