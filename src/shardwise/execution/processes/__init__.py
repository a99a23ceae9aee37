"""Where ranks come from: processes that are forked here, or those of a launcher."""
