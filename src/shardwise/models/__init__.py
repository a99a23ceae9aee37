"""Models as torch and transformers have them: built on meta, wrapped, looked into, initialised."""
