"""Checkers of the notebooks' exercises, one module per chapter, against verl or hand-derived numbers."""
