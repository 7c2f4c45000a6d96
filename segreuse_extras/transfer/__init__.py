# SPDX-License-Identifier: Apache-2.0
"""Prefill on one engine, decoding on another: a transfer connector of vLLM's beside ours.

A prefill engine plans and computes as any other; the other connector then hands the request's
blocks over, and with them goes how far they are exact. On a decode engine the other connector fills
blocks, which get exact names up to there only.
"""
