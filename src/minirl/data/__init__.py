"""Data: the mini task, its files, and the loader that feeds station 1."""
