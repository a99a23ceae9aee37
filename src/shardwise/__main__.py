"""``python -m shardwise``."""

from shardwise.cli import main

if __name__ == "__main__":  # started ranks import this module by another name
    main(prog_name="shardwise")
