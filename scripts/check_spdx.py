# SPDX-License-Identifier: Apache-2.0
"""Name every given file whose first lines do not carry the SPDX header; exit 1 if there is one."""

import sys
from pathlib import Path

HEADER = "# SPDX-License-Identifier: Apache-2.0"


def main(paths: list[str]) -> int:
    """Check `paths`; a shebang may come before the header."""
    missing = [path for path in paths if HEADER not in Path(path).read_text().splitlines()[:2]]
    for path in missing:
        print(f"{path}: the first line must be: {HEADER}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
