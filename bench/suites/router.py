# SPDX-License-Identifier: Apache-2.0
"""Two servers behind nginx: what is reused with the header that names documents, and without.

nginx runs `configs/recipes/nginx.conf`. Documents are drawn by a law of Zipf from more than the KV
caches of both servers hold, and each request brings them in another order, behind text of its own.

    one     one document a request
    four    four, each drawn on its own: any mixture occurs
    topic   four of the same eight: documents that are asked for together

Requests about a topic belong to sessions, several of which have the same topic: a router that sends
a session to one engine knows no more. Without a header, requests are spread at random; by round
robin, nginx sends them to one server after the other, and knows no recipe.

Prompts are the same for every kind of header; caches are empty at the beginning of each run.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench import harness, shapes
from bench.server import Server, ServerError
from segreuse_tools.routing import routing_headers

RECIPE = harness.REPOSITORY / "configs" / "recipes" / "nginx.conf"
SHAPE = "qwen3"
DOCUMENTS = 48
TOPIC = 8
"""Documents of a topic."""
SESSIONS = 4
"""Of a topic."""
DOCUMENT_TOKENS = 512
NEW_TOKENS = 32
BLOCK_SIZE = 32
KV_BLOCKS = 400
"""Of each server: 24 documents, a request's own blocks among them."""
REQUESTS, QUICK_REQUESTS = 120, 24
HEADERS: Mapping[str, Sequence[str]] = {
    "one": ("none", "documents"),
    "four": ("none", "documents"),
    "topic": ("none", "round_robin", "session", "documents", "topic"),
}
"""What the header is made of, by workload."""

_ADDRESSES = ("127.0.0.1:8001", "127.0.0.1:8002")
_FLAGS = (
    *("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--max-num-seqs", "8"),
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(KV_BLOCKS)),
    *("--dtype", "bfloat16", "--enforce-eager", "--served-model-name", "m"),
)
_START_S = 20


class Router(NamedTuple):
    """Addresses of nginx: of the recipe, and of a round robin over the same servers."""

    hashed: str
    round_robin: str


class Request(NamedTuple):
    """Documents by number, what is new, and whose request it is."""

    documents: list[int]
    head: list[int]
    question: list[int]
    session: int = 0


def run(quick: bool) -> harness.SuiteResult:
    """All workloads with each kind of header."""
    number = QUICK_REQUESTS if quick else REQUESTS
    try:
        with servers() as running, nginx([server.url for server in running]) as router:
            rows = [
                measure(workload, header, router, running, number)
                for workload, headers in HEADERS.items()
                for header in headers
            ]
    except (ServerError, httpx.HTTPError) as error:
        raise harness.BenchError(str(error)) from error
    return {"rows": rows, "summary": summary_of(rows)}


def requests(workload: str, number: int) -> list[Request]:
    """The requests of a workload; the same at every call."""
    draw = np.random.default_rng(0)

    def new() -> list[int]:
        return [int(token) for token in draw.integers(300, shapes.VOCAB_SIZE, NEW_TOKENS)]

    def documents() -> list[int]:
        if workload == "topic":
            topic = int(draw.choice(DOCUMENTS // TOPIC, p=_zipf(DOCUMENTS // TOPIC)))
            return [TOPIC * topic + int(it) for it in draw.choice(TOPIC, 4, replace=False)]
        count = {"one": 1, "four": 4}[workload]
        chosen = draw.choice(DOCUMENTS, count, replace=False, p=_zipf(DOCUMENTS))
        return [int(it) for it in draw.permutation(chosen)]

    asked = [Request(documents(), new(), new()) for _ in range(number)]
    whose = np.random.default_rng(2).integers(SESSIONS, size=number).tolist()
    return [
        request._replace(session=SESSIONS * (request.documents[0] // TOPIC) + one)
        for request, one in zip(asked, whose, strict=True)
    ]


def headers_of(request: Request, kind: str) -> dict[str, str]:
    """What a client sends."""
    names = {
        "none": [],
        "round_robin": [],
        "session": [f"session {request.session}"],
        "documents": [f"document {number}" for number in request.documents],
        "topic": [f"topic {number // TOPIC}" for number in request.documents],
    }
    return routing_headers(names[kind])


@contextlib.contextmanager
def servers() -> Iterator[list[Server]]:
    """Two servers, each on a core of its own.

    Raises:
        BenchError: there are fewer than two cores.
        ServerError: one did not start.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise harness.BenchError("two servers need two cores")
    model = shapes.make_model(SHAPE)
    with contextlib.ExitStack() as stack:
        running = []
        for core in cores[:2]:
            env = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_SERVER_DEV_MODE": "1"}
            running.append(stack.enter_context(Server(model, _FLAGS, env)))
        yield running


@contextlib.contextmanager
def nginx(urls: Sequence[str]) -> Iterator[Router]:
    """nginx with the recipe in front of these servers.

    Raises:
        BenchError: there is no nginx, or it does not start.
    """
    program = shutil.which("nginx")
    if program is None:
        raise harness.BenchError("there is no nginx: apt-get install nginx-light")
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        hashed, by_turns = (f"127.0.0.1:{free.getsockname()[1]}" for free in (one, other))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nginx.conf")
        file.write_text(_around(recipe(urls, hashed) + _round_robin(urls, by_turns), folder))
        process = subprocess.Popen([program, "-p", folder, "-c", str(file)])
        try:
            wait_for(f"http://{hashed}/health", process)
            yield Router(f"http://{hashed}", f"http://{by_turns}")
        finally:
            process.terminate()
            process.wait(10)


def recipe(urls: Sequence[str], address: str) -> str:
    """The recipe with other addresses."""
    text = RECIPE.read_text().replace("listen 127.0.0.1:8000", f"listen {address}")
    for placeholder, url in zip(_ADDRESSES, urls, strict=True):
        text = text.replace(placeholder, url.removeprefix("http://"))
    return text


def _round_robin(urls: Sequence[str], address: str) -> str:
    """What nginx does with several servers of which it is told nothing else."""
    members = "".join(f"server {url.removeprefix('http://')};\n" for url in urls)
    return (
        f"upstream by_turns {{\n{members}}}\n"
        f"server {{\nlisten {address};\nclient_max_body_size 64m;\n"
        "location / {\nproxy_pass http://by_turns;\nproxy_read_timeout 600s;\n}\n}\n"
    )


def _around(text: str, folder: str) -> str:
    """What a distribution's own nginx.conf has around it; nothing is written outside of a
    folder."""
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in paths)
    user = "user root;\n" if os.geteuid() == 0 else ""  # else its workers may not enter the folder
    return (
        f"{user}daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{text}}}\n"
    )


def wait_for(url: str, process: "subprocess.Popen[bytes]", within_s: float = _START_S) -> None:
    """Wait until the router of this process answers.

    Raises:
        BenchError: it has ended, or did not answer in time.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url).raise_for_status()
            return
        time.sleep(0.1)
    raise harness.BenchError(f"the router does not answer on {url}")


def _zipf(number: int) -> np.ndarray:
    """float64 `[number]`: shares of the first, second, third."""
    shares = 1 / np.arange(1, number + 1)
    return np.asarray(shares / shares.sum())


def measure(
    workload: str, header: str, router: Router, running: Sequence[Server], number: int
) -> harness.Row:
    """Send so many requests of a workload to the router, and count what the servers reused.

    Args:
        header: what the routing header names, or `round_robin`.
        router: where to send them.
        running: the servers behind it; their caches are emptied first.

    Raises:
        BenchError: the servers did not admit every request.
    """
    reset(running)
    before = [_admitted(server) for server in running]
    documents = _documents()
    reports = []
    url = router.round_robin if header == "round_robin" else router.hashed
    with httpx.Client(base_url=url, timeout=120) as client:
        for request in harness.progress(requests(workload, number), f"{workload}, {header}"):
            reports.append(_ask(client, request, documents, headers_of(request, header)))
    loads = [_admitted(server) - was for server, was in zip(running, before, strict=True)]
    if sum(loads) != number:
        raise harness.BenchError(f"{number} requests were sent, and {sum(loads)} admitted")
    tokens = sum(DOCUMENT_TOKENS * len(it.documents) for it in requests(workload, number))
    return {
        "workload": workload,
        "header": header,
        "requests": number,
        "document_tokens": tokens,
        "reused_share": sum(it["reused_tokens"] + it["prefix_tokens"] for it in reports) / tokens,
        "busiest_share": max(loads) / number,
        "requests_by_server": loads,
    }


def reset(running: Sequence[Server]) -> None:
    """Nothing is cached afterwards."""
    for server in running:
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()


def _ask(
    client: httpx.Client,
    request: Request,
    documents: Mapping[int, list[int]],
    headers: Mapping[str, str],
) -> Any:
    """The report."""
    texts = [token for number in request.documents for token in documents[number]]
    body = {
        "model": "m",
        "prompt": [*request.head, *texts, *request.question],
        "max_tokens": 1,
        "extra_keys": ["router"],
    }
    answer = client.post("/v1/completions", json=body, headers=dict(headers)).raise_for_status()
    return answer.json()["kv_transfer_params"]["segreuse"]


def _documents() -> dict[int, list[int]]:
    draw = np.random.default_rng(1)
    tokens = draw.integers(300, shapes.VOCAB_SIZE, (DOCUMENTS, DOCUMENT_TOKENS))
    return dict(enumerate(tokens.tolist()))


def _admitted(server: Server) -> int:
    """Requests with extra keys so far."""
    lines = re.findall(r"^vllm:segreuse_requests_total\{.*\} (\S+)$", server.read("/metrics"), re.M)
    return round(sum(map(float, lines)))


def summary_of(rows: Sequence[harness.Row]) -> dict[str, float]:
    """The figures of the rows by workload and header, and the number of requests of a row."""
    summary: dict[str, float] = {}
    for row in rows:
        name = f"{row['workload']}_{row['header']}"
        summary[f"reused_share_{name}"] = row["reused_share"]
        summary[f"busiest_share_{name}"] = row["busiest_share"]
    return summary | {"requests": rows[0]["requests"]}
