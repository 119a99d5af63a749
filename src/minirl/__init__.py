"""minirl: verl's PPO/GRPO batch lifecycle, small enough to read in an afternoon."""

__version__ = "0.1.0"
