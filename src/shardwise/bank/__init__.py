"""Many adapters trained at once on one sharded base.

[Note: Many adapters] An adapter's matrices are not parameters of the base. Each adapter has one flat float32
buffer, unsharded on every rank and outside of the module tree. So FSDP2's groups do not change, adapters are added
and deleted without moving a shard, ranks may have rows of different adapters, and each adapter has its own
accumulation window. (As parameters of FSDP2's groups, matrices would be gathered with each block for each pass, and
their gradients reduced for each micro-batch. Gradients of two adapters of one shape, each used on one rank only,
would be reduced into one another.)

A call of ``forward_backward`` has these steps:

1. Each rank checks its requests (``rows``). All ranks exchange the lengths of rows and their numbers of targets.
   Invalid input on one rank raises the same error on all.
2. Passes are composed of rows of similar lengths, equal on every rank (``compose``).
3. A pass (``passes``) concatenates rows, adapter by adapter, and owns the route that maps rows to adapters.
   Targeted layers of the base read the route and add each adapter's delta to its own rows (``hooks``,
   ``kernels``). Log probabilities are computed in chunks, and losses (``losses``) request by request. The backward
   pass adds to the adapters' flat gradients directly.
4. The ranks exchange losses or a failure (``batch``). After a failure, gradients have their values from before the
   call, and if ranks have left one another in a gather, the bank has ended (``gathers``).

``optim_step`` sums the gradients of all its adapters over the ranks at once, if ranks pass the same settings. It
checks that they are finite, clips, and steps (``optimizer_steps``).
Bases that would couple adapters are rejected with the reason (``rows``).
"""

from shardwise.core.errors import require_versions

require_versions()
