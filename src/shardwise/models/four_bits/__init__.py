"""Bases in four bits: which layers, their modules, their product, their files."""
