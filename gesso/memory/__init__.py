"""What a run of each family does with memory (`flow.py`, `tokens.py`), counted on torch's meta
device (`meta.py`), with replacements for what that device lacks (`functions.py`). `estimate.py`
above adds it up."""
