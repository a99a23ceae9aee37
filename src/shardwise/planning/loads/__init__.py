"""The plan of a load: a fill for every tensor, and the requests that read them."""
