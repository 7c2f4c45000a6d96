# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of a running server: its client, and the files that become documents."""
