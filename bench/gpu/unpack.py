# SPDX-License-Identifier: Apache-2.0
"""Unpack the archives of `pack.py` on the GPU machine, and say whether vLLM runs there.

    python3 bench/gpu/unpack.py --into /tmp/site build/gpu/core.tar.xz ...
    python3 bench/gpu/unpack.py --into /tmp/site --check

Needs nothing but Python. `--check` tries what serving needs, in the order in which it would fail,
and ends with the first sentence about what does not work.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Each in a process of its own: a library that cannot be loaded may take the process with it.
CHECKS = (
    ("Python and torch", "import torch; print(torch.__version__, torch.version.cuda)"),
    (
        "the GPU",
        "import torch; assert torch.cuda.is_available(), 'torch sees no CUDA device'; "
        "print(torch.cuda.get_device_name())",
    ),
    ("vLLM's Python", "import vllm; print(vllm.__version__)"),
    (
        "vLLM's operators",
        "import torch, vllm._C_stable_libtorch; "
        "x = torch.randn(4, 64, device='cuda', dtype=torch.bfloat16); o = torch.empty_like(x); "
        "torch.ops._C.rms_norm(o, x, torch.ones_like(x[0]), 1e-6); torch.cuda.synchronize(); "
        "assert o.isfinite().all()",
    ),
    (
        "FlashAttention 3",
        "import vllm.vllm_flash_attn as fa; from vllm.vllm_flash_attn import "
        "flash_attn_interface as f; assert f.FA3_AVAILABLE, f.FA3_UNAVAILABLE_REASON",
    ),
    ("experts", "import torch, vllm._moe_C_stable_libtorch"),
    ("Model Runner V2", "import vllm.v1.worker.gpu.model_runner, vllm.v1.worker.gpu_worker"),
    (
        "the server",
        "import vllm.entrypoints.openai.api_server, vllm.entrypoints.cli.serve; "
        "import vllm.benchmarks.serve",
    ),
    (
        "this package",
        "from vllm_segreuse.engine.version import require_supported_vllm as r; r(); "
        "from vllm_segreuse.cache.matcher import warm_up; warm_up(); "
        "from vllm_segreuse.kernels import cuda; print(cuda.unavailable() or 'CUDA kernels')",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("archives", type=Path, nargs="*")
    parser.add_argument("--into", type=Path, required=True, help="folder for PYTHONPATH")
    parser.add_argument("--check", action="store_true", help="try what serving needs")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    args = parser.parse_args()
    if not all(unpacked(archive, args.into) for archive in args.archives):
        return 1
    return check(args.into, args.all) if args.check else 0


def unpacked(archive: Path, into: Path) -> bool:
    """Whether one could be unpacked; says how long that took, or why not."""
    started = time.monotonic()
    try:
        unpack(archive, into)
    except (OSError, EOFError, tarfile.TarError) as error:
        print(f"{archive} cannot be unpacked: {error}", file=sys.stderr)
        return False
    print(f"{archive.name}: unpacked in {time.monotonic() - started:.1f} s", flush=True)
    return True


def unpack(archive: Path, into: Path) -> None:
    """One archive, into a folder that others may have been unpacked into."""
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(into, filter="data")


def tried(arguments: list[str], into: Path, **environment: str) -> tuple[bool, str]:
    """Run Python on what was unpacked; whether that worked, and the last line that it said."""
    here = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(into), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return True, (done.stdout.strip().splitlines() or ["works"])[-1]


def check(into: Path, go_on: bool) -> int:
    """Returns 0 if everything works; says in one sentence what does not."""
    failed = {}
    with ThreadPoolExecutor(len(CHECKS) if go_on else 1) as pool:
        for what, answer in [
            (what, pool.submit(tried, ["-c", code], into)) for what, code in CHECKS
        ]:
            works, said = answer.result()
            print(f"{what}: {said}" if works else f"{what} does not work: {said}", flush=True)
            if not works:
                failed[what] = said
                if not go_on:
                    pool.shutdown(cancel_futures=True)
                    break
    print(json.dumps({"ok": not failed, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
