# SPDX-License-Identifier: Apache-2.0
"""Conversations whose context is edited, and what each edit costs (`python -m bench edits`)."""
