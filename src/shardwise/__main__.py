"""``python -m shardwise``: the command, where its script is not on the path, or a launcher starts modules."""

from shardwise.cli import main

if __name__ == "__main__":  # processes that ranks are forked from import it by another name
    main(prog_name="shardwise")
