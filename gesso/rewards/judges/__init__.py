"""Rewards that query a served model: chat judges and DeQA. They use transport's HTTP pool."""
