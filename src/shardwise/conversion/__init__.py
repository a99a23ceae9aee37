"""Expressions: which stored elements make up a box of a parameter, and what is computed of them. No torch."""
