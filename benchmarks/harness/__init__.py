"""What all benchmarks share.

- ``checkpoints``: the shapes of real models, written once with random values
- ``loaders``: ways to bring a checkpoint up as a sharded model, ours and those of peers
- ``training``: batches, and a training loop by hand
- ``values``: whether two sharded models hold the same values
- ``meter``: seconds, processor time, memory over time, the page cache
- ``roof``: the same bytes read or written by bare processes
- ``results``: arguments, arms in turn, limits, tables, files
"""
