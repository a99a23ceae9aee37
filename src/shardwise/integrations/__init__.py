"""Other libraries' ways of training and serving, with models that are sharded here."""
