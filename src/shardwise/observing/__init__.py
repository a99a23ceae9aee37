"""What a rank needs and does, written down while it runs, and read back. Needs no torch."""
