"""Reward: from a decoded response to a score on its last token."""
