"""The ranks that act together: how they meet, tell each other what they have, and notice that one is gone."""
