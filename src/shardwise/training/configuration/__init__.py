"""``shardwise train``'s configuration: keys, their types, and what they mean."""
