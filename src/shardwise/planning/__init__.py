"""Plans of reads, moves and writes. Pure: no torch, no files, no processes."""
