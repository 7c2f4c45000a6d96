# SPDX-License-Identifier: Apache-2.0
"""What `make demo` shows, as figures: the real server, eager, on random weights and real text."""

from rich.console import Console

from bench import demo, harness
from bench.server import ServerError


def run(quick: bool) -> harness.SuiteResult:
    """All questions of the demo; it is quick as it is."""
    try:
        return demo.result(demo.converse(Console(stderr=True, highlight=False)))
    except (demo.DemoError, ServerError) as error:
        raise harness.BenchError(str(error)) from error
