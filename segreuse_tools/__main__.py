# SPDX-License-Identifier: Apache-2.0
"""`python -m segreuse_tools`: the command where it is not installed."""

from segreuse_tools.cli import run

if __name__ == "__main__":
    run()
