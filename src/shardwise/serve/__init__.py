"""``shardwise serve``: an AdapterBank behind the protocol of the ``tinker`` client.

[Note: Turns] A server has one base and any number of models, which are adapters of a bank. Each request belongs to
a queue: requests of a model run in the order of their ``seq_id``, samples in that of their arrival. A turn is a
prefix of each queue, chosen by a pure function (``turns``), and has three parts:

1. passes of all models, and log probabilities of prompts: one ``forward_backward`` of the bank;
2. optimizer steps of all models, at most one of each: one ``optim_step``;
3. whatever else, one after the other: new models, loads and saves, of each key one; snapshots; at last samples, in
   one ``generate``.

[Note: Threads] On the first rank an event loop in a thread of its own has the connections and all state of the
service (``service``): sessions, models, queues, futures. It needs no locks. The main thread of each rank runs turns
(``run``): the first rank takes a turn from the event loop, all ranks get it by a broadcast, carry it out
(``engine``), and the first rank gives the outcomes back to the event loop.

[Note: What survives] Weights that ``save_weights`` has acknowledged survive any kill. Nothing else does: after a
restart models and futures are gone, and clients get 404 and 410.
"""

from shardwise.core.errors import require_versions

require_versions()
