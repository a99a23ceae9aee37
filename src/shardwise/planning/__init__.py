"""Plans of reads, moves and writes as pure functions, without torch, file access or process groups."""
