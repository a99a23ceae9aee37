"""``shardwise train``: TRL's trainers with models of ours, from a configuration of TRL."""
