"""Who hands what to whom: parcels and the rounds in which they go."""
