"""Trains many LoRAs of one base by one command.

[Note: Turns] A tenant's rows come in an order of its own, and are dealt to ranks and cut into *portions* by what is
its own alone: whoever else is there, it gets the same portions one after the other. Which tenants'
portions go through the base together is decided for one pass at a time (``turns``): whoever is first in turn, and
those behind it that have rows of the same padded length and fit into the budget of tokens. All that have gone go to
the end of the queue. So each pass has one length, nobody is padded to another's, and nobody waits for more passes
than there are others. The decision is taken of numbers that every rank has, so all ranks take the same one without
a word.

A tenant's steps, evaluations and checkpoints are counted by its own steps (``trainee``), and so is its end. What it
keeps of itself is kept between two of its steps, whatever the others are doing (``keeping``).
"""

from shardwise.errors import require_versions

require_versions()
