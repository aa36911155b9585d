"""Memory of a run of each family (`flow.py`, `tokens.py`), counted on torch's meta device
(`meta.py`), with replacements for functions that the device does not support (`functions.py`).
`gesso/estimate.py` adds it up."""
