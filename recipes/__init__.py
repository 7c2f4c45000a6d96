# SPDX-License-Identifier: Apache-2.0
"""Models made for reuse: each recipe is a command of its own."""
