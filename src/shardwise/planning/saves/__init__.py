"""The plan of a save and of a merge: files, bytes, fingerprints, and the steps after which they count."""
