"""Rewards: interface and assembly here, rewards in image, text, judges; transport runs them."""
