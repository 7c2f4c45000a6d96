# SPDX-License-Identifier: Apache-2.0
"""For all tests: every core, a small cache, no network, no telemetry; the quick ones first."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bench.server import cpu_environment
from tests import selection, support
from tests.libraries import built, widest  # noqa: F401 - fixtures

# Before anything imports torch or vLLM, which read them once. What the caller has set stays.
for _name, _value in cpu_environment().items():
    os.environ.setdefault(_name, _value)

if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Workers share the cores.
    _cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores // _workers)))

# A shared machine may stall for longer than any deadline; what fails is printed to be repeated.
# `make quick` and `.ci/run` try the same few examples each time, `make everything` many and others.
settings.register_profile(
    "quick", deadline=None, print_blob=True, max_examples=30, derandomize=True
)
settings.register_profile("segreuse", deadline=None, print_blob=True)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=100)
settings.load_profile("segreuse")

_E2E = Path(__file__).parent / "e2e"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow` and `--support`."""
    parser.addoption("--slow", action="store_true", help="run what is marked slow, too")
    parser.addoption(
        "--support",
        choices=("record", "check"),
        help="add what passing tests show to docs/support.json, or compare a complete run with it",
    )


@pytest.fixture(autouse=True, scope="module")
def _logging_of_vllm() -> Iterator[None]:
    """Engines and commands of a module configure vLLM's logger in this process, and commands also
    quieten it; a package that vLLM's server imports quietens all loggers. Other modules are to read
    our log, and start servers, as if they had not."""
    names = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM")
    before = {name: os.environ.get(name) for name in names}
    logger = logging.getLogger("vllm")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    disabled, root_level = logging.root.manager.disable, logging.root.level
    yield
    logging.disable(disabled)
    logging.root.setLevel(root_level)
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def _models_of_vllm() -> Iterator[None]:
    """Commands of a module put the code of models that they loaded into vLLM's registry, in this
    process; other modules are to find names of models there."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    before = dict(registry.ModelRegistry.models) if registry else {}
    yield
    if registry:
        registry.ModelRegistry.models = before


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Modules that share a server run in one process."""
    from tests import division

    return division.scheduler(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Watch what is shown, if that is wanted."""
    if mode := config.getoption("--support"):
        import torch
        import vllm

        device = "gpu" if torch.cuda.is_available() else "cpu"
        version = ".".join(vllm.__version__.split(".")[:2])
        config.pluginmanager.register(support.Recorder(mode, f"{device} {version}"))


@pytest.hookimpl(tryfirst=True)  # before pytest itself goes by the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts engines or servers as `e2e`, and run it after everything else; leave the
    slow ones out, unless they are wanted, and skip what this machine cannot run."""
    selection.check(items, _E2E)
    for item in items:
        support.note(item)
        support.note_patches(item)
        support.leave_out(item)
        if item.path.is_relative_to(_E2E):
            item.add_marker(pytest.mark.e2e)
    if not config.getoption("--slow"):
        slow = [item for item in items if selection.is_slow(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not selection.is_slow(item)]
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)  # stable


@pytest.fixture
def to_nobody(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], object]], tuple[Any, str]]:
    """Runs what ends the process, into a pipe that nobody reads any more, as behind `| head -1`:
    the exit status, and the standard error."""

    def run(command: Callable[[], object]) -> tuple[Any, str]:
        reader, writer = os.pipe()
        os.close(reader)
        with monkeypatch.context() as patch, open(writer, "w", encoding="utf-8") as output:
            patch.setattr(sys, "stdout", output)
            with pytest.raises(SystemExit) as ended:
                command()
        return ended.value.code, capfd.readouterr().err

    return run
