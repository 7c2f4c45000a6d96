# SPDX-License-Identifier: Apache-2.0
"""The viewer: pages for the administrator below `/plugins/segreuse/v1/ui`."""
