"""Runs rewards: worker processes, HTTP clients and server, event loop, cache. No rewards here."""
