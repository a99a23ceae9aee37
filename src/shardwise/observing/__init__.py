"""Memory and phases of a process, recorded while it runs, and read back. Needs no torch."""
