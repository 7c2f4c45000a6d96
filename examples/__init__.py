# SPDX-License-Identifier: Apache-2.0
"""Programs to start from; run as modules from the repository's root, not installed."""
