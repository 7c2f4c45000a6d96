# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` waits for the next vLLM's tests, whatever those beside them say, and shows their log.

Its tools are shell scripts: nothing is tested.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent / ".ci" / "run"
MAKE = """\
#!/usr/bin/env bash
case "$2" in
    next) sleep 0.5; echo "the next vLLM's tests have ended"; exit "$NEXT" ;;
    test) exit "$TESTS" ;;
esac
"""


@pytest.mark.parametrize(("tests", "on_next"), [(0, 0), (3, 0), (0, 4), (3, 4)])
def test_both_suites_end_before_it_does(tmp_path: Path, tests: int, on_next: int) -> None:
    for name, script in (
        (".ci/run", RUN.read_text()),
        ("bin/make", MAKE),
        (".venv/bin/python", "#!/usr/bin/env bash\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    found = subprocess.run(
        [shutil.which("bash") or "bash", ".ci/run"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "TESTS": str(tests), "NEXT": str(on_next)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the next vLLM's tests have ended\n" in found.stdout
    assert found.returncode in ({tests, on_next} - {0} or {0})
    assert ("done\n" in found.stdout.splitlines(keepends=True)[-1]) == (not found.returncode)
