"""Which modules become FSDP2 groups: policies, groups, wrapping, what accelerate's words mean."""
