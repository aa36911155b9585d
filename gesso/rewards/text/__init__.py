"""Rewards for text: rules on responses, one reward per file."""
