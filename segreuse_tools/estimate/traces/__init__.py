# SPDX-License-Identifier: Apache-2.0
"""Request traces that carry ids of text in place of text.

    request      a request: parts of a prompt, each with an id and a length
    lines        the lines of a log, compressed or not, and how much of it has been read
    formats      what a line of each format means
    reading      a trace, told apart by its content, one request after the other
    writing      requests as hash ids, for load generators

Imports neither torch nor vLLM. `bench` replays the same requests through an engine.
"""
