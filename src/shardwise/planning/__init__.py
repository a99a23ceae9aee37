"""Who reads, moves and writes what, and what is missing. Pure: no torch, no files, no processes."""
