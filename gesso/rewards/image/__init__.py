"""Rewards for images: rules, OCR and networks, one reward per file."""
