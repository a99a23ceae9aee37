"""What a training will take, before there is one."""
