"""Rewards that ask a served model: chat judges and DeQA. They use the HTTP pool of transport."""
