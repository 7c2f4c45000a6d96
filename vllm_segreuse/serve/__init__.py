# SPDX-License-Identifier: Apache-2.0
"""What a user meets at the API server: flag, routes, report, metrics."""
