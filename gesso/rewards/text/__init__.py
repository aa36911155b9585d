"""Scorers of text: rules on responses, one reward per file."""
