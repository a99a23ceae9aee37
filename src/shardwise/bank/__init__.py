"""Trains many adapters at once on one sharded base.

[Note: Many adapters] A tenant's matrices are no parameters of the base. They lie in one flat float32 buffer for
each tenant, whole on every rank and outside of the module tree; so FSDP2's groups stay as they are, a tenant comes
and goes without a shard being moved, ranks may have rows of different tenants, and a window is a tenant's own.
(As parameters of FSDP2's groups they would be gathered with each block for each pass, their gradients reduced for
each micro-batch; and of two of one shape, each used on one rank alone, gradients are reduced into one another.)

A call of ``forward_backward`` goes like this:

1. Each rank checks its rows; all meet, and know the rows, the longest and the learned tokens of each tenant
   (``rows``). That is also where bad input becomes everybody's error.
2. Passes are planned, the same on every rank: tenants of one padded length share one.
3. A pass (``calls``) lays its rows side by side, tenant by tenant, and owns the route that says so. Layers of the
   base that a tenant targets ask the route, and add each tenant's part to its own rows (``backends``). The backward
   pass adds straight to the tenants' flat gradients.
4. The ranks meet again, with losses or with a failure, after which gradients are what they were before the call.

``optim_step`` sums one tenant's gradient over the ranks, looks whether it is finite, clips, and steps (``tenant``).
What could couple tenants in the base is refused by name (``rows``).
"""

from shardwise.errors import require_versions

require_versions()
