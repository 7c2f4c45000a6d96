# SPDX-License-Identifier: Apache-2.0
"""`python -m segreuse_tools`: the command where it is not installed."""

import sys

from segreuse_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
