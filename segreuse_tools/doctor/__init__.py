# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse doctor`: whether a model will be served with segment reuse here, without weights.

It makes the verdict of start-up from the same code: the engine's configuration is made as `serve`
makes it (`supported.check_config`), the model is built without storage, and its layers go through
what start-up checks before it proves anything on weights. The proof itself needs weights, and is
left to start-up.
"""
