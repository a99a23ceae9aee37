"""Expressions: the stored elements that make up a box of a parameter, and the computations on them. No torch."""
