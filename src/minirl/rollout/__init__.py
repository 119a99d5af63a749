"""Rollout backends: a policy that turns prompts into responses."""
