"""Trackers, which log the metrics and samples of a run to other services: one class per service."""
