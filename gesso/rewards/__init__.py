"""Rewards: the interface and assembly here, scorers in image, text, judges; transport runs them."""
