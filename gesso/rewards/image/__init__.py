"""Scorers of images: rules, OCR and networks, one reward per file."""
