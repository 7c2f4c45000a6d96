# SPDX-License-Identifier: Apache-2.0
"""Plans under pipeline parallelism: each stage has some of the model's layers.

    step n      first stage   align │ chunks of the program ──┐ states
                last stage    align │ the same tokens    ◄────┘        ──┐ fine?
    step n + 2  all stages    done, or queued once more, in full   ◄─────┘

A worker of a later stage gets a step's hidden states before it may look at a connector's plans, and
the stage before it sends them behind its own. So within a step messages go forward only. What the
first stage computes it hands on chunk by chunk, with the tokens' numbers; the later stages need not
know which program that was. Where tokens are chosen by later layers, a plan takes two goes, and the
choice goes back between them (`goes.py`); else they are chosen by the first stage's layers, or not
at all (`Program.layers_before_choice`). Whether a pass met NaN, or a stage could not prepare it, is
known at its end on the last stage, when the others have left the step. So no request runs in the
step of its plan: it is set aside, as for a plan over several steps, and every stage learns the
verdict as many steps later as there are stages. vLLM lets no more be under way, so nobody waits for
it.

All stages hold the same queue. Only the first divides the work among steps; each message says what
it has done in this one, and the last message of a step that it is over.
"""
