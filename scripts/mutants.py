# SPDX-License-Identifier: Apache-2.0
"""Takes out what keeps reuse safe, one piece at a time, and sees whether the quick tests notice.

    python scripts/mutants.py                 all mutants, until one of the two suites notices
    python scripts/mutants.py --all           against both suites, whatever the first one says
    python scripts/mutants.py --only pin      those whose name contains "pin"

Works on a temporary copy of the sources. Exit status 1 if a mutant survives both suites, 2 if the
copy does not pass unchanged or a patch no longer fits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("vllm_segreuse", "kernels", "bench", "tests", "pyproject.toml")
SUITES = {
    "unit": ("tests/cache", "tests/test_scheduler.py", "tests/prefill/test_selection.py"),
    "model": (
        "tests/model/test_world.py",
        "tests/model/test_simulation.py",
        "tests/model/test_machine.py",
    ),
}
CPU_S = 600
TIMEOUT_S = 3600.0
"""Who spins or hangs has failed; a machine with other things to do has not."""
HASTE = """# Found is enough: nobody reads the smallest example.
from hypothesis.internal.conjecture import engine

engine.MAX_SHRINKING_SECONDS = 1
"""

PLANNER = "vllm_segreuse/cache/planner.py"
MATCHER = "vllm_segreuse/cache/matcher.py"
LOOKUP = "vllm_segreuse/cache/lookup.py"
LINKS = "vllm_segreuse/cache/links.py"
FROZEN = "vllm_segreuse/cache/frozen.py"
INDEX = "vllm_segreuse/cache/index.py"
NAMESPACE = "vllm_segreuse/cache/namespace.py"
POOL = "vllm_segreuse/compat/block_pool.py"
SCHEDULER = "vllm_segreuse/scheduler.py"
VLLM_SCHEDULER = "vllm_segreuse/compat/scheduler.py"
SELECTION = "vllm_segreuse/prefill/selection.py"


@dataclass(frozen=True)
class Mutant:
    """A safeguard taken out: (file, text that occurs there once, what stands there instead)."""

    name: str
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = [
    Mutant(
        "donors are not pinned",
        (
            (POOL, "        self.touch([self.blocks[i] for i in block_ids])\n", "        pass\n"),
            (
                POOL,
                "        self.free_blocks([self.blocks[i] for i in block_ids])\n",
                "        pass\n",
            ),
        ),
    ),
    Mutant(
        "pins of plans without blocks are kept",
        (
            (
                PLANNER,
                "        for request_id in list(self._pending):\n"
                "            self._drop(request_id)\n",
                "        self._pending.clear()\n",
            ),
        ),
    ),
    Mutant(
        "a request asked twice keeps both pins",
        (
            (
                PLANNER,
                "        self._drop(tracked.request_id)\n        tracked.plan, tracked.start",
                "        tracked.plan, tracked.start",
            ),
        ),
    ),
    Mutant(
        "tokens are not compared in lookups",
        (
            (
                LOOKUP,
                "            and _is_equal(block_tokens, nodes[entry].block, tokens, window)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "tokens are not compared while growing to the left",
        (
            (
                MATCHER,
                "block_tokens[block, block_size - 1 - length] == tokens[end - 1 - length]\n",
                "block_tokens[block, 0] >= 0\n",
            ),
        ),
    ),
    Mutant(
        "the exact tier reads blocks that are named in its own step",
        (
            (
                POOL,
                "            if cached is not None and cached[0].block_id not in self._fresh:\n"
                "                found[i]",
                "            if cached is not None:\n                found[i]",
            ),
        ),
    ),
    Mutant(
        "the salt is not in the namespace",
        ((NAMESPACE, '_field(b"S", salt)', '_field(b"S", ())'),),
    ),
    Mutant(
        "only the first extra key is in the namespace",
        ((NAMESPACE, '_field(b"K", extra_keys)', '_field(b"K", extra_keys[:1])'),),
    ),
    Mutant(
        "the adapter is not in the namespace",
        ((NAMESPACE, '_field(b"L", lora or ())', '_field(b"L", ())'),),
    ),
    Mutant(
        "images are not in the namespace",
        ((NAMESPACE, '_field(b"M", mm_hashes)', '_field(b"M", ())'),),
    ),
    Mutant(
        "the index does not tell namespaces apart",
        (
            (LOOKUP, "            and nodes[entry].namespace == namespace\n", ""),
            (INDEX, "np.uint64((namespace * _GOLDEN) % 2**64)", "np.uint64(_GOLDEN)"),
        ),
    ),
    Mutant(
        "a namespace gives its id back while its blocks live",
        (
            (
                NAMESPACE,
                "if not self._references[namespace] and not self._is_indexed(namespace):",
                "if not self._references[namespace]:",
            ),
        ),
    ),
    Mutant(
        "approximate blocks get exact names",
        (
            (
                POOL,
                "                num_cached_blocks, min(num_full_blocks, "
                "tracked.plan.start // block_size)\n",
                "                num_cached_blocks, num_full_blocks\n",
            ),
        ),
    ),
    Mutant(
        "the block at a plan's start gets an exact name",
        ((POOL, "tracked.plan.start // block_size)", "tracked.plan.start // block_size + 1)"),),
    ),
    Mutant(
        "blocks of this very step donate",
        (
            (
                MATCHER,
                "nodes[entry].born != step and nodes[entry].depth <= max_depth",
                "nodes[entry].depth <= max_depth",
            ),
        ),
    ),
    Mutant(
        "a plan stands behind a prefix of this very step",
        ((PLANNER, "        if state.fresh:\n", "        if False:\n"),),
    ),
    Mutant(
        "blocks freed in the step that named them donate",
        (
            (
                POOL,
                "if block.block_id in self._fresh and block.ref_cnt == 1:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        "evicted blocks stay indexed",
        (
            (
                POOL,
                "                self.index.remove(block.block_id)\n",
                "                pass\n",
            ),
        ),
    ),
    Mutant(
        "a reset leaves the index",
        ((POOL, "            self.index.clear()\n", ""),),
    ),
    Mutant(
        "frozen blocks are not held",
        (
            (FROZEN, "        self._blocks.pin(new)\n", ""),
            (
                FROZEN,
                "            each.callback(self._blocks.unpin, list(unheld))\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "the frozen pool has no limit",
        ((FROZEN, "if self.num_frozen + len(new) > self.limit:", "if False:"),),
    ),
    Mutant(
        "what is frozen may have been computed with somebody's KV",
        (
            (SCHEDULER, '            bypass = bypass or "knowledge_base"\n', "            pass\n"),
            (POOL, "if name is None or get_block_hash(name).startswith(_OWN_NAME):", "if False:"),
        ),
    ),
    Mutant(
        "copied tokens donate",
        (
            (
                PLANNER,
                "np.where(whole & (depth <= self._max_depth), depth, -1)",
                "whole * 0 + depth",
            ),
        ),
    ),
    Mutant(
        "provenance has no bound",
        (
            (
                PLANNER,
                "np.where(whole & (depth <= self._max_depth), depth, -1)",
                "np.where(whole, depth, -1)",
            ),
            (
                MATCHER,
                "nodes[entry].born != step and nodes[entry].depth <= max_depth",
                "nodes[entry].born != step",
            ),
        ),
    ),
    Mutant(
        "a plan that an error left behind is reported",
        (
            (
                PLANNER,
                "        if self._pending.pop(tracked.request_id, None) is None:\n"
                "            tracked.plan = None",
                "        if self._pending.pop(tracked.request_id, None) is None:\n            pass",
            ),
        ),
    ),
    Mutant(
        "a preempted request is planned with its old tokens",
        (
            (
                SCHEDULER,
                "        if request.num_tokens != len(tracked.tokens):\n",
                "        if False:\n",
            ),
        ),
    ),
    Mutant(
        "admission stays closed",
        (
            (
                PLANNER,
                "        self._ready, self._closed = [], False\n",
                "        self._ready = []\n",
            ),
        ),
    ),
    Mutant(
        "an error of ours reaches vLLM",
        (
            (
                SCHEDULER,
                "            except Exception:\n",
                "            except ZeroDivisionError:\n",
            ),
        ),
    ),
    Mutant(
        "donors are rotated from their block's position",
        (
            (
                MATCHER,
                "piece[POSITION] = nodes[entry].position + offset",
                "piece[POSITION] = nodes[entry].position",
            ),
        ),
    ),
    Mutant(
        "removed blocks keep their children",
        (
            (
                LINKS,
                "        _unlink_family(nodes, entry)\n        _unlink_group",
                "        _unlink_group",
            ),
        ),
    ),
    Mutant(
        "the token behind a spread plan donates before it is computed",
        (
            (
                PLANNER,
                "            computed[max(plan.stop - first, 0) : behind] = False\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        "a spread plan has no slot for the token behind it",
        (
            (
                PLANNER,
                "        return plan.num_written if plan.spread else plan.num_tokens\n",
                "        return plan.num_tokens\n",
            ),
        ),
    ),
    Mutant(
        "a spread plan is forgotten when its request runs",
        (
            (
                SCHEDULER,
                "        if tracked is None or request.num_computed_tokens:\n",
                "        if tracked is None:\n",
            ),
        ),
    ),
    Mutant(
        "workers carry on with what a reset has called back",
        (
            (
                SCHEDULER,
                "        self._called_back.append(request.request_id)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "a reset leaves alone what is set aside",
        ((VLLM_SCHEDULER, "            _call_back(self)\n", "            pass\n"),),
    ),
    Mutant(
        "a late word of a plan that was called back counts",
        (
            (
                VLLM_SCHEDULER,
                "{i for i in told.finished_recving if _is_loading(self, i)}",
                "set(told.finished_recving)",
            ),
        ),
    ),
    Mutant(
        "what was called back is planned again",
        ((PLANNER, '            tracked.bypass = "reset"\n', ""),),
    ),
    Mutant(
        "TP ranks choose for themselves",
        ((SELECTION, "        together = group.broadcast(together, src=0)\n", "        pass\n"),),
    ),
    Mutant(
        "TP ranks go by the peaks of their own heads",
        ((SELECTION, "flat = group.all_gather(flat[None], dim=0).amax(0)", "pass"),),
    ),
    Mutant(
        "an error while the workers' number is noted reaches vLLM",
        (
            (
                SCHEDULER,
                "    @_contained(otherwise=None)\n    def _note_computed(",
                "    def _note_computed(",
            ),
        ),
    ),
    Mutant(
        "the workers' number is taken for that of any plan of the request",
        (
            (
                SCHEDULER,
                "plan, tracked.awaited = tracked.awaited, None\n",
                "plan = tracked.awaited\n",
            ),
        ),
    ),
]


class CannotRunError(Exception):
    """The mutants say nothing: a patch does not fit, or the sources fail unchanged."""


def copy_sources(repository: Path, to: Path) -> None:
    """Sources with the machine code numba has cached beside them; links stay links."""
    ignore = shutil.ignore_patterns("*.pyc", ".hypothesis", "results")
    for name in COPIED:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, to / name)


def apply(mutant: Mutant, root: Path) -> None:
    """Patch the copy.

    Raises:
        CannotRunError: a text does not occur exactly once.
    """
    for name, old, new in mutant.edits:
        path = root / name
        text = path.read_text()
        if text.count(old) != 1:
            raise CannotRunError(
                f"{mutant.name}: {old!r} occurs {text.count(old)} times in {name}, not once; "
                "bring the mutant up to date"
            )
        path.write_text(text.replace(old, new))


def failure(root: Path, tests: tuple[str, ...]) -> str | None:
    """How a suite fails on the copy, or None; one that hangs has failed."""
    (root / "haste.py").write_text(HASTE)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "haste"]
    command += ["--hypothesis-seed=0", *tests]
    environment = dict(os.environ, PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    where = [sys.executable, "-c", "import vllm_segreuse; print(vllm_segreuse.__file__)"]
    found = subprocess.run(where, cwd=root, env=environment, capture_output=True, text=True)
    if not found.stdout.startswith(str(root)):
        raise CannotRunError(f"the tests would run {found.stdout.strip()}, not the copy in {root}")
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 9)),
        )
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:.0f} s"
    if done.returncode == -signal.SIGXCPU:
        return f"not done within {CPU_S} s of computing"
    if done.returncode not in (0, 1):  # 1: tests failed; others: pytest itself did
        raise CannotRunError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return done.stdout.decode()[-2000:] if done.returncode else None


def run(sources: Path, mutant: Mutant | None, everything: bool) -> dict[str, str]:
    """Suites that notice a mutant (None: the sources as they are), and how; at most one, or all."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory).resolve()
        copy_sources(sources, root)
        if mutant is not None:
            apply(mutant, root)
        failures = ((suite, failure(root, tests)) for suite, tests in SUITES.items())
        found = ((suite, how) for suite, how in failures if how is not None)
        return dict(found if everything else itertools.islice(found, 1))


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name contains it")
    parser.add_argument("--all", action="store_true", help="run both suites on every mutant")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if not chosen:
        print(f"no mutant is named {options.only!r}; there are: {[m.name for m in MUTANTS]}")
        return 2
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        sources = Path(directory)  # what is edited meanwhile must not come between
        copy_sources(REPOSITORY, sources)
        try:
            if failed := run(sources, None, everything=True):
                how = "\n".join(failed.values())
                raise CannotRunError(f"{how}\nthe sources fail unchanged: mend them first")
            for mutant in chosen:
                began = time.monotonic()
                killers = run(sources, mutant, options.all)
                verdict = f"killed by {', '.join(killers)}" if killers else "SURVIVED"
                took = f"{time.monotonic() - began:4.0f} s"
                print(f"{mutant.name:55} {verdict:22} {took}", flush=True)
                survivors += [] if killers else [mutant.name]
        except CannotRunError as error:
            print(error)
            return 2
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
