# SPDX-License-Identifier: Apache-2.0
"""The commands by name: each parses its arguments, and returns the exit status."""
